"""The formats of flax and jmp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from preamp.systems.formats.base import Counting, count, number


class Flax(Counting):
    """`flax.serialization.to_state_dict` of a DynamicScale, or the DynamicScale itself."""

    entries = ("scale", "fin_steps")

    def settings(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        if "growth_interval" not in saved:
            return {}
        return {
            "growth_factor": number(saved, "growth_factor"),
            "backoff_factor": number(saved, "backoff_factor"),
            "growth_interval": count(saved, "growth_interval") + 1,
            "min_scale": _floor(saved, "minimum_scale"),
        }


class Jmp(Counting):
    """A DynamicLossScale, or its fields by name; as a tree it has no `min_loss_scale`."""

    entries = ("loss_scale", "counter")

    def settings(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        known: dict[str, Any] = {}
        if "period" in saved:
            known["growth_interval"] = count(saved, "period")
        if "factor" in saved:
            known["growth_factor"] = number(saved, "factor")
        if "min_loss_scale" in saved:
            known["min_scale"] = _floor(saved, "min_loss_scale")
        return known

    def compat(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        factor = number(saved, "factor") if "factor" in saved else 0.0
        return {"backoff_divisor": factor} if factor > 1.0 else {}  # others are refused as a growth_factor

    def save(self, state: Any, policy: Any) -> dict[str, Any]:
        return {
            **Counting.save(self, state, policy),
            "period": policy.growth_interval,
            "factor": policy.growth_factor,
            "min_loss_scale": policy.min_scale or 0.0,
        }


def _floor(saved: Mapping[str, Any], name: str) -> float | None:
    return None if saved.get(name) is None else number(saved, name) or None  # no scale is below 0
