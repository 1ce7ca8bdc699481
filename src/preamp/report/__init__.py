"""Draw traces as figures, and write the report, a single HTML file."""

from preamp.errors import MissingExtra

try:
    import matplotlib as _  # noqa: F401  # only to say what is missing
except ImportError as error:
    raise MissingExtra.of(error, "preamp[report]") from error

from preamp.report.effects import effects_figure
from preamp.report.figures import Curve, loss_figure, scale_figure, zeros_figure
from preamp.report.heat import heat_figure
from preamp.report.html import write_report
from preamp.report.strips import Strip, write_picture

__all__ = [
    "Curve",
    "Strip",
    "effects_figure",
    "heat_figure",
    "loss_figure",
    "scale_figure",
    "write_picture",
    "write_report",
    "zeros_figure",
]
