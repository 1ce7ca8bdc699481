"""Where the policy's state lives: on the host as floats, or on a device as tensors.

On a CPU, and where a flag is read at every step anyway, the policy advances on Python floats; that takes two
microseconds. Where nothing is read, its state is tensors and it advances there. PyTorch's two tensors,
`_scale` and `_growth_tracker`, are kept equal to it, and what other code writes into them is taken over.

This room refuses to know gradients and optimizers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from preamp.arrays.torch_compat import amp_update_scale_
from preamp.checks import FLOAT32_MAX, is_number, shown, to_float32
from preamp.errors import InexactScale, PolicyError
from preamp.policy import Compat, Dynamic, Policy, Reading
from preamp.systems.arguments import given_policy
from preamp.torch.scaling import launches

SETTINGS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
MOST_STEPS = 2**63  # of an int64


def numbers_and_settings(state_dict: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a checkpoint holds: the state by name, with the number of steps, and PyTorch's settings.

    Raises:
        RuntimeError: for the empty state of a disabled scaler.
        KeyError: for a missing entry.
        PolicyError: for what neither PyTorch nor this library has written.
    """
    if not isinstance(state_dict, Mapping):
        raise PolicyError(f"{shown(state_dict)} is no state dict. Write scaler.state_dict() to get one.")
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


class LossScale:
    """A policy and its state.

    Args:
        policy: a policy or dialect; None for PyTorch's rule between our default bounds.
        settings: PyTorch's four settings by name.

    Attributes:
        policy: the rule in force.
        edge: the magnitude from which entries of gradients count for it; None if it does not ask. Computed
            outside of `torch.compile`, where a policy may do what it likes.
        state: the policy's state, as floats or as 0-dim float32 tensors.
        on_device: True when `state` is tensors.
        tensor: the scale as a 0-dim float32 tensor; None until `place`.
    """

    def __init__(self, policy: Policy[Any] | None, settings: dict[str, Any]) -> None:
        self.owns_rule = policy is None
        self._obey(_chosen(policy, settings))
        self.state: Any = self.policy.start()
        self.on_device = False
        self.tensor: Tensor | None = None
        self._tracker: Tensor | None = None
        self._seen: tuple[Any, ...] = ()
        self._by_kernel = False

    def place(self, device: torch.device) -> None:
        """Make the tensor that the loss is multiplied by."""
        self.tensor = torch.full((), float(self.state.scale), dtype=torch.float32, device=device)
        self._remember()

    @property
    def tracker(self) -> Tensor | None:
        """PyTorch's growth tracker, 0-dim int32; made when it is first asked for."""
        if self._tracker is None and self.tensor is not None:
            if self.on_device:  # unread
                self._tracker = self.state.good.to(torch.int32)
            else:
                self._tracker = torch.full((), self.good, dtype=torch.int32, device=self.tensor.device)
            self._remember()
        return self._tracker

    @tracker.setter
    def tracker(self, tracker: Tensor | None) -> None:
        self._tracker = tracker

    @property
    def scale(self) -> float:
        """The scale in force, as PyTorch's `_init_scale` or `_scale` gives it. Reads a device."""
        if self.tensor is not None and (self.on_device or self.tensor.is_cpu or self._touched()):
            return float(self.tensor.item())
        return float(self.state.scale)

    @property
    def good(self) -> int:
        """Clean steps since the last overflow or growth. Reads a device."""
        if self._tracker is not None and self._touched():
            return int(self._tracker.item())
        return int(self.state.good)

    def floats(self) -> Any:
        """Return the state as floats, with one read if it lives on a device."""
        if not self.on_device:
            return self.state
        return type(self.state)(*torch.stack(list(self.state)).tolist())

    def to_host(self) -> None:
        """Move the state to the host."""
        if self.on_device:
            self.adopt()
            self.state, self.on_device = self.floats(), False
            self._mirror()

    def to_device(self) -> None:
        """Move the state to where the scale's tensor lies. Nothing is read."""
        if self.on_device or self.tensor is None:
            return
        device = self.tensor.device
        tensors = (torch.full((), value, dtype=torch.float32, device=device) for value in self.state)
        self._by_kernel = _kernel_knows(self.policy, self.state)
        self.state = type(self.state)(*tensors)._replace(scale=self.tensor)
        self.on_device = True

    def adopt(self) -> None:
        """Take over what other code wrote into PyTorch's tensors: that scale was in the loss.

        Raises:
            PolicyError: for a scale that would turn gradients into 0, inf or NaN.
        """
        if not self.on_device and not 0.0 < self.state.scale < math.inf:
            self.policy.restore({"scale": self.state.scale})  # refuses it: the policy has let it fall to 0
        if self.tensor is None or not (self.tensor.is_cpu or self._touched()):
            return
        if self.on_device:
            self._adopt_on_device()
            return
        scale = self.tensor.item()
        good = self.state.good if self._tracker is None else float(self._tracker.item())
        if (scale, good) != (self.state.scale, self.state.good):
            self.policy.restore({"scale": scale, "good": good})  # refuses what would ruin gradients
            self._by_kernel = False
            self.state = self.state._replace(scale=scale, good=good)
        self._remember()

    def snapshot(self) -> float | Tensor:
        """Return the scale as it is now: a float, or a tensor that does not move on."""
        scale: float | Tensor = self.state.scale
        return scale.clone() if isinstance(scale, Tensor) else scale

    def advance(self, reading: Reading, found_inf: Tensor | None = None) -> float | Tensor:
        """Move on by one step, on the device if the state or the flag is there.

        Args:
            reading: what was seen.
            found_inf: the opposite of `reading.finite` as a float32 where the state is, if that is at hand.

        Returns:
            A `snapshot` of the scale after it.

        Raises:
            ScaleExhausted: if the policy gives up; on the host only. The state is as it was.
            PolicyError: if the policy looks at what the reading does not tell. The state is as it was.
        """
        if isinstance(reading.finite, Tensor):
            self.to_device()
        if not self.on_device:
            self.state = self.policy.step(self.state, reading)
            self._mirror()
            return self.snapshot()
        here = Reading(*[None if one is None else self._here(one) for one in reading])
        copy = launches.advance(self.policy, self.state, here.finite)
        if copy is not None:
            self._mirror()
            return copy
        if self._by_kernel and not torch.compiler.is_compiling():
            if found_inf is None:
                found_inf = here.finite.logical_not().to(torch.float32)
            try:
                self._advance_by_kernel(found_inf)
                return self.snapshot()
            except NotImplementedError:  # some backends have no such kernel; nothing has moved
                self._by_kernel = False
        after = self.policy.advance(self.state, here, torch.where)
        for old, new in zip(self.state, _apart(after, self.state), strict=True):
            old.copy_(new)
        self._mirror()
        return self.snapshot()

    def _advance_by_kernel(self, found_inf: Tensor) -> None:
        """Take the same step with PyTorch's kernel and two operators instead of thirty."""
        rule: Any = self.policy
        tracker: Any = self.tracker
        factors = rule.growth_factor, rule.backoff_factor
        amp_update_scale_(self.state.scale, tracker, found_inf, *factors, rule.growth_interval)
        self.state.scale.clamp_(rule.min_scale, rule.max_scale)
        self.state.good.copy_(tracker)
        self._remember()

    def set_scale(self, scale: float) -> None:
        """Go on with another scale.

        Raises:
            PolicyError: for a scale that would turn gradients into 0, inf or NaN, and for one that the policy
                would not keep, which is any other than its own of `Static`.
        """
        kept = self.policy.restore({"scale": scale}).scale
        if kept != to_float32(scale):
            raise PolicyError(
                f"the scale cannot be set to {shown(scale)}: {self.policy!r} has only {kept!r}. "
                f"Write GradScaler(policy=Static({shown(scale)}))."
            )
        self._set(scale=to_float32(scale))

    def set_good(self, good: int) -> None:
        """Go on with another count of clean steps."""
        self._set(good=float(good))

    def restore(self, numbers: dict[str, Any], settings: dict[str, Any]) -> float:
        """Resume from a checkpoint; all of it or, if a number cannot work, nothing.

        Args:
            numbers: fields of the state by name.
            settings: those of the policy; a policy that was given stays as it is.

        Returns:
            The scale that training resumes at.
        """
        state, policy = self.restored(numbers, settings)
        self._obey(policy)
        self.state, on_device, self.on_device = state, self.on_device, False
        self._mirror()
        if on_device:
            self.to_device()
        return float(state.scale)

    def restored(self, numbers: dict[str, Any], settings: dict[str, Any]) -> tuple[Any, Policy[Any]]:
        """Return the state and the policy that `restore` would go on from; nothing is changed.

        Raises:
            PolicyError: for a number that cannot work.
        """
        state = self.policy.restore(numbers)
        return state, _changed(self.policy, **settings) if self.owns_rule else self.policy

    def setting(self, name: str) -> Any:
        """Return a setting of the policy; of a policy without it the usual value."""
        return getattr(self.policy, name, getattr(Dynamic, name))

    def change(self, name: str, value: Any) -> None:
        """Change a setting of the policy.

        Raises:
            PolicyError: for a value that cannot work, or a policy without that setting.
        """
        if value == self.setting(name):
            return
        self._by_kernel = False
        if not hasattr(self.policy, name):
            raise PolicyError(f"{name}={value!r} cannot be set: {self.policy!r} has no {name}.")
        self._obey(_changed(self.policy, **{name: value}))

    def five_numbers_suffice(self) -> bool:
        """Return whether PyTorch's checkpoint holds all that the state remembers."""
        rule = self.policy
        return isinstance(rule, Dynamic) and rule.hysteresis == 1 and rule.max_consecutive_overflows is None

    def without_tensors(self) -> LossScale:
        """Return a copy with the state on the host and no tensors, for pickling."""
        twin = object.__new__(LossScale)
        state = self.floats()._replace(scale=self.scale, good=float(self.good))
        twin.__dict__ = {**self.__dict__, "state": state, "on_device": False}
        twin.tensor = twin._tracker = None
        return twin

    def _obey(self, policy: Policy[Any]) -> None:
        """Make a policy the one in force."""
        self.policy = policy
        self.edge: float | None = policy.edge if "share" in policy.needs else None

    def _here(self, number: bool | float | Tensor) -> Tensor:
        """Return a flag, or a number as float32, where the state is."""
        if not isinstance(number, Tensor):
            dtype = torch.bool if isinstance(number, bool) else torch.float32
            return torch.full((), min(number, FLOAT32_MAX), dtype=dtype, device=self._device())
        if number.dtype is torch.bool:
            return number.to(self._device())
        return number.to(self._device(), torch.float32).clamp(max=FLOAT32_MAX)

    def _device(self) -> torch.device:
        assert self.tensor is not None  # a state is on a device only where the tensor is
        return self.tensor.device

    def _set(self, **numbers: float) -> None:
        self._by_kernel = False
        if self.on_device:
            for name, number in numbers.items():
                getattr(self.state, name).fill_(number)
        else:
            self.state = self.state._replace(**numbers)
        self._mirror()

    def _adopt_on_device(self) -> None:
        self._by_kernel = self._by_kernel and not self._touched()
        if self.tensor is not None and self.tensor is not self.state.scale:
            self.state.scale.copy_(self.tensor)
            self.tensor = self.state.scale
        if self._tracker is not None and self._touched():
            self.state.good.copy_(self._tracker)
        self._remember()

    def _mirror(self) -> None:
        """Make PyTorch's tensors equal to the state."""
        if self.tensor is not None:
            if self.on_device:
                self.tensor = self.state.scale
            elif self._seen[:1] != (self.state.scale,) or self._touched():
                self.tensor.fill_(self.state.scale)
        if self._tracker is not None:
            good = self.state.good
            self._tracker.copy_(good) if self.on_device else self._tracker.fill_(int(good))
        self._remember()

    def _remember(self) -> None:
        if not torch.compiler.is_compiling():
            self._seen = (None if self.on_device else self.state.scale, *self._versions())

    def _touched(self) -> bool:
        return not torch.compiler.is_compiling() and self._seen[1:] != self._versions()

    def _versions(self) -> tuple[Any, ...]:
        tensors = (self.tensor, self._tracker)
        return tuple((id(tensor), None if tensor is None else tensor._version) for tensor in tensors)


def _apart(after: Any, before: Any) -> list[Tensor]:
    """Return new numbers, copied where a policy has moved an old one to another's place."""
    pairs = zip(after, before, strict=True)
    return [
        new.clone() if new is not old and any(new is one for one in before) else new for new, old in pairs
    ]


def _kernel_knows(policy: Policy[Any], state: Any) -> bool:
    """Return whether PyTorch's kernel and a clamp after it move as a policy does from a state on the host."""
    if type(policy) is not Dynamic or policy.hysteresis != 1 or policy.compat.growth_delay or policy.gives_up:
        return False
    clamps = policy.compat.at_ceiling == "clamp" or policy.max_scale == FLOAT32_MAX
    inside = (policy.min_scale or 0.0) <= state.scale <= (policy.max_scale or 0.0)
    counts = state.good < policy.growth_interval  # the kernel compares with ==
    return clamps and inside and counts and policy.compat.backoff_divisor is None


def _chosen(policy: Policy[Any] | None, settings: dict[str, Any]) -> Policy[Any]:
    """Return the policy to use, for the arguments of a constructor."""
    if policy is None:
        if settings["growth_factor"] <= 1.0:
            raise AssertionError("The growth factor must be > 1.0.")
        if settings["backoff_factor"] >= 1.0:
            raise AssertionError("The backoff factor must be < 1.0.")
        return Dynamic.holding(**settings, compat=Compat(factor_dtype="float64"))
    return given_policy(policy, {name: (value, getattr(Dynamic, name)) for name, value in settings.items()})


def _changed(policy: Any, **settings: Any) -> Any:
    """Return the policy with other settings, without another warning of factors that round."""
    if settings.get("backoff_factor", policy.backoff_factor) != policy.backoff_factor:
        settings["compat"] = replace(policy.compat, backoff_divisor=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InexactScale)
        return replace(policy, **settings)
