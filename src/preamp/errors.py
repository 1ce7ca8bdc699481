"""Exceptions and warnings. Every message names the value, why it cannot work, and what to write instead.

```
PreampError
├── PolicyError     (ValueError)    an invalid setting of a policy
├── CastingError    (ValueError)    an invalid operator table
├── ConfigError     (ValueError)    an invalid configuration, with the key or the line
├── ScaleExhausted  (RuntimeError)  the scale is at its floor and the gradients still overflow
├── UsageError      (RuntimeError)  a call with an invalid argument, or at the wrong time
├── TraceError      (ValueError)    a trace file that cannot be read, with the line
├── CheckpointError (ValueError)    a checkpoint that cannot be read
├── DataError       (ValueError)    a user's table that cannot be trained on, with the line
└── MissingExtra    (ImportError)   an optional dependency is absent or too old, with what installs it

UserWarning
├── InexactScale                   a scale or factor that is not a power of two: it rounds every gradient
└── UnscaledFloat16                float16 autocast trains without a loss scaler, and gradients underflow
```
"""

from __future__ import annotations

import math
import re
import shlex
from typing import Self

__all__ = [
    "CastingError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "InexactScale",
    "MissingExtra",
    "PolicyError",
    "PreampError",
    "ScaleExhausted",
    "TraceError",
    "UnscaledFloat16",
    "UsageError",
]


class PreampError(Exception):
    """The root: `except PreampError` catches everything this library raises on purpose."""


class PolicyError(PreampError, ValueError):
    """An invalid setting of a policy."""


class CastingError(PreampError, ValueError):
    """An invalid operator table."""


class ConfigError(PreampError, ValueError):
    """An invalid configuration."""


class ScaleExhausted(PreampError, RuntimeError):
    """The scale cannot be lowered any more and the gradients still overflow.

    Attributes:
        scale: the loss scale in use on the step that overflowed.
        overflows: how many overflows were counted, this one included: in a row, unless the
            policy's `hysteresis_reset` says otherwise.
    """

    def __init__(self, message: str, *, scale: float = math.nan, overflows: int = 0) -> None:
        super().__init__(message)
        self.scale = scale
        self.overflows = overflows


class UsageError(PreampError, RuntimeError):
    """A call with an invalid argument, or at the wrong time."""


class TraceError(PreampError, ValueError):
    """A trace file that cannot be read."""


class CheckpointError(PreampError, ValueError):
    """A checkpoint that cannot be read."""


class DataError(PreampError, ValueError):
    """A table that cannot be trained on."""


class MissingExtra(PreampError, ImportError):
    """An optional dependency is absent or too old."""

    @classmethod
    def of(cls, error: ImportError, install: str | None = None) -> Self:
        """Return the error that says what could not be imported, and how to install it.

        Args:
            error: what was raised.
            install: what brings it, as pip calls it. None: the package itself.
        """
        return cls(f"{error.name} is missing. Run: pip install {shlex.quote(install or str(error.name))}")

    @classmethod
    def refuse_older(cls, name: str, found: str, least: str) -> None:
        """Refuse a release that is too old.

        Args:
            name: what it is a release of, as pip calls it.
            found: the release that is installed, such as "2.6.0+cpu".
            least: the oldest that works, such as "2.6". Its development versions do.

        Raises:
            MissingExtra: for one that is older, with the line that installs another.
        """
        numbers = [int(number) for number in re.findall(r"\d+", found)]
        if numbers < [int(number) for number in least.split(".")]:
            raise cls(
                f"{name} {found} is too old: preamp works with {least} and newer. "
                f"Run: pip install {shlex.quote(f'{name}>={least}')}"
            )


class InexactScale(UserWarning):
    """A scale or factor that is not a power of two: multiplying and dividing by the scale rounds."""


class UnscaledFloat16(UserWarning):
    """float16 autocast trains without a loss scaler, and gradients underflow: given once in a process.

    `warnings.filterwarnings("ignore", category=preamp.errors.UnscaledFloat16)` silences it.
    """
