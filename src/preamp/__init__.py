"""preamp: loss scaling that tells you what it did.

The names here need no framework. The adapters are modules: `from preamp.torch import GradScaler`.
"""

from preamp import casting, dialects
from preamp.errors import (
    CastingError,
    CheckpointError,
    ConfigError,
    DataError,
    InexactScale,
    LossyConversion,
    MissingExtra,
    PolicyError,
    PreampError,
    Starved,
    TraceError,
    UsageError,
)
from preamp.policy import Dynamic, Moving, Policy, Reading, State, Static, Tolerant, TolerantState
from preamp.simulate import simulate
from preamp.trace import Step, Summary, Trace

__all__ = [
    "CastingError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Dynamic",
    "InexactScale",
    "LossyConversion",
    "MissingExtra",
    "Moving",
    "Policy",
    "PolicyError",
    "PreampError",
    "Reading",
    "Starved",
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
    "simulate",
]

__version__ = "0.1.0.dev0"
