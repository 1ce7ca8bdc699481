"""The formats of Keras 3 and tf_keras."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from preamp.policy import FloorState, HeadroomState, LogMaxState, State, TolerantState
from preamp.systems.formats.base import Counting, Format, count, entries_of, number

STATES = (FloorState, HeadroomState, LogMaxState, TolerantState)
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

    def save(self, state: Any, policy: Any) -> dict[str, Any]:
        return {**Counting.save(self, state, policy), self.INTERVAL: policy.growth_interval}


class Keras(TfKeras):
    """The same of Keras 3, by name or by the numbers in its files; preamp adds a counter."""

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
