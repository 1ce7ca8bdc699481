"""The policy's state: on the host as floats, or on a device as tensors.

On a CPU, and where a flag is read at every step anyway, the policy advances on Python floats (`HostScale`).
Where nothing is read, its state is tensors and it advances there (`DeviceScale`). Both keep PyTorch's two
tensors, `_scale` and `_growth_tracker`, equal to the state, and adopt what other code writes into them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from preamp.arrays.torch import Stamp
from preamp.arrays.torch_compat import amp_update_scale_
from preamp.checks import FLOAT32_MAX, is_number, shown, to_float32
from preamp.errors import InexactScale, PolicyError
from preamp.policy import Compat, Dynamic, Policy, Reading
from preamp.scaling import Measured, ScalerState, advance, start
from preamp.systems.arguments import given_policy

SETTINGS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
MOST_STEPS = 2**63  # of an int64


class HostScale:
    """A policy's state in Python floats.

    Args:
        policy: the rule in force.
        state: of the scaler; None to start.

    Attributes:
        policy: the rule in force.
        state: of the scaler, in Python numbers.
        tensor: the scale as a 0-dim float32 tensor, for the loss; None until `place`.
    """

    on_device: ClassVar[bool] = False

    def __init__(self, policy: Policy[Any], state: ScalerState[Any, float] | None = None) -> None:
        self.policy = policy
        self.state = start(policy) if state is None else state
        self.tensor: Tensor | None = None
        self._tracker: Tensor | None = None
        self._stamps: tuple[Stamp | None, ...] = ()

    def place(self, device: torch.device) -> None:
        """Make the tensor that the loss is multiplied by."""
        self.tensor = torch.full((), self.now.scale, dtype=torch.float32, device=device)
        self._stamp()

    @property
    def now(self) -> Any:
        """The policy's state."""
        return self.state.policy_state

    @property
    def steps(self) -> Any:
        """Steps taken or skipped."""
        return self.state.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.state = self.state._replace(steps=steps)

    @property
    def scale(self) -> float:
        """The scale in force, as PyTorch's `_init_scale` or `_scale` gives it. May read a device."""
        if self.tensor is not None and self._may_be_written():
            return float(self.tensor.item())
        return float(self.now.scale)

    @property
    def good(self) -> int:
        """Clean steps since the last overflow or growth. May read a device."""
        if self._tracker is not None and self._may_be_written():
            return int(self._tracker.item())
        return int(self.now.good)

    @property
    def tracker(self) -> Tensor | None:
        """PyTorch's growth tracker, 0-dim int32; made when it is first asked for."""
        if self._tracker is None and self.tensor is not None:
            self._tracker = torch.full((), int(self.now.good), dtype=torch.int32, device=self.tensor.device)
            self._stamp()
        return self._tracker

    @tracker.setter
    def tracker(self, tracker: Tensor | None) -> None:
        self._tracker = tracker

    def floats(self) -> Any:
        """Return the policy's state as floats."""
        return self.now

    def snapshot(self) -> float:
        """Return the scale as it is now."""
        return float(self.now.scale)

    def adopt(self) -> None:
        """Take over what other code wrote into PyTorch's tensors: that scale was in the loss.

        Raises:
            PolicyError: for a scale that would turn gradients into 0, inf or NaN.
        """
        now = self.state.policy_state
        if not 0.0 < now.scale < math.inf:
            self.policy.restore({"scale": now.scale})  # raises: the policy has let it fall to 0
        # On a CPU a read is free, and finds writes through `.data` and NumPy too.
        if self.tensor is None or not (self.tensor.is_cpu or self._may_be_written()):
            return
        scale = self.tensor.item()
        good = now.good if self._tracker is None else float(self._tracker.item())
        changed = scale != now.scale or good != now.good
        if changed:
            self.policy.restore({"scale": scale, "good": good})  # raises for what would ruin gradients
            self.state = self.state._replace(policy_state=now._replace(scale=scale, good=good))
        if changed or not self.tensor.is_cpu:
            self._stamp()

    def advance(self, measured: Measured[Any], *, counts: bool = True) -> tuple[float, bool]:
        """Advance by one step; return the scale after it, and whether the policy gave up on the step.

        Args:
            measured: in the step.
            counts: whether an optimizer has stepped, or skipped. If not, the scale alone moves.

        Raises:
            PolicyError: if the policy uses what was not measured. The state is not changed.
        """
        self.adopt()
        before = self.state.policy_state
        state, gave_up = advance(self.policy, self.state, measured)
        after = state.policy_state
        self.state = state if counts else self.state._replace(policy_state=after)
        if self.tensor is not None and (after.scale != before.scale or self._tracker is not None):
            self._write(after)
        return after.scale, bool(gave_up)

    def hold(self, measured: Measured[Any]) -> float:
        """Count a step that a guard has skipped; return the scale, which stays."""
        self.adopt()
        self.state = self.state._replace(
            last_scale=measured.scale,
            finite=True,
            grad_norm=measured.grad_norm,
            peak=measured.peak,
            steps=self.state.steps + 1,
            skipped_steps=self.state.skipped_steps + 1,
        )
        return float(self.now.scale)

    def set_policy(self, policy: Policy[Any]) -> None:
        """Put another policy in force; the state stays."""
        self.policy = policy

    def set(self, **numbers: float) -> None:
        """Set fields of the policy's state."""
        self.set_state(self.now._replace(**numbers))

    def set_state(self, policy_state: Any) -> None:
        """Resume from another state of the policy, in floats."""
        self.state = self.state._replace(policy_state=policy_state)
        if self.tensor is not None:
            self._write(policy_state)

    def to_host(self) -> HostScale:
        return self

    def to_device(self) -> HostScale | DeviceScale:
        """Return the same state as tensors where the scale's tensor is, if there is one. Nothing is read."""
        return self if self.tensor is None else DeviceScale(self, self.tensor, self._tracker)

    def without_tensors(self) -> HostScale:
        """Return a copy without tensors, for pickling."""
        policy_state = self.now._replace(scale=self.scale, good=float(self.good))
        return HostScale(self.policy, self.state._replace(policy_state=policy_state))

    def _write(self, policy_state: Any) -> None:
        """Make PyTorch's tensors equal to the state."""
        assert self.tensor is not None  # the caller asked
        self.tensor.fill_(policy_state.scale)
        if self._tracker is not None:
            self._tracker.fill_(int(policy_state.good))
        self._stamp()

    def _stamp(self) -> None:
        self._stamps = _stamps(self._stamps, self.tensor, self._tracker)

    def _may_be_written(self) -> bool:
        """Return whether other code may have written to PyTorch's tensors; not needed on a CPU."""
        on_cpu = self.tensor is not None and self.tensor.is_cpu
        return on_cpu or not _fit(self._stamps, self.tensor, self._tracker)


class DeviceScale:
    """A policy's state in 0-dim float32 tensors, which nobody reads. Its tensors are written in place.

    Args:
        host: the state on the host.
        tensor: the scale, which stays the tensor for the loss.
        tracker: PyTorch's growth tracker, if there is one.

    Attributes:
        policy: the rule in force.
        state: of the policy.
        steps: steps taken or skipped.
        tensor: the scale in the state, unless other code has put another tensor in its place.
    """

    on_device: ClassVar[bool] = True

    def __init__(self, host: HostScale, tensor: Tensor, tracker: Tensor | None) -> None:
        self.policy = host.policy
        self.steps: Any = host.steps
        tensors = [torch.full((), value, dtype=torch.float32, device=tensor.device) for value in host.now]
        self.state: Any = type(host.now)(*tensors)._replace(scale=tensor)
        self.tensor: Tensor | None = tensor
        self._tracker = tracker
        self._by_kernel = _kernel_agrees(host.policy, host.now)
        self._stamps = host._stamps  # other code may have written since

    def place(self, device: torch.device) -> None:
        """Put the tensor back that other code has taken away; it stays where it was."""
        self.tensor = self.state.scale

    @property
    def scale(self) -> float:
        """The scale in force. Reads the device."""
        scale = self.state.scale if self.tensor is None else self.tensor
        return float(scale.item())

    @property
    def good(self) -> int:
        """Clean steps since the last overflow or growth. Reads the device."""
        if self._tracker is not None and self._is_written():
            return int(self._tracker.item())
        return int(self.state.good)

    @property
    def tracker(self) -> Tensor | None:
        """PyTorch's growth tracker, 0-dim int32; made when it is first asked for. Nothing is read."""
        if self._tracker is None:
            self._tracker = self.state.good.to(torch.int32)
            self._stamp()
        return self._tracker

    @tracker.setter
    def tracker(self, tracker: Tensor | None) -> None:
        self._tracker = tracker

    def floats(self) -> Any:
        """Return the policy's state as floats, with one read."""
        return type(self.state)(*torch.stack(list(self.state)).tolist())

    def snapshot(self) -> Tensor:
        """Return the scale as it is now, as a tensor that does not change."""
        scale: Tensor = self.state.scale
        return scale.clone()

    def adopt(self) -> None:
        """Take over what other code wrote into PyTorch's tensors. Nothing is read."""
        written = self._is_written()
        self._by_kernel = self._by_kernel and not written
        if self.tensor is not None and self.tensor is not self.state.scale:
            self.state.scale.copy_(self.tensor)
            self.tensor = self.state.scale
        if self._tracker is not None and written:
            self.state.good.copy_(self._tracker)
        self._stamp()

    def advance(
        self,
        measured: Measured[Any],
        found_inf: Tensor | None = None,
        held: Tensor | None = None,
        *,
        counts: bool | Tensor = True,
    ) -> tuple[Tensor, bool]:
        """Advance by one step, in place; return a `snapshot` of the scale after it, and False.

        `scaling.advance` would do, at thirty kernel launches. PyTorch's own kernel has the usual settings.

        Args:
            measured: in the step.
            found_inf: the opposite of `measured.finite` as a float32 where the state is, if that is at hand.
            held: whether a guard has skipped the step, which then leaves the state as it is.
            counts: whether it counts as a step.

        Raises:
            PolicyError: if the policy uses what was not measured. The state is not changed.
        """
        self.adopt()
        # Not `measured.reading`: the compiler of PyTorch 2.6 knows no properties of a NamedTuple.
        peak = None if measured.peak is None else self._here(measured.peak)
        reading = Reading(self._here(measured.finite), peak)
        before = None if held is None else [number.clone() for number in self.state]
        new_scale = self._advance(reading, found_inf)
        if before is not None:
            for old, new in zip(before, self.state, strict=True):
                new.copy_(torch.where(self._here(held), old, new))  # type: ignore[arg-type]
            self._mirror()
            new_scale = self.snapshot()
        self.steps += counts
        return new_scale, False

    def _advance(self, reading: Reading, found_inf: Tensor | None) -> Tensor:
        if self._by_kernel and not torch.compiler.is_compiling():
            if found_inf is None:
                found_inf = reading.finite.logical_not().to(torch.float32)
            try:
                self._advance_by_kernel(found_inf)
                return self.snapshot()
            except NotImplementedError:  # some backends have no such kernel; nothing has moved
                self._by_kernel = False
        after = self.policy.advance(self.state, reading, torch.where)
        for old, new in zip(self.state, _apart(after, self.state), strict=True):
            old.copy_(new)
        self._mirror()
        return self.snapshot()

    def set_policy(self, policy: Policy[Any]) -> None:
        """Put another policy in force; the state stays."""
        self.policy, self._by_kernel = policy, False

    def set(self, **numbers: float) -> None:
        """Set fields of the policy's state."""
        self._by_kernel = False
        for name, number in numbers.items():
            getattr(self.state, name).fill_(number)
        self._mirror()

    def set_state(self, policy_state: Any) -> None:
        """Resume from another state of the policy, in floats."""
        self.set(**policy_state._asdict())
        self._by_kernel = _kernel_agrees(self.policy, policy_state)

    def to_host(self) -> HostScale:
        """Return the same state on the host. Reads the device."""
        self.adopt()
        state = start(self.policy)._replace(policy_state=self.floats(), steps=int(self.steps))
        host = HostScale(self.policy, state)
        host.tensor, host._tracker = self.tensor, self._tracker
        host._stamp()
        return host

    def to_device(self) -> DeviceScale:
        return self

    def without_tensors(self) -> HostScale:
        """Return a copy on the host without tensors, for pickling."""
        policy_state = self.floats()._replace(scale=self.scale, good=float(self.good))
        return HostScale(
            self.policy, start(self.policy)._replace(policy_state=policy_state, steps=int(self.steps))
        )

    def _advance_by_kernel(self, found_inf: Tensor) -> None:
        """Take the same step with PyTorch's kernel and two operators instead of thirty."""
        rule: Any = self.policy
        tracker: Any = self.tracker
        factors = rule.growth_factor, rule.backoff_factor
        amp_update_scale_(self.state.scale, tracker, found_inf, *factors, rule.growth_interval)
        self.state.scale.clamp_(rule.min_scale, rule.max_scale)
        self.state.good.copy_(tracker)
        self._stamp()

    def _here(self, number: bool | float | Tensor) -> Tensor:
        """Return a flag, or a number as float32, where the state is."""
        device = self.state.scale.device
        if not isinstance(number, Tensor):
            dtype = torch.bool if isinstance(number, bool) else torch.float32
            return torch.full((), min(number, FLOAT32_MAX), dtype=dtype, device=device)
        if number.dtype is torch.bool:
            return number.to(device)
        return number.to(device, torch.float32).clamp(max=FLOAT32_MAX)

    def _mirror(self) -> None:
        """Make PyTorch's tensors equal to the state."""
        self.tensor = self.state.scale
        if self._tracker is not None:
            self._tracker.copy_(self.state.good)
        self._stamp()

    def _stamp(self) -> None:
        self._stamps = _stamps(self._stamps, self.tensor, self._tracker)

    def _is_written(self) -> bool:
        return not _fit(self._stamps, self.tensor, self._tracker)


def numbers_and_settings(state_dict: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a checkpoint holds: the state by name, with the number of steps, and PyTorch's settings.

    Raises:
        RuntimeError: for the empty state of a disabled scaler.
        KeyError: for a missing entry.
        PolicyError: for what neither PyTorch nor this library has written.
    """
    if not isinstance(state_dict, Mapping):
        raise PolicyError(f"{shown(state_dict)} is not a state dict. Write scaler.state_dict() to get one.")
    if not state_dict:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved "
            "from a disabled instance of GradScaler."
        )
    more = state_dict.get("preamp_state", {})
    steps: Any = more.get("steps", 0) if isinstance(more, Mapping) else None
    if not (is_number(steps) and 0 <= steps < MOST_STEPS):
        raise PolicyError(
            f"preamp_state={shown(more)} is not what a scaler saves. Leave it out to begin afresh."
        )
    scale, settings = state_dict["scale"], {name: state_dict[name] for name in SETTINGS[1:]}
    return {**more, "steps": int(steps), "scale": scale, "good": state_dict["_growth_tracker"]}, settings


def chosen_policy(policy: Policy[Any] | None, settings: dict[str, Any]) -> Policy[Any]:
    """Return the policy for a constructor's arguments: without one, PyTorch's rule between default bounds.

    Raises:
        AssertionError: as PyTorch, for factors that cannot work.
        PolicyError: for other settings that cannot work.
    """
    if policy is None:
        if settings["growth_factor"] <= 1.0:
            raise AssertionError(f"The growth factor must be > 1.0. {_fixed('growth_factor', settings)}")
        if settings["backoff_factor"] >= 1.0:
            raise AssertionError(f"The backoff factor must be < 1.0. {_fixed('backoff_factor', settings)}")
        return Dynamic.holding(**settings, compat=Compat(factor_dtype="float64"))
    return given_policy(policy, {name: (value, getattr(Dynamic, name)) for name, value in settings.items()})


def _fixed(name: str, settings: dict[str, Any]) -> str:
    """Say what to write instead of a factor that does not move the scale."""
    return (
        f"It is {shown(settings[name])}. Write {name}={getattr(Dynamic, name)!r}, or for a scale that never "
        f"changes policy=Static({shown(settings['init_scale'])})."
    )


def changed_policy(policy: Any, **settings: Any) -> Any:
    """Return the policy with other settings, without another warning of factors that round.

    Raises:
        PolicyError: for a value that cannot work.
    """
    if settings.get("backoff_factor", policy.backoff_factor) != policy.backoff_factor:
        settings["compat"] = replace(policy.compat, backoff_divisor=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InexactScale)
        return replace(policy, **settings)


def setting_of(policy: Policy[Any], name: str) -> Any:
    """Return a setting of a policy; of a policy without it the usual value."""
    return getattr(policy, name, getattr(Dynamic, name))


def set_scale(loss_scale: HostScale | DeviceScale, scale: float) -> None:
    """Set the scale.

    Raises:
        PolicyError: for a scale that would turn gradients into 0, inf or NaN, and for one that the policy
            would not keep, which is any other than its own of `Static`.
    """
    policy = loss_scale.policy
    kept = policy.restore({"scale": scale}).scale
    if kept != to_float32(scale):
        raise PolicyError(
            f"the scale cannot be set to {shown(scale)}: {policy!r} has only {kept!r}. "
            f"Write GradScaler(policy=Static({shown(scale)}))."
        )
    loss_scale.set(scale=to_float32(scale))


def five_numbers_suffice(policy: Policy[Any]) -> bool:
    """Return whether PyTorch's checkpoint holds all that the policy's state remembers."""
    return type(policy) is Dynamic and policy.hysteresis == 1  # a subclass may remember more


def _stamps(before: tuple[Stamp | None, ...], *tensors: Tensor | None) -> tuple[Stamp | None, ...]:
    """Return stamps of PyTorch's two tensors; in compiled code, which cannot count writes, the old ones."""
    if torch.compiler.is_compiling():
        return before
    return tuple([None if tensor is None else Stamp.of(tensor) for tensor in tensors])


def _fit(stamps: tuple[Stamp | None, ...], *tensors: Tensor | None) -> bool:
    """Return whether both are still the same tensors, and nobody has written to them."""
    if torch.compiler.is_compiling():
        return True
    pairs = list(zip(stamps, tensors, strict=False))
    return len(pairs) == len(tensors) and all(
        [tensor is None if stamp is None else stamp.fits(tensor) for stamp, tensor in pairs]
    )


def _apart(after: Any, before: Any) -> list[Tensor]:
    """Return new numbers, copied where a policy has moved an old one to another's place."""
    pairs = zip(after, before, strict=True)
    return [
        new.clone() if new is not old and any(new is one for one in before) else new for new, old in pairs
    ]


def _kernel_agrees(policy: Policy[Any], state: Any) -> bool:
    """Return whether PyTorch's kernel and a clamp after it move as a policy does from a state on the host."""
    if type(policy) is not Dynamic or policy.hysteresis != 1 or policy.compat.growth_delay or policy.gives_up:
        return False
    clamps = policy.compat.at_ceiling == "clamp" or policy.max_scale == FLOAT32_MAX
    # Without a ceiling the two differ as well: the kernel stops growing before inf.
    inside = (policy.min_scale or 0.0) <= state.scale <= (policy.max_scale or 0.0)
    counts = state.good < policy.growth_interval  # the kernel compares with ==
    return clamps and inside and counts and policy.compat.backoff_divisor is None
