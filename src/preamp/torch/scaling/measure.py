"""What is measured in an optimizer's gradients, on this rank and over all ranks.

`finite` means the same everywhere: every entry is finite, and stays so when it is unscaled. Numbers are
Python numbers or, where nothing may be read, 0-dim tensors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from preamp.arrays.torch import Gradients, Stamp, multiply_
from preamp.arrays.torch_devices import widest
from preamp.checks import FLOAT32_MAX
from preamp.scaling import GuardRecord, Measured
from preamp.torch.scaling.culprits import Culprits
from preamp.torch.scaling.optimizers import parameters_of
from preamp.torch.scaling.ranks import Agreement

# What ranks add up of an amax: a one in the bin of its exponent.
LOWEST, HIGHEST = -149, 128  # float32's binary exponents: an amax is at most 2**128
BINS = HIGHEST - LOWEST + 1
PYTORCHS_KEYS = ("stage", "found_inf_per_device")
UNIT = 2.0**-80  # whose product with any float32 has a square in float32


class FailedAttempt(NamedTuple):
    """What was measured for a step that raised: when it is tried again, the gradients may be clipped."""

    gradients: list[Stamp]
    measured: Measured[Any]


@dataclass(slots=True, eq=False)
class OptimizerState:
    """One optimizer in one iteration, from its first use to `update`.

    PyTorch keeps a dict. Its keys, and keys that other code adds, work here too.

    Attributes:
        stage: whether it was unscaled or has stepped.
        found_inf_per_device: PyTorch's flags.
        optimizer: kept until `update`, so that its id cannot be reused.
        fused: whether its `step` divides by `grad_scale` and skips by `found_inf`. False for a wrapper around
            such an optimizer: attributes that are set on the wrapper do not reach it.
        unscaled: what was measured in gradients that were unscaled before the step; None if they were not.
        agreed: whether all ranks have agreed on `unscaled`.
        measured: what all ranks have measured for the step.
        judged: what a guard has decided; None without one.
        taken: whether the step is to be taken; None before that is known.
        skips: whether a step whose gradients are not finite is skipped; a disabled scaler takes it.
        stepped: whether `step` was called.
        culprits: names the parameters to blame for a skipped step, given whether a guard skipped it.
        failed_attempt: what was measured when the step was tried before, and raised.
        gradients: `Gradients` during the step, else None.
        divisor: what was in them when they were measured.
        divided: what they were divided by in place.
        others: what other code has put here.
    """

    stage: OptState = OptState.READY
    found_inf_per_device: dict[torch.device, Tensor] = field(default_factory=dict)
    optimizer: Any = None
    fused: bool = False
    unscaled: Measured[Any] | None = None
    agreed: bool = False
    measured: Measured[Any] | None = None
    judged: GuardRecord[Any] | None = None
    taken: Any = None
    skips: bool = True
    stepped: bool = False
    culprits: Callable[[bool], Culprits] | None = None
    failed_attempt: FailedAttempt | None = None
    gradients: Any = None
    divisor: Any = 1.0
    divided: tuple[Any, ...] = ()
    others: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name) if name in PYTORCHS_KEYS else self.others[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in PYTORCHS_KEYS:
            setattr(self, name, value)
        else:
            self.others[name] = value

    def __contains__(self, name: object) -> bool:
        return name in PYTORCHS_KEYS or name in self.others

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry, as of a dict."""
        return getattr(self, name) if name in PYTORCHS_KEYS else self.others.get(name, default)

    def forget(self) -> None:
        """Forget what is known of the gradients: a closure is about to make others."""
        self.stage, self.found_inf_per_device, self.divided = OptState.READY, {}, ()
        self.unscaled = self.measured = self.culprits = None
        self.agreed = False

    def user_grad_scale(self) -> Any:
        """Return what a user set as `grad_scale` of a fused optimizer, 1.0 without it."""
        given = getattr(self.optimizer, "grad_scale", None)
        return 1.0 if given is None else given

    def set_divisor(self, scale: Any, *, on_host: bool, device: torch.device) -> None:
        """Note what is in the gradients: the scale, unless they were unscaled, and a user's own factor."""
        divisor = scale if self.stage is OptState.READY else 1.0
        preset = self.user_grad_scale() if self.fused else 1.0
        if on_host:
            self.divisor = divisor * float(preset)
            return
        if not isinstance(divisor, Tensor):
            divisor = torch.ones((), dtype=torch.float32, device=device)
        self.divisor = divisor * preset if isinstance(preset, Tensor) or preset != 1.0 else divisor

    def adopt_flags(self, scale: Any) -> None:
        """Note what is known where other code than `step` has checked the gradients."""
        on_host = not isinstance(scale, Tensor)
        self.taken = self.flags_are_clear(on_host=on_host)
        known = Measured[Any](True, scale) if self.unscaled is None else self.unscaled
        measured = Measured(self.taken, scale, known.grad_norm, known.amax)
        self.measured = read_measured(measured) if on_host else measured
        self.stepped = self.stage is OptState.STEPPED

    def flags_are_clear(self, *, on_host: bool) -> Any:
        """Return whether PyTorch's flags are 0: as a Python number, or unread."""
        flags = list(self.found_inf_per_device.values())
        if on_host:
            return not any([flag.item() for flag in flags])
        return torch.stack([flag.to(flags[0].device) for flag in flags]).sum() == 0.0

    def set_flag(self, device: torch.device) -> None:
        """Convert a decision of the host to the form in which PyTorch keeps it."""
        self.found_inf_per_device = {device: number(0.0 if self.taken else 1.0, device)}

    def named(self) -> Culprits:
        """Return the parameters to blame for a step that was skipped."""
        if self.culprits is None or self.measured is None:
            return Culprits()
        return self.culprits(self.judged is not None and bool(self.measured.finite))

    def with_norm_before_clipping(self, measured: Measured[Any]) -> Measured[Any]:
        """Return what was measured with what is known from before somebody clipped the same gradients."""
        if self.unscaled is not None:
            norm = measured.grad_norm if self.unscaled.grad_norm is None else self.unscaled.grad_norm
            measured = Measured(measured.finite, measured.scale, norm, measured.amax, measured.loss)
            measured = measured if isinstance(measured.finite, Tensor) else read_measured(measured)
        if self.failed_attempt is None or measured.finite is False:
            return measured
        present = [p.grad for p in parameters_of(self.optimizer) if p.grad is not None]
        stamps, first = self.failed_attempt
        same = len(present) == len(stamps) and all(
            [stamp.fits(one) for stamp, one in zip(stamps, present, strict=True)]
        )
        return measured._replace(grad_norm=first.grad_norm, amax=first.amax) if same else measured

    def read(self) -> OptimizerState:
        """Return what was measured and decided, in Python numbers, after one read if it is on a device."""
        verdict = () if self.judged is None else self.judged[2:]
        assert self.measured is not None  # otherwise there is no step to read
        finite, scale, norm, amax, loss, taken, *judged = read(*self.measured, self.taken, *verdict)
        found = Measured(bool(finite), scale, norm if finite else None, amax if finite else None, loss)
        state = OptimizerState(measured=found, taken=bool(taken), skips=self.skips, stepped=self.stepped)
        state.culprits = self.culprits
        if judged:
            state.judged = GuardRecord((), state.taken, judged[0], bool(judged[1]), judged[2])
        return state

    def clear_fused_inputs(self) -> None:
        """Take from a fused optimizer what it was given for one step."""
        for name in ("grad_scale", "found_inf"):
            if hasattr(self.optimizer, name):
                delattr(self.optimizer, name)

    def undo(self, began: OptState) -> None:
        """Make gradients what they were before a step that raised, but for rounding and clipped entries.

        So the step may be tried again, or left out without `update`.

        Args:
            began: the stage at its beginning.
        """
        if self.gradients is not None:
            for divisor in reversed(self.divided):
                multiply_(self.gradients.tensors, divisor)
        if began is OptState.READY:
            self.unscaled, self.agreed = None, False
        self.stage, self.divided = began, ()
        if self.measured is not None and not torch.compiler.is_compiling():
            present = [p.grad for p in parameters_of(self.optimizer) if p.grad is not None]
            self.failed_attempt = FailedAttempt([Stamp.of(one) for one in present], self.measured)


def new_state() -> OptimizerState:  # torch.compile does not accept a class as default_factory
    return OptimizerState()


class Meter:
    """Measures an optimizer's gradients on this rank, and agrees with others.

    Args:
        agreement: how ranks agree.

    Attributes:
        needs_amax: whether the policy uses the largest magnitude of the scaled gradients.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.agreement, self.needs_amax = agreement, False

    def measure(
        self, state: OptimizerState, scale: Any, device: torch.device, *, norm: bool, on_host: bool
    ) -> tuple[Measured[Any], Tensor | None]:
        """Measure this rank's gradients, or take what is known since they were unscaled.

        Args:
            state: with the gradients and what is in them.
            scale: that was in the loss, which is noted.
            device: where unread numbers are wanted.
            norm: whether to take the norm.
            on_host: whether the host may synchronize.

        Returns:
            The numbers; and the amax or the norm of each gradient, unread, where numbers are.
        """
        if state.stage is OptState.READY:
            return measure(state, scale, device, norm=norm, amax=self.needs_amax, on_host=on_host)
        clear = state.flags_are_clear(on_host=on_host)
        amax = None if state.unscaled is None else state.unscaled.amax
        if not norm and (on_host or state.culprits is not None):
            return Measured(clear, scale, None, amax), None
        found, sizes = measure(state, scale, device, norm=norm, amax=False, on_host=on_host)
        agreed = state.agreed and not norm
        finite = clear if agreed else clear & found.finite
        return Measured(finite, scale, found.grad_norm, amax), sizes

    def agree(
        self,
        mine: Measured[Any],
        meshes: list[Any],
        device: torch.device,
        *,
        norm: bool,
        amax: bool = False,
        on_host: bool,
        losses: Tensor | None = None,
    ) -> Measured[Any]:
        """Return what all ranks have measured, in one sum over them. Every rank has to call.

        Args:
            mine: what this rank has measured.
            meshes: of the gradients that are DTensors.
            device: where the ranks meet, wherever the gradients of this one are.
            norm: whether the norm is wanted. Over ranks, one whose square the widest dtype does not hold is
                not finite, and its step is skipped.
            amax: whether to agree on the amax.
            on_host: whether the host may synchronize.
            losses: this rank's loss and how many it has, to be added up beside the rest.

        Raises:
            PolicyError: for a norm that cannot be determined.
        """
        if norm:
            self.agreement.refuse_norm(meshes)
        numbers, squares = _sent(mine, device)
        parts = [numbers] if losses is None else [numbers, losses.to(numbers)]
        if amax:
            parts.append(packed(mine.amax, device))
        summed = self.agreement(torch.cat(parts), meshes)
        if on_host:
            summed = summed.cpu()  # one read
        total = summed[1].sqrt()
        if squares == 2:
            total = torch.where(total.isfinite(), total, summed[2].sqrt() / UNIT)
        loss, largest = None, mine.amax
        if losses is not None and not (on_host and not summed[squares + 2]):  # perhaps no rank has one
            loss = summed[squares + 1] / summed[squares + 2]
        if amax and mine.amax is not None:
            largest = unpacked(summed[-BINS:])
        finite = (summed[0] == 0.0) & total.isfinite()
        found = Measured(finite, mine.scale, total if norm else None, largest, loss)
        return read_measured(found) if on_host else found

    def norm_again(self, state: OptimizerState, device: torch.device, *, on_host: bool) -> Any:
        """Return the norm over all ranks, after entries were clipped."""
        found, _ = measure(state, None, device, norm=True, amax=False, on_host=on_host)
        if self.agreement.needed(state.gradients.meshes):
            found = self.agree(found, state.gradients.meshes, device, norm=True, on_host=on_host)
        return found.grad_norm


def measure(
    state: OptimizerState, scale: Any, device: torch.device, *, norm: bool, amax: bool, on_host: bool
) -> tuple[Measured[Any], Tensor | None]:
    """Measure gradients as they are; the norm is that of the unscaled ones."""
    if on_host:
        return _on_host(state.gradients, scale, state.divisor, norm, amax), None
    return _on_device(state.gradients, scale, state.divisor, device, norm, amax)


def _on_host(gradients: Gradients, scale: float, divisor: float, norm: bool, amax: bool) -> Measured[Any]:
    """Measure in one pass, unless the norm overflows."""
    finite, total, largest = True, None, None
    if amax:
        amaxes = gradients.amaxes()
        largest = math.nan if any(map(math.isnan, amaxes)) else max(amaxes, default=0.0)  # NaN is not ordered
        finite = math.isfinite(largest)
    if norm and finite:
        total = gradients.norm()
        if not math.isfinite(total):
            finite, total = gradients.are_finite(), sys.float_info.max
        total /= divisor
    elif not amax:
        finite = gradients.are_finite()
    if finite and divisor < 1.0:  # dividing can overflow
        finite = gradients.fits(divisor)
    return Measured(finite, scale, total if finite else None, largest)


def _on_device(
    gradients: Gradients, scale: Tensor, divisor: Tensor, device: torch.device, norm: bool, amax: bool
) -> tuple[Measured[Any], Tensor]:
    """Measure without a read: the entries decide, in one pass; the norm takes a second one."""
    if not gradients.tensors:
        nothing = torch.zeros((), device=device)
        found = Measured(nothing == 0.0, scale, nothing if norm else None, nothing if amax else None)
        return found, nothing.view(1)
    sizes = gradients.largest()
    finite, total = gradients.fit(sizes, divisor).to(device), None
    largest = sizes.amax().to(device) if amax else None
    if norm:
        sizes = gradients.norms()
        total = gradients.total_norm(sizes).to(device) / divisor
    return Measured(finite, scale, total, largest), sizes


def _sent(mine: Measured[Any], device: torch.device) -> tuple[Tensor, int]:
    """Return what a rank adds to the sum, in the device's widest dtype, and how many squares are in it.

    1 if it overflowed; its squared norm and, where the dtype is float32, which does not hold the squares of
    large norms, that of the gradients times `UNIT`.
    """
    finite = wide(mine.finite, device)
    total = torch.where(finite > 0.0, wide(mine.grad_norm, device), 0.0)
    if total.dtype is torch.float32:
        return torch.stack([1.0 - finite, total.square(), (total * UNIT).square()]), 2
    return torch.stack([1.0 - finite, total.square()]), 1


def read(*numbers: Any) -> list[Any]:
    """Return numbers as Python numbers, with one read for those that are tensors; None stays None."""
    read, places = list(numbers), []
    for place, number in enumerate(numbers):
        if isinstance(number, Tensor):
            places.append(place)
    if places:
        device = numbers[places[0]].device
        values = torch.stack([wide(numbers[place], device) for place in places]).tolist()
        for place, value in zip(places, values, strict=True):
            read[place] = value
    return read


def read_measured(measured: Measured[Any]) -> Measured[Any]:
    """Return the same in Python numbers."""
    finite, *others = read(*measured)
    return Measured(bool(finite), *others)


def wide(number: Any, device: torch.device) -> Tensor:
    """Return a number where it is wanted, in the widest dtype there; 0 for None."""
    dtype = widest(device)
    if isinstance(number, Tensor):
        return number.to(device, dtype)
    number = 0.0 if number is None else number
    if number > torch.finfo(dtype).max:  # 2**128, which float32 does not hold: PyTorch would raise
        number = math.inf
    return torch.full((), number, dtype=dtype, device=device)


def packed(amax: Any, device: torch.device) -> Tensor:
    """Return an amax as a tensor of shape [BINS] in the device's widest dtype, to be summed over ranks.

    A one in the bin of the least exponent e with amax <= 2**e, none for an amax of 0.
    """
    mine = wide(amax, device)
    powers = _powers(LOWEST - 1, device).to(mine.dtype)
    return ((powers[:-1] < mine) & (mine <= powers[1:])).to(mine.dtype)


def unpacked(total: Tensor) -> Tensor:
    """Return the amax over all ranks of the sum of what they packed: a power of two; 0 without a bin."""
    powers = _powers(LOWEST, total.device).to(total.dtype)
    most = min(2.0**HIGHEST, torch.finfo(total.dtype).max)
    return torch.where(total > 0.0, powers, 0.0).amax().clamp(max=most)


def _powers(first: int, device: torch.device) -> Tensor:
    """Return 2**first, ..., 2**HIGHEST as float32, from their bits: 0 below 2**-149, inf above 2**127."""
    exponents = torch.arange(first, HIGHEST + 1, dtype=torch.int32, device=device)
    one = torch.ones_like(exponents)
    subnormal = one.bitwise_left_shift((exponents - LOWEST).clamp(0, 22)) * (exponents >= LOWEST)
    normal = (exponents + 127).clamp(min=0).bitwise_left_shift(23)
    return torch.where(exponents < -126, subnormal, normal).view(torch.float32)


def number(value: float, device: torch.device) -> Tensor:
    """Return a float32, which kernels want, whatever the user's default dtype is; inf for a larger number."""
    value = value if value <= FLOAT32_MAX else math.inf
    return torch.full((), value, dtype=torch.float32, device=device)
