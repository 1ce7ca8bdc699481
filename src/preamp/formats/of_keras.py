"""What Keras 3 and tf_keras save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from preamp.formats.base import Counting, Format, count, entries_of, plain

__all__ = ["Keras", "TfKeras"]


class TfKeras(Counting):
    """The variables of tf_keras's LossScaleOptimizer, and the argument beside them."""

    entries = ("current_loss_scale", "good_steps")
    INTERVAL = "dynamic_growth_steps"
    OF_THE_LAST_STEP = "last_"  # how variables of our adapters begin that tell of the last step only
    OF_OURS = "last_finite"
    ARGUMENTS = ("name", "inner_optimizer", "initial_scale", "loss_scale_factor")

    def settings(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        return {"growth_interval": count(saved, self.INTERVAL)} if self.INTERVAL in saved else {}

    def extras(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return what our adapter counts for its policy, whose state has other names for every rule."""
        if self.OF_OURS not in saved:
            return {}
        system = {*self.entries, self.INTERVAL, *self.ARGUMENTS}
        own = (name for name in saved if name not in system and not name.startswith(self.OF_THE_LAST_STEP))
        return {name: plain(saved[name]) for name in own}

    def save(self, state: Any, policy: Any) -> dict[str, Any]:
        return {**Counting.save(self, state, policy), self.INTERVAL: policy.growth_interval}


class Keras(TfKeras):
    """The same of Keras 3, by name or by the numbers that its files have; ours says more."""

    entries = ("dynamic_scale", "step_counter")
    NUMBERED = ("3", "2")  # after the iteration and the learning rate

    def find(self, saved: Any) -> Mapping[str, Any] | None:
        named = entries_of(saved)
        numbered = [named.get(name) for name in self.NUMBERED]
        if all(getattr(value, "shape", None) == () for value in numbered):
            return {**named, **dict(zip(self.entries, numbered, strict=True))}
        return Format.find(self, named)

    def bad(self, saved: Mapping[str, Any], policy: Any) -> int:
        return count(saved, "overflow_counter") if "overflow_counter" in saved else 0
