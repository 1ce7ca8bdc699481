"""Register the types of a state with `jax.export`, so that a compiled step can be saved and loaded."""

from __future__ import annotations

import contextlib
from itertools import chain
from typing import Any

from jax import export

from preamp import policy
from preamp.guards import ALL, Guard, NormLimit, SpikeGuard
from preamp.jax.scaling.states import LossScaledState, PendingState
from preamp.jax.trees import FlowSlot, RecipeScales
from preamp.scaling import GuardRecord


def register() -> None:
    """Register the types of this library only. The user registers optax's states.

    A type that has already been registered is left alone.
    """
    states = [getattr(policy, name) for name in policy.__all__ if name.endswith("State")]
    guards: list[Guard[Any]] = [SpikeGuard(), NormLimit(), *ALL]
    guarded = [_kinds_in(guard.start()) for guard in guards]
    for kind in dict.fromkeys([LossScaledState, PendingState, *states, GuardRecord, *chain(*guarded)]):
        with contextlib.suppress(ValueError):
            export.register_namedtuple_serialization(kind, serialized_name=f"preamp.{kind.__name__}")
    for node in (FlowSlot, RecipeScales):
        with contextlib.suppress(ValueError):
            export.register_pytree_node_serialization(
                node,
                serialized_name=f"preamp.{node.__name__}",
                serialize_auxdata=lambda _: b"",
                deserialize_auxdata=lambda _: (),
            )


def _kinds_in(state: Any) -> list[type[Any]]:
    """Return the types of nested NamedTuples."""
    parts = [part for part in state if hasattr(part, "_fields")]
    return [type(state), *chain(*map(_kinds_in, parts))]
