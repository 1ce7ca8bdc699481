"""The formats of Keras 3 and tf_keras."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from preamp.errors import CheckpointError
from preamp.policy import HeadroomState, State, TolerantState
from preamp.systems.formats.base import (
    Counting,
    Format,
    GuardState,
    count,
    entries_of,
    guard_state,
    number,
)

STATES = (HeadroomState, TolerantState)
MEMORY = sorted({name for kind in STATES for name in kind._fields}.difference(State._fields))  # as variables


class TfKeras(Counting):
    """The variables of tf_keras's LossScaleOptimizer, and its argument."""

    entries = ("current_loss_scale", "good_steps")
    INTERVAL = "dynamic_growth_steps"

    def settings(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        return {"growth_interval": count(saved, self.INTERVAL)} if self.INTERVAL in saved else {}

    def remembered(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        ours = {name: number(saved, name) for name in MEMORY if name in saved}
        policy = entries_of(saved.get("policy"))
        return {"policy": policy["class"], **ours} if "class" in policy else ours

    def guards(self, saved: Mapping[str, Any]) -> list[GuardState]:
        state = nested_guard(saved)
        return [guard_state(state)] if state else []

    def with_guards(self, saved: Mapping[str, Any], guards: list[GuardState]) -> dict[str, Any] | None:
        return {**saved, **_flat("guard", guards[0])} if len(guards) == 1 else None

    def save(self, state: Any, policy: Any) -> dict[str, Any]:
        return {**Counting.save(self, state, policy), self.INTERVAL: policy.growth_interval}


class Keras(TfKeras):
    """The variables of Keras 3's, by name or by the numbers in its files; preamp adds a counter."""

    entries = ("dynamic_scale", "step_counter")
    NUMBERED = ("3", "2")  # after the iteration and the learning rate

    def find(self, saved: object) -> Mapping[str, Any] | None:
        named = entries_of(saved)
        numbered = [named.get(name) for name in self.NUMBERED]
        if all(getattr(value, "shape", None) == () for value in numbered):
            return {**named, **dict(zip(self.entries, numbered, strict=True))}
        return Format.find(self, named)

    def bad(self, saved: Mapping[str, Any], policy: object) -> int:
        return count(saved, "overflow_counter") if "overflow_counter" in saved else 0


def nested_guard(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a guard's state for variables by name, such as "guard.loss.level"; empty if there are none."""
    state: dict[str, Any] = {}
    for name, value in saved.items():
        parts = str(name).split(".")
        if parts[0] == "guard" and len(parts) > 1:
            inside: Any = state
            for part in parts[1:-1]:
                inside = inside.setdefault(part, {})
                if not isinstance(inside, dict):
                    raise CheckpointError(
                        f"the saved {name} is inside a number. Leave it out to start again."
                    )
            inside[parts[-1]] = value
    return state


def _flat(name: str, state: Any) -> dict[str, Any]:
    """Return names and values of variables for the part of a guard's state that has this name."""
    if not isinstance(state, Mapping):
        return {name: state}
    return {
        key: value for inner, part in state.items() for key, value in _flat(f"{name}.{inner}", part).items()
    }
