"""preamp: loss scaling that tells you what it did.

The names here need no framework. The adapters are modules: `from preamp.torch import GradScaler`.
"""

from sys import modules as _modules

from preamp import guards
from preamp.autocasting import tables as casting
from preamp.errors import (
    CastingError,
    CheckpointError,
    ConfigError,
    DataError,
    InexactScale,
    MissingExtra,
    PolicyError,
    PreampError,
    ScaleExhausted,
    TraceError,
    UsageError,
)
from preamp.policy import (
    Compat,
    Dynamic,
    Headroom,
    HeadroomState,
    Moving,
    Policy,
    Reading,
    State,
    Static,
    Tolerant,
    TolerantState,
)
from preamp.record.exponents import Band, ExponentHistogram
from preamp.record.snapshots import QuantizedRow, Snapshot, SnapshotRow
from preamp.record.trace import Summary, Trace
from preamp.scaling import Spike, Step
from preamp.simulation import processes
from preamp.simulation.simulate import simulate
from preamp.systems import dialects

__all__ = [
    "Band",
    "CastingError",
    "CheckpointError",
    "Compat",
    "ConfigError",
    "DataError",
    "Dynamic",
    "ExponentHistogram",
    "Headroom",
    "HeadroomState",
    "InexactScale",
    "MissingExtra",
    "Moving",
    "Policy",
    "PolicyError",
    "PreampError",
    "QuantizedRow",
    "Reading",
    "ScaleExhausted",
    "Snapshot",
    "SnapshotRow",
    "Spike",
    "State",
    "Static",
    "Step",
    "Summary",
    "Tolerant",
    "TolerantState",
    "Trace",
    "TraceError",
    "UsageError",
    "__version__",
    "casting",
    "dialects",
    "guards",
    "processes",
    "simulate",
]

__version__ = "0.3.0.dev0"

# These modules are in other packages. With this, `import preamp.processes` finds them too.
_modules.update({"preamp.casting": casting, "preamp.dialects": dialects, "preamp.processes": processes})
