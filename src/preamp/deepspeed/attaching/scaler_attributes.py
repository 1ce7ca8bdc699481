"""A policy's state in the attributes of DeepSpeed's loss scaler, which checkpoints and monitors read.

The attributes are the source of truth: code may set them, or load a checkpoint into them, and the next step
uses the new values. They hold the whole state of DeepSpeed's own rules. For another policy they hold part of
it, and one more entry has the whole state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from preamp.deepspeed.attributes import BESIDE, COUNTS, RECORD, settings_of, state_of
from preamp.policy import Dynamic, Policy, Static

S = TypeVar("S", bound=Any)  # the policy's state
UNUSED = {"delayed_shift": 1, "cur_hysteresis": 1}  # stage 0 counts no hysteresis


class ScalerAttributes(Generic[S]):
    """A policy, and the conversion of its state to and from DeepSpeed's names.

    Attributes:
        settings: the policy's settings under DeepSpeed's names; for a rule that DeepSpeed does not have,
            the closest equivalents.
    """

    def __init__(self, policy: Policy[S]) -> None:
        self.policy, self.settings = policy, settings_of(policy)

    def first(self) -> dict[str, Any]:
        """Return the attributes before the first step."""
        clock = {"cur_iter": 0, "last_overflow_iter": -1}
        state = self.policy.start()
        return self._with_record({**self.settings, **clock, **self._moved(state)}, state)

    def read(self, saved: Mapping[str, Any]) -> S:
        """Return the policy's state, from the attributes by name."""
        record = saved.get(RECORD)
        if record is not None and record[BESIDE] == _counts(saved):
            known = self.policy.start()._asdict()
            return self._replaced(**{name: record[name] for name in known if name in record})
        return self._read_counts(saved)

    def written(self, saved: Mapping[str, Any], after: S, finite: bool) -> dict[str, Any]:
        """Return the attributes after a step."""
        now = saved.get("cur_iter", 0)
        last = saved.get("last_overflow_iter", -1) if finite else now
        clock = {"cur_iter": now + 1, "last_overflow_iter": last}
        return self._with_record({**self.settings, **clock, **self._moved(after)}, after)

    def overflows_left(self, state: S) -> int | None:
        """Return how many overflows it takes until the scale backs off; None where that is not counted."""
        return self.policy.overflows_left(state) if isinstance(self.policy, Dynamic) else None

    def _moved(self, state: S) -> dict[str, Any]:
        return {"cur_scale": state.scale, "cur_hysteresis": self.overflows_left(state) or 1}

    def _read_counts(self, saved: Mapping[str, Any]) -> S:
        if isinstance(self.policy, Dynamic) and saved.get("last_overflow_iter") is not None:
            return self._replaced(**state_of({**UNUSED, **saved}, self.policy)._asdict())
        return self._replaced(
            **({} if isinstance(self.policy, Static) else {"scale": float(saved["cur_scale"])})
        )

    def _replaced(self, **numbers: float) -> S:
        """Return the policy's first state with other numbers."""
        state: S = self.policy.start()._replace(**numbers)
        return state

    def _with_record(self, saved: dict[str, Any], state: S) -> dict[str, Any]:
        if self._decisive(self._read_counts(saved)) != self._decisive(state):
            saved[RECORD] = {BESIDE: _counts(saved), **state._asdict()}
        return saved

    def _decisive(self, state: S) -> Any:
        """Return what the policy's next moves depend on."""
        if isinstance(self.policy, Static):
            return self.policy.scale
        if isinstance(self.policy, Dynamic):
            return state._replace(bad=self.policy.overflows_left(state))
        return state


def _counts(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {name: saved[name] for name in COUNTS if name in saved}
