"""The rules that decide whether a step whose gradients are finite is taken: a guard against spikes.

A guard receives the loss and the norm of the gradients before the update, and skips the step if one of them
is far above its recent values. Like a policy it is Python operators plus an injected ``where``, so one rule
runs on Python floats, NumPy, torch, JAX and TensorFlow. `SpikeGuard` is the one to use; `OLMO`, `LEVANTER`,
`MAXTEXT` and `MEGATRON_NORM` decide as those systems do, pitfalls included.
"""

from typing import Any

from preamp.guards.base import Guard, Verdict
from preamp.guards.norm_limit import NormLimit
from preamp.guards.spike_guard import SpikeGuard, SpikeState, Track
from preamp.guards.systems import (
    ALL,
    LEVANTER,
    MAXTEXT,
    MEGATRON_NORM,
    OLMO,
    GuardDialect,
    NormThreshold,
    Rolling,
)

__all__ = [
    "ALL",
    "LEVANTER",
    "MAXTEXT",
    "MEGATRON_NORM",
    "OLMO",
    "Guard",
    "GuardDialect",
    "NormLimit",
    "NormThreshold",
    "Rolling",
    "SpikeGuard",
    "SpikeState",
    "Track",
    "Verdict",
]

# By the names that a saved model and a trace have for them.
RULES: dict[str, type[Guard[Any]] | GuardDialect[...]] = {
    **{rule.__name__: rule for rule in (SpikeGuard, NormLimit, NormThreshold, Rolling)},
    **{dialect.name: dialect for dialect in ALL},
}
