"""Register the types of a state with `jax.export`, so that a compiled step can be saved and loaded."""

from __future__ import annotations

import contextlib
import json
from typing import Any, NoReturn

from jax import export

from preamp import policy
from preamp.errors import PolicyError
from preamp.jax.scaling.loss_scale import LossScale
from preamp.jax.scaling.states import LossScaledState
from preamp.jax.trees import FlowSlot
from preamp.policy import Policy
from preamp.policy.registry import from_json, to_json


def register() -> None:
    """Register the types of this library, and no other: optax's states are the user's to register.

    A type that has been registered before stays as it is.
    """
    states = [getattr(policy, name) for name in policy.__all__ if name.endswith("State")]
    for kind in [LossScaledState, *states]:
        with contextlib.suppress(ValueError):
            export.register_namedtuple_serialization(kind, serialized_name=f"preamp.{kind.__name__}")
    with contextlib.suppress(ValueError):
        export.register_pytree_node_serialization(
            FlowSlot,
            serialized_name="preamp.FlowSlot",
            serialize_auxdata=lambda _: b"",
            deserialize_auxdata=lambda _: None,
        )
    with contextlib.suppress(ValueError):
        export.register_pytree_node_serialization(
            LossScale,
            serialized_name="preamp.LossScale",
            serialize_auxdata=lambda rule: json.dumps(to_json(rule, _unnamed, _unknown)).encode(),
            deserialize_auxdata=lambda saved: from_json(json.loads(bytes(saved)), _unknown),
        )


def _unnamed(kind: type[Policy[Any]]) -> NoReturn:
    raise PolicyError(
        f"a LossScale with a {kind.__name__} cannot be exported, because the class could not be found again. "
        "Write jax.export of a function of its state, loss_scale.state, and make LossScale(policy, state) "
        "inside."
    )


def _unknown(_: str) -> None:
    """Find no classes except those of this library."""
