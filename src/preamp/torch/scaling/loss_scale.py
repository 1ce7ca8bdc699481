"""A policy's state beside PyTorch's two tensors, `_scale` and `_growth_tracker`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from preamp.arrays.torch import Stamp
from preamp.arrays.torch_compat import amp_update_scale_
from preamp.checks import FLOAT32_MAX, shown, to_float32
from preamp.errors import PolicyError
from preamp.policy import Dynamic, Policy, Reading, Where, choose
from preamp.scaling import advance_policy


class LossScale:
    """A policy's state: Python floats or, where nothing may be read, 0-dim float32 tensors.

    Tensors are written in place: a captured graph reads and writes these. PyTorch's two tensors are kept
    equal to the state, and what other code writes into them is adopted.

    Args:
        policy: the rule in force.

    Attributes:
        policy: the rule in force.
        state: of the policy.
        on_device: whether the state is in tensors.
        steps: steps taken or skipped, as an integer or a 0-dim tensor.
        tensor: the scale as a 0-dim float32 tensor, for the loss; None until `make_tensor`. On a device it is
            the scale in the state, unless other code has put another tensor in its place.
        float32_max: on a device, the largest float32, made once: each constant would be a launch a step.
    """

    def __init__(self, policy: Policy[Any]) -> None:
        self.policy = policy
        self.state: Any = policy.start()
        self.on_device = False
        self.steps: Any = 0
        self.tensor: Tensor | None = None
        self._tracker: Tensor | None = None
        self._stamps: tuple[Stamp | None, ...] = ()  # of both, when they were last equal to the state
        # Whether PyTorch's kernel advances. It counts clean steps in the tracker, not in `state.good`.
        self._by_kernel = False
        self._flags: tuple[Tensor, Tensor] = ()  # type: ignore[assignment]
        self._snapshot: Tensor | None = None  # the latest copy of a scale on a device, until that moves

    def __getstate__(self) -> dict[str, Any]:
        """Copy the state to the host, without tensors."""
        state = self.floats()._replace(scale=self.scale, good=float(self.good))
        fresh = LossScale(self.policy)
        fresh.state, fresh.steps = state, int(self.steps)
        return fresh.__dict__

    @property
    def scale_on_host(self) -> float | None:
        """The scale, or None if it would have to be read from a device."""
        return None if self.on_device else float(self.state.scale)

    @property
    def scale(self) -> float:
        """The scale in force, as PyTorch's `_init_scale` or `_scale` gives it. May read a device."""
        if self.tensor is None or not (self.on_device or self.tensor.is_cpu or self._is_written()):
            return float(self.state.scale)
        return float(self.tensor.item())

    @property
    def good(self) -> int:
        """Clean steps since the last overflow or growth. May read a device."""
        if self._tracker is None or not (self._by_kernel or self._tracker.is_cpu or self._is_written()):
            return int(self.state.good)
        return int(self._tracker.item())

    @property
    def tracker(self) -> Tensor | None:
        """PyTorch's growth tracker, 0-dim int32; made when it is first asked for. Nothing is read."""
        if self._tracker is None and self.tensor is not None:
            if self.on_device:
                self._tracker = self.state.good.to(torch.int32)
            else:
                good = int(self.state.good)
                self._tracker = torch.full((), good, dtype=torch.int32, device=self.tensor.device)
            self._stamp()
        return self._tracker

    @tracker.setter
    def tracker(self, tracker: Tensor | None) -> None:
        self._tracker = tracker

    def make_tensor(self, device: torch.device) -> None:
        """Make the tensor that the loss is multiplied by, or put back the one that other code took away."""
        if self.on_device:
            self.tensor = self.state.scale
        else:
            self.tensor = torch.full((), self.state.scale, dtype=torch.float32, device=device)
            self._stamp()

    def move(self, *, to_device: bool) -> None:
        """Adopt what other code wrote; have the state in tensors, or in floats. Only the latter reads."""
        if to_device and not self.on_device and self.tensor is not None:
            self._by_kernel = _kernel_agrees(self.policy, self.state)
            device = self.tensor.device
            numbers = [*self.state, 0.0, 1.0, FLOAT32_MAX]
            *tensors, zero, one, self.float32_max = [
                torch.full((), value, dtype=torch.float32, device=device) for value in numbers
            ]
            self._flags = zero, one
            self.state = type(self.state)(*tensors)._replace(scale=self.tensor)
            self.on_device, self._snapshot = True, None
        self.adopt()
        if self.on_device and not to_device:
            self.state, self.steps = self.floats(), int(self.steps)
            self.on_device = self._by_kernel = False
            self._stamp()

    def floats(self) -> Any:
        """Return the policy's state as floats, with one read if it is on a device."""
        if not self.on_device:
            return self.state
        if self._by_kernel:
            self.state.good.copy_(self.tracker)
        return type(self.state)(*torch.stack(list(self.state)).tolist())

    def snapshot(self) -> Any:
        """Return the scale as it is now: a float, or a tensor that does not change."""
        if not self.on_device:
            return float(self.state.scale)
        if isinstance(self.steps, Tensor) or torch.compiler.is_compiling():
            return self.state.scale.clone()  # a graph has to copy for itself
        if self._snapshot is None:
            self._snapshot = self.state.scale.clone()
        return self._snapshot

    def found_inf(self, taken: Tensor) -> Tensor:
        """Return `found_inf`, a float32: 0 for a step that is taken."""
        return torch.where(taken, *self._flags)

    def adopt(self) -> None:
        """Take over what other code wrote into PyTorch's tensors: that scale was in the loss.

        Raises:
            PolicyError: on the host, for a scale that would turn gradients into 0, inf or NaN.
        """
        if self.on_device:
            if self._is_written():
                self._by_kernel, self._snapshot = False, None
                if self._tracker is not None:
                    self.state.good.copy_(self._tracker)
            if self.tensor is not None and self.tensor is not self.state.scale:
                self.state.scale.copy_(self.tensor)
                self.tensor, self._snapshot = self.state.scale, None
            self._stamp()
            return
        state = self.state
        if not 0.0 < state.scale < math.inf:
            self.policy.restore({"scale": state.scale})  # raises: the policy has let it fall to 0
        # On a CPU a read is free, and finds writes through `.data` and NumPy too.
        if self.tensor is None or not (self.tensor.is_cpu or self._is_written()):
            return
        scale = self.tensor.item()
        good = state.good if self._tracker is None else float(self._tracker.item())
        if scale != state.scale or good != state.good:
            self.policy.restore({"scale": scale, "good": good})  # raises for what would ruin gradients
            self.state = state._replace(scale=scale, good=good)
            self._stamp()
        elif not self.tensor.is_cpu:
            self._stamp()

    def advance(
        self, reading: Reading, taken: Any = None, *, counts: Any = True, flags: Sequence[Tensor] = ()
    ) -> tuple[Any, bool]:
        """Advance by one step; return a `snapshot` of the scale after it, and whether the policy gave up.

        Args:
            reading: what was measured in the step.
            taken: whether a guard lets it be taken; None without a guard.
            counts: whether it counts as a step: an optimizer has stepped, or skipped.
            flags: PyTorch's, of all optimizers and devices: 0 where gradients are finite.

        Raises:
            PolicyError: if the policy uses what was not measured. The state is not changed.
        """
        self.move(to_device=self.on_device or isinstance(reading.finite, Tensor))
        where: Where = choose
        gave_up: Any = False
        if self.on_device:
            where = torch.where
            reading, taken = Reading(self._here(reading.finite), self._here(reading.amax)), self._here(taken)
        if not (self._by_kernel and self._advanced_by_kernel(reading.finite, taken, flags)):
            if self._by_kernel:
                self._leave_kernel()
            after, gave_up = advance_policy(self.policy, self.state, reading, where, taken)
            self._write(after)
        self.steps += counts
        return self.snapshot(), bool(gave_up)

    def set_policy(self, policy: Policy[Any]) -> None:
        """Put another policy in force; the state stays."""
        if self._by_kernel:
            self._leave_kernel()
        self.policy = policy

    def set(self, **numbers: float) -> None:
        """Set fields of the policy's state."""
        if self._by_kernel:
            self._leave_kernel()
        given: Any = {name: self._here(one) for name, one in numbers.items()} if self.on_device else numbers
        self._write(self.state._replace(**given))

    def set_state(self, state: Any) -> None:
        """Resume from another state of the policy, in floats."""
        self.set(**state._asdict())
        self._by_kernel = self.on_device and _kernel_agrees(self.policy, state)

    def set_scale(self, scale: float) -> None:
        """Set the scale.

        Raises:
            PolicyError: for a scale that would turn gradients into 0, inf or NaN, and for one that the policy
                would not keep, which is any other than its own of `Static`.
        """
        kept = to_float32(self.policy.restore({"scale": scale}).scale)
        if kept != to_float32(scale):
            raise PolicyError(
                f"the scale cannot be set to {shown(scale)}: {self.policy!r} has only {kept!r}. "
                f"Write GradScaler(policy=Static({shown(scale)}))."
            )
        self.set(scale=to_float32(scale))

    def set_steps(self, steps: int) -> None:
        """Set the number of steps: in place where it is a tensor, which a captured graph counts in."""
        if isinstance(self.steps, Tensor):
            self.steps.fill_(steps)
        else:
            self.steps = steps

    def _advanced_by_kernel(self, finite: Any, taken: Tensor | None, flags: Sequence[Tensor]) -> bool:
        """Return whether PyTorch's kernel took the step, with two operators instead of thirty."""
        if torch.compiler.is_compiling():
            return False
        rule, scale = self.policy, self.state.scale
        tracker: Any = self.tracker
        is_known = taken is None and len(flags) == 1  # a guard's flag is also set for a spike
        found_inf = flags[0].to(scale.device) if is_known else self.found_inf(finite)
        before = None if taken is None else (scale.clone(), tracker.clone())
        factors = rule.growth_factor, rule.backoff_factor  # type: ignore[attr-defined]
        try:
            amp_update_scale_(scale, tracker, found_inf, *factors, rule.growth_interval)  # type: ignore[attr-defined]
        except NotImplementedError:  # some backends have no such kernel; nothing has moved
            return False
        scale.clamp_(rule.min_scale, rule.max_scale)  # type: ignore[attr-defined]
        if before is not None:
            moves = taken | finite.logical_not()
            for number, old in zip((scale, tracker), before, strict=True):
                number.copy_(torch.where(moves, number, old))
        self._snapshot = None
        self._stamp()
        return True

    def _leave_kernel(self) -> None:
        """Advance without PyTorch's kernel: in compiled code once, else from now on."""
        self.state.good.copy_(self.tracker)
        self._by_kernel = torch.compiler.is_compiling()

    def _write(self, after: Any) -> None:
        """Make `after` the state, and PyTorch's tensors equal to it."""
        if self.on_device:
            for old, new in zip(self.state, _clone_aliased(after, self.state), strict=True):
                old.copy_(new)
            self._sync_torch_tensors()
            return
        before, self.state = self.state, after
        if self.tensor is not None and (after.scale != before.scale or self._tracker is not None):
            self.tensor.fill_(after.scale)
            if self._tracker is not None:
                self._tracker.fill_(int(after.good))
            self._stamp()

    def _sync_torch_tensors(self) -> None:
        """Make PyTorch's tensors equal to a state on a device."""
        self.tensor, self._snapshot = self.state.scale, None
        if self._tracker is not None:
            self._tracker.copy_(self.state.good)
        self._stamp()

    def _here(self, number: Any) -> Tensor | None:
        """Return a flag, or a number as float32, where the state is."""
        device = self.state.scale.device
        if number is None:
            return None
        if not isinstance(number, Tensor):
            dtype = torch.bool if isinstance(number, bool) else torch.float32
            return torch.full((), min(number, FLOAT32_MAX), dtype=dtype, device=device)
        if number.dtype is torch.bool:
            return number.to(device)
        return number.to(device, torch.float32).clamp(max=FLOAT32_MAX)

    def _stamp(self) -> None:
        if not torch.compiler.is_compiling():  # compiled code cannot count writes
            pair = (self.tensor, self._tracker)
            self._stamps = tuple([None if one is None else Stamp.of(one) for one in pair])

    def _is_written(self) -> bool:
        """Return whether PyTorch's tensors are others than they were, or somebody has written to them."""
        if torch.compiler.is_compiling():
            return False
        pairs = list(zip(self._stamps, (self.tensor, self._tracker), strict=False))
        return len(pairs) < 2 or not all(
            [tensor is None if stamp is None else stamp.fits(tensor) for stamp, tensor in pairs]
        )


def _clone_aliased(after: Any, before: Any) -> list[Tensor]:
    """Return new numbers, cloned where a policy returns an old one in another's place."""
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
