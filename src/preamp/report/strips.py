"""Rows of small pictures, and one picture of them with the loss scale below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from preamp.record.files import naming
from preamp.report.drawing import in_style
from preamp.report.figures import Curve, draw_scale

INCHES = (8.0, 5.6)
DOTS_PER_INCH = 160


@dataclass(frozen=True)
class Strip:
    """A row of small pictures with a name.

    Attributes:
        name: the text beside it.
        pictures: gray levels from 0 (white) to 1 (black), of shape (pictures, height, width).
    """

    name: str
    pictures: NDArray[np.float32]


def side_by_side(pictures: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return pictures of shape (pictures, height, width) as one, with a blank line around each."""
    return np.hstack(list(np.pad(pictures, ((0, 0), (1, 1), (1, 1)))))


@in_style
def write_picture(path: str | Path, strips: Sequence[Strip], curve: Curve) -> None:
    """Write the strips, and below them the loss scale of one run, as a PNG for a page or a slide.

    Args:
        path: the file to write. Missing folders are made.
        strips: one or more.
        curve: a run with a loss scale.

    Raises:
        OSError: naming the file, if it cannot be written.
    """
    figure = Figure(figsize=INCHES, layout="constrained", facecolor="white")
    *rows, below = figure.subplots(len(strips) + 1, height_ratios=[1.0] * len(strips) + [3.0])
    for axes, strip in zip(rows, strips, strict=True):
        axes.imshow(side_by_side(strip.pictures), cmap="gray_r", vmin=0.0, vmax=1.0, aspect="equal")
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_ylabel(strip.name, rotation=0, ha="right", va="center")
    draw_scale(below, curve, {"color": curve.color})
    below.set_title(f"loss scale of {curve.name} (\u25be skipped step)", loc="left", fontsize=10.5)
    below.set_xlabel("step")
    with naming(Path(path)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DOTS_PER_INCH, bbox_inches="tight", metadata={"Software": None})
