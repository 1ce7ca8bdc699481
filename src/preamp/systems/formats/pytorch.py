"""The formats of PyTorch's scaler and of the scalers of libraries on PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from preamp.checks import shown
from preamp.errors import CheckpointError
from preamp.policy import TolerantState
from preamp.systems.formats.base import (
    Counting,
    Format,
    GuardState,
    backoff_factor,
    count,
    entries_of,
    guard_state,
    hysteresis,
    number,
    numbers,
    overflows_left,
)

OURS = "preamp_state"  # the entry that `preamp.torch` adds


class Torch(Counting):
    """`GradScaler.state_dict()`. With `preamp.torch` it has one more entry, "preamp_state"."""

    entries: ClassVar[tuple[str, ...]] = (
        "scale",
        "_growth_tracker",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
    )

    def settings(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "growth_factor": number(saved, "growth_factor"),
            "backoff_factor": number(saved, "backoff_factor"),
            "growth_interval": count(saved, "growth_interval"),
        }

    def bad(self, saved: Mapping[str, Any], policy: object) -> int:
        ours = self.remembered(saved)
        return count(ours, "bad") if "bad" in ours else 0

    def remembered(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        return numbers(saved.get(OURS), without=("guard", "guard_of"))

    def with_remembered(self, saved: dict[str, Any], remembered: Mapping[str, Any]) -> dict[str, Any] | None:
        return {**saved, OURS: dict(remembered)}  # PyTorch's own scaler ignores it

    def guards(self, saved: Mapping[str, Any]) -> list[GuardState]:
        states = entries_of(saved.get(OURS)).get("guard", [])
        if not isinstance(states, list | tuple):
            raise CheckpointError(
                f"the saved guard={shown(states)} is not a list of states. Leave it out to start again."
            )
        return list(map(guard_state, states))

    def with_guards(self, saved: Mapping[str, Any], guards: list[GuardState]) -> dict[str, Any] | None:
        return {**saved, OURS: {**saved.get(OURS, {}), "guard": guards}}

    def save(self, state: Any, policy: Any) -> dict[str, Any]:
        return {
            **Counting.save(self, state, policy),
            "growth_factor": policy.growth_factor,
            "backoff_factor": backoff_factor(policy),
            "growth_interval": policy.growth_interval,
        }


class Nemo(Torch):
    """PyTorch's format plus the overflows left, which NeMo writes under one name and reads under another."""

    entries = (*Torch.entries, "_hysteresis_tracker")

    def bad(self, saved: Mapping[str, Any], policy: object) -> int:
        return hysteresis(policy) - count(saved, "_hysteresis_tracker")

    def with_remembered(self, saved: dict[str, Any], remembered: Mapping[str, Any]) -> None:
        return None

    def with_guards(self, saved: Mapping[str, Any], guards: list[GuardState]) -> None:
        return None

    def save(self, state: object, policy: object) -> dict[str, Any]:
        left = overflows_left(policy, state)
        read = {"_hysterisis_tracker": left}
        return {**Torch.save(self, state, policy), "_hysteresis_tracker": left, **read}


class Megatron(Counting):
    """`DynamicGradScaler.state_dict()`. The settings come from the command line and are not saved."""

    entries = ("scale", "growth_tracker", "hysteresis_tracker")

    def bad(self, saved: Mapping[str, Any], policy: object) -> int:
        return hysteresis(policy) - count(saved, "hysteresis_tracker")

    def save(self, state: object, policy: object) -> dict[str, Any]:
        left = overflows_left(policy, state)
        return {**Counting.save(self, state, policy), "hysteresis_tracker": left}


class Apex(Counting):
    """`amp.state_dict()`, with an entry for every loss."""

    entries = ("loss_scale", "unskipped")

    def find(self, saved: object) -> Mapping[str, Any] | None:
        scalers = [value for name, value in entries_of(saved).items() if str(name).startswith("loss_scaler")]
        if len({tuple(number(entries_of(one), name) for name in self.entries) for one in scalers}) > 1:
            raise CheckpointError(
                f"{len(scalers)} losses have scales that differ. Write saved['loss_scaler0'] for one."
            )
        return Format.find(self, scalers[0] if scalers else saved)

    def save(self, state: object, policy: object) -> dict[str, Any]:
        return {"loss_scaler0": Counting.save(self, state, policy)}


class Fairseq(Format):
    """`FP16Optimizer.state_dict()`, in which only the scale comes from the scaler."""

    entries = ("loss_scale",)

    def state(self, saved: Mapping[str, Any], policy: object) -> TolerantState:
        return TolerantState(number(saved, "loss_scale"), 0.0, 0.0, 0.0)

    def save(self, state: Any, policy: Any) -> dict[str, Any]:
        return {"loss_scale": state.scale}
