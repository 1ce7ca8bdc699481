"""What is measured in a step: the gradients' statistics, on this rank and over all ranks, and the loss.

Numbers are Python numbers where the host may read, and 0-dim tensors elsewhere. Those are read when the
`Step` is asked for.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from preamp.arrays.torch import Gradients, Stamp
from preamp.arrays.torch_compat import is_of_transform
from preamp.arrays.torch_devices import widest
from preamp.errors import PolicyError
from preamp.policy import Policy
from preamp.scaling import STEPS, GuardRecord, Measured, Spike, Step, spike_in
from preamp.torch.scaling.buffers import Ruined
from preamp.torch.scaling.culprits import Culprits
from preamp.torch.scaling.ranks import Agreement

Number: TypeAlias = float | Tensor

# What ranks add up of a peak: a one in the bin of its exponent.
LOWEST, HIGHEST = -149, 128  # float32's binary exponents: a peak is at most 2**128
UNIT = 2.0**-80  # whose product with any float32 has a square in float32


class GradientStats(NamedTuple):
    """The peak of one optimizer's scaled gradients, for policies that need it.

    Attributes:
        peak: the largest magnitude, 0 without gradients; None where other code checked the gradients, which
            tells no peak.
        each: the peak of every gradient on this rank: a list, or a tensor that is not read.
    """

    peak: Number | None = None
    each: Any = None

    def read(self) -> GradientStats:
        """Return the same with the peak read to the host."""
        return self if self.peak is None else GradientStats(float(self.peak), self.each)


@dataclass(slots=True)
class MeasuredGradients:
    """What one optimizer's step found in its gradients.

    Attributes:
        scale: the scale that was in the loss.
        finite: whether all gradients on all ranks were finite.
        norm: global L2 norm of the gradients before clipping, where it was taken, times `divisor`.
        divisor: what the gradients were multiplied by when the norm was taken.
        culprits: names the parameters whose gradients on this rank are not finite.
        stats: the statistics over all ranks; None for a policy that needs none.
        skips: whether a step whose gradients are not finite is skipped; a disabled scaler takes it.
        found_inf: 0.0 if the step is to be taken, else 1.0, where that was computed on the device.
        guard: what a guard has decided; None without one.
        stepped: whether `step` was called; not after `unscale_` alone.
    """

    scale: Number
    finite: bool | Tensor
    norm: Number | None = None
    divisor: Number = 1.0
    culprits: Callable[[], Culprits] = Culprits
    stats: GradientStats | None = None
    skips: bool = True
    found_inf: Tensor | None = None
    guard: GuardRecord[Any] | None = None
    stepped: bool = True

    @property
    def taken(self) -> bool | Tensor:
        """Whether the step is to be taken."""
        return self.finite if self.guard is None else self.guard.taken

    def spike(self) -> Spike | None:
        """Return why a guard skips the step, of numbers that were read; None if it does not."""
        if self.guard is None or not self.finite:
            return None
        return spike_in(self.guard, None if self.norm is None else float(self.norm) / float(self.divisor))

    def read(self) -> MeasuredGradients:
        """Return the same with every number read to the host, and the norm of the unscaled gradients."""
        finite = bool(self.finite)
        norm = None if self.norm is None or not finite else float(self.norm) / float(self.divisor)
        guard = None
        if self.guard is not None:
            loss, limit = float(self.guard.loss), float(self.guard.limit)
            guard = GuardRecord((), bool(self.guard.taken), loss, bool(self.guard.loss_fits), limit)
        taken = finite if guard is None else guard.taken
        culprits = partial(Culprits, *(() if taken else self.culprits()))
        stats = None if self.stats is None else self.stats.read()
        return MeasuredGradients(
            float(self.scale), finite, norm, 1.0, culprits, stats, self.skips, None, guard, self.stepped
        )


class Found(NamedTuple):
    """What `GradientMeter.measure` returns, as Python numbers or as tensors that are not read.

    Attributes:
        finite: whether all gradients are finite, and stay so when divided.
        norm: their global L2 norm; None if it was not taken.
        stats: the statistics, over all ranks.
        sizes: the norm or the peak of each gradient on this rank; of what is not read.
        loss: the mean of the ranks' losses, if they were given.
    """

    finite: Any
    norm: Any
    stats: GradientStats | None
    sizes: Any = None
    loss: Any = None


class GradientMeter:
    """Measures gradients over ranks.

    Args:
        agreement: how ranks agree.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement

    def measure(
        self,
        gradients: Gradients,
        divisor: Any,
        device: torch.device,
        *,
        read: bool,
        norm: bool,
        finite: Any = True,
        agree: bool = True,
        stats: GradientStats | None = None,
        losses: Tensor | None = None,
    ) -> Found:
        """Measure whether all gradients are finite, and stay so when divided, and their global L2 norm.

        Args:
            gradients: as they are, scaled or not.
            divisor: what they will be divided by.
            device: where other ranks expect what this one has found, wherever its gradients are.
            read: whether the host reads.
            norm: whether the norm is wanted.
            finite: what is known of this rank before.
            agree: whether ranks agree; without, all of this is of this rank alone.
            stats: of this rank's gradients while they were scaled, if the policy uses them.
            losses: this rank's loss and how many it has, to be added up beside the rest.

        Raises:
            PolicyError: for a norm over ranks that cannot be determined.
        """
        agree = agree and (self.agreement.always or bool(gradients.meshes))
        loss: Any = None
        total: Any
        if read:
            finite, total = self._read(gradients, divisor, finite, norm, stats)
            if agree:
                here = _wide(not finite, device), _wide(total / divisor if finite else 0.0, device)
                summed, stats = self._summed(_sent(*here, losses), gradients.meshes, norm, stats)
                read_sum = summed.cpu()  # one read
                overflows, unscaled, pair = _received(read_sum)
                finite, total = not overflows.item() and unscaled.isfinite().item(), unscaled.item() * divisor
                loss = pair[0].item() / pair[1].item() if pair is not None and pair[1] else None
                stats = None if stats is None else stats.read()
            return Found(finite, total if finite and norm else None, stats, None, loss)

        is_finite, total, sizes = self._on_device(gradients, divisor, device, norm, stats)
        is_finite = is_finite & finite if finite is not True else is_finite
        if agree:
            wide = widest(device)
            total = torch.zeros((), device=device) if total is None else total
            unscaled = torch.where(is_finite, total.to(wide) / divisor, 0.0)
            summed, stats = self._summed(
                _sent(is_finite.logical_not().to(wide), unscaled, losses), gradients.meshes, norm, stats
            )
            overflows, unscaled, pair = _received(summed)
            is_finite, total = (overflows == 0.0) & unscaled.isfinite(), unscaled * divisor
            loss = None if pair is None else pair[0] / pair[1]
        return Found(is_finite, total if norm else None, stats, sizes, loss)

    def _on_device(
        self,
        gradients: Gradients,
        divisor: Tensor,
        device: torch.device,
        norm: bool,
        stats: GradientStats | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return whether this rank's gradients are finite, their norm if wanted, the size of each; unread.

        The entries decide, in one pass; the norm takes a second one.
        """
        if not gradients.tensors:
            nothing = torch.zeros((), device=device)
            return nothing == 0.0, nothing, nothing.view(1)
        sizes = gradients.largest() if stats is None or stats.each is None else stats.each
        is_finite = gradients.fit(sizes, divisor).to(device)
        if not norm:
            return is_finite, None, sizes
        sizes = gradients.norms()
        return is_finite, gradients.total_norm(sizes).to(device), sizes

    def flags(
        self,
        found: dict[torch.device, Tensor],
        meshes: list[Any],
        device: torch.device,
        stats: GradientStats | None = None,
    ) -> tuple[dict[torch.device, Tensor], GradientStats | None]:
        """Return found_inf flags, and statistics, that all ranks agree on, unread; they meet on a device."""
        if not self.agreement.needed(meshes):
            return found, stats
        flag = torch.stack([one.to(device, widest(device)) for one in found.values()]).sum()
        summed, stats = self._summed(_sent(flag, torch.zeros_like(flag)), meshes, False, stats)
        overflows = summed[0]
        return {place: (overflows > 0.0).to(place, torch.float32) for place in found}, stats

    def _read(
        self,
        gradients: Gradients,
        divisor: float,
        finite: bool,
        norm: bool,
        stats: GradientStats | None,
    ) -> tuple[bool, float]:
        """Return whether this rank's gradients are finite, and their norm, 0 if it is not wanted."""
        total = 0.0
        if norm:
            total = gradients.norm()
            if not math.isfinite(total):
                finite, total = finite and gradients.are_finite(), sys.float_info.max
        elif finite:
            finite = gradients.are_finite() if stats is None else math.isfinite(stats.peak or 0.0)
        # Dividing by less than 1 can overflow.
        return finite and (divisor >= 1.0 or gradients.fits(divisor)), total

    def _summed(
        self, mine: Tensor, meshes: list[Any], norm: bool, stats: GradientStats | None
    ) -> tuple[Tensor, GradientStats | None]:
        """Return the sum of some numbers over ranks, and the statistics of all."""
        if norm:
            self.agreement.refuse_norm(meshes)
        if stats is None:
            return self.agreement(mine, meshes), None
        total = self.agreement(torch.cat([mine, packed(stats, mine.device)]), meshes)
        return total[: len(mine)], unpacked(total[len(mine) :], stats)


def _sent(overflows: Tensor, norm: Tensor, losses: Tensor | None = None) -> Tensor:
    """Return what a rank adds to a sum over ranks, in the device's widest dtype.

    The squared norm is followed by that of the gradients times `UNIT` where the dtype is float32, which does
    not hold the squares of large norms; then come the losses.
    """
    numbers = [overflows, norm.square()]
    if norm.dtype is torch.float32:
        numbers.append((norm * UNIT).square())
    sent = torch.stack(numbers)
    return sent if losses is None else torch.cat([sent, losses.to(sent)])


def _received(summed: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return how many ranks overflowed, the norm over all of them, and the losses with their count, if sent.

    Over ranks, a norm whose square the dtype does not hold is not finite, and its step is skipped.
    """
    norm, after = summed[1].sqrt(), 2
    if summed.dtype is torch.float32:
        norm, after = torch.where(norm.isfinite(), norm, summed[2].sqrt() / UNIT), 3
    return summed[0], norm, summed[after:] if len(summed) > after else None


# ---- Statistics --------------------------------------------------------------------------------------------


def gradient_stats(gradients: Gradients, device: torch.device, *, read: bool) -> GradientStats:
    """Return the peak of one optimizer's scaled gradients; it tells whether all are finite, too.

    Args:
        gradients: each is read once.
        device: for a result that is not read.
        read: whether the host may read.
    """
    if not gradients.tensors:
        return GradientStats(0.0)
    each = gradients.largest()
    if not read:
        return GradientStats(each.amax().to(device), each)
    peaks = each.tolist()
    # NaN compares with nothing
    return GradientStats(math.nan if any(map(math.isnan, peaks)) else max(peaks), peaks)


def packed(stats: GradientStats, device: torch.device) -> Tensor:
    """Return a peak as a tensor of shape [278] in the device's widest dtype, to be summed over ranks.

    A one in the bin of the least exponent e with peak <= 2**e, none for a peak of 0.
    """
    peak = _wide(stats.peak, device)
    powers = _powers(LOWEST - 1, device).to(peak.dtype)
    return ((powers[:-1] < peak) & (peak <= powers[1:])).to(peak.dtype)


def unpacked(total: Tensor, mine: GradientStats) -> GradientStats:
    """Return the peak over all ranks.

    Args:
        total: the sum of what they packed.
        mine: what this rank has measured; None where it has not.
    """
    powers = _powers(LOWEST, total.device).to(total.dtype)
    most = min(2.0**HIGHEST, torch.finfo(total.dtype).max)
    peak = torch.where(total > 0.0, powers, 0.0).amax().clamp(max=most)  # exact; 0 without a bin
    return GradientStats(None if mine.peak is None else peak, mine.each)


# ---- The record --------------------------------------------------------------------------------------------


def measured_of(steps: Sequence[MeasuredGradients], policy: Policy[Any]) -> Measured[Any]:
    """Return what one or several optimizers' steps found, together.

    Raises:
        PolicyError: for a policy that needs the peak, where other code has checked the gradients.
    """
    finite: Any = steps[0].finite if len(steps) == 1 else all_true([step.finite for step in steps])
    norm = None
    if isinstance(finite, bool) and finite:
        norms = [None if step.norm is None else step.norm / step.divisor for step in steps if step.stepped]
        norm = math.hypot(*norms) if norms and None not in norms else None  # type: ignore[arg-type]
    if not policy.needs_peak:
        return Measured(finite, steps[0].scale, norm)
    peaks = [step.stats.peak for step in steps if step.stats is not None and step.stats.peak is not None]
    if len(peaks) < len(steps):
        raise PolicyError(
            f"{policy!r} needs the peak of the gradients, but other code has checked them and reports only "
            "whether they are finite. Write scaler.unscale_(optimizer) or scaler.step(optimizer) as they are "
            "in GradScaler, or policy=Dynamic(), which needs no more."
        )
    return Measured(finite, steps[0].scale, norm, reduce(_larger, peaks))


def step_of(
    steps: Sequence[MeasuredGradients],
    index: int | Tensor,
    new_scale: Number | None,
    loss: UnreadLoss | float | None = None,
    buffers: Callable[[], Ruined] = Ruined,
    before: Callable[[], Step | None] | Step | None = None,
    owners: bool = True,
) -> Step | None:
    """Return the `Step` of one or several optimizers, after reading it from the device.

    An optimizer that was unscaled and did not step counts only if it has skipped.

    Args:
        steps: what the optimizers' steps found.
        index: of the step.
        new_scale: the scale of the next step, if it is known.
        loss: the loss, not scaled.
        buffers: names the model's buffers that are not finite; called if the step was skipped.
        before: what to return if none of them counts.
        owners: whether a culprit tells which optimizer has it, if there are several.
    """
    read = [one for one in [step.read() for step in steps] if one.stepped or not one.finite]
    if not read:
        return before() if callable(before) else before
    ruined = Ruined() if all(step.taken for step in read) else buffers()
    found = culprits_of(read, owners=owners)
    finite = all(step.finite for step in read)
    norms = [step.norm for step in read if isinstance(step.norm, float)]
    peaks = [step.stats.peak for step in read if step.stats and isinstance(step.stats.peak, float)]
    return STEPS["torch"](
        int(index),
        float(read[0].scale),
        finite,
        skipped=any(step.skips and not step.taken for step in read),
        new_scale=None if new_scale is None else float(new_scale),
        loss=read_loss(loss),
        grad_norm=math.hypot(*norms) if len(norms) == len(read) else None,
        peak=max(peaks) if finite and len(peaks) == len(read) else None,
        culprits=found.names,
        buffers=ruined.names,
        spike=spike_of_steps(read),
        restored=ruined.restored,
        first_culprits=found.first,
    )


def spike_of_steps(steps: Sequence[MeasuredGradients]) -> Spike | None:
    """Return why a guard skipped the first step that it did skip, if no gradient overflowed."""
    if not all(step.finite for step in steps):
        return None
    return next(filter(None, [step.spike() for step in steps]), None)


def read_loss(loss: UnreadLoss | float | None) -> float | None:
    """Return a loss that may not have been read; None if it is not known."""
    return loss.read() if isinstance(loss, UnreadLoss) else loss


def mean_in(step: MeasuredGradients) -> UnreadLoss | float | None:
    """Return the mean loss over ranks that a guard was given, unread if it is on a device."""
    if step.guard is None:
        return None
    loss = step.guard.loss
    return UnreadLoss(loss, Stamp.of(loss)) if isinstance(loss, Tensor) else float(loss)


def culprits_of(steps: Sequence[MeasuredGradients], *, owners: bool) -> Culprits:
    """Return the parameters whose gradients are not finite, of all optimizers.

    Args:
        steps: what the optimizers' steps found, in their order.
        owners: whether the names of several optimizers begin with `optimizers[0].` and so on.
    """
    found = [step.culprits() for step in steps]
    if owners and len(found) > 1:
        begins = [f"optimizers[{number}]." for number in range(len(found))]
        found = [
            Culprits(*[tuple(begin + name for name in names) for names in one])
            for begin, one in zip(begins, found, strict=True)
        ]
    listed = tuple(name for one in found for name in one.names)
    having = [one for one in found if one.names]
    return Culprits(listed, having[0].first if len(having) == 1 else ())


# ---- The loss ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnreadLoss:
    """A loss that is still on its device, in the tensor that the user has as well.

    Attributes:
        tensor: of one element.
        stamp: of the tensor, when the loss was scaled.
    """

    tensor: Tensor
    stamp: Stamp

    def is_unchanged(self) -> bool:
        """Return whether nobody has written to the tensor since, as `loss.mul_(0)` does."""
        return self.stamp.fits(self.tensor)

    def read(self) -> float | None:
        """Read the loss; None if the tensor was written to since."""
        return float(self.tensor) if self.stamp.fits(self.tensor) else None


class Losses:
    """The sum of the losses on this rank that were scaled since the last update, not scaled themselves.

    That is the loss whose gradients the step applies, where each is scaled once. A loss that is scaled while
    gradients are disabled does not count. The first loss is kept as it is; every further one costs an
    addition. If a closure is evaluated several times, the last evaluation counts. The sum is not known if one
    of the losses is not a single number, is a tensor of another class (a DTensor can only be read by all
    ranks together), was scaled inside a function transform, or was changed in place before it was read.
    Losses in compiled code are not known, unless a guard asks for them.

    Attributes:
        sum: the sum, unread; None if there is none, or it is not known.
        in_graphs: the sum of those in compiled code, for a guard.
        keeps_in_graphs: whether there is one that uses it.
    """

    def __init__(self) -> None:
        self.sum: UnreadLoss | float | None = None
        self._is_known = True
        self.in_graphs: Tensor | None = None  # of losses in compiled code
        self.keeps_in_graphs = False

    def __getstate__(self) -> dict[str, Any]:
        return {"sum": None, "_is_known": True, "in_graphs": None, "keeps_in_graphs": self.keeps_in_graphs}

    def __copy__(self) -> Losses:
        twin = Losses()
        twin.__dict__.update(self.__dict__)
        return twin

    @property
    def is_none(self) -> bool:
        """Whether no loss was scaled."""
        return self.sum is None and self._is_known

    def add(self, loss: Any) -> None:
        """Add a loss that is about to be scaled. It is not read."""
        if not torch.is_grad_enabled():  # of a validation
            return
        if torch.compiler.is_compiling():
            if self.keeps_in_graphs and isinstance(loss, Tensor) and loss.numel() == 1:
                number = loss.detach().float().view(())
                self.in_graphs = number if self.in_graphs is None else self.in_graphs + number
            return
        if not self._is_known:
            return
        is_number = type(loss) is Tensor and loss.numel() == 1 and not loss.is_complex()
        was_changed = isinstance(self.sum, UnreadLoss) and not self.sum.is_unchanged()
        if was_changed or not is_number or is_of_transform(loss):
            self.sum, self._is_known = None, False
            return
        number = loss.detach() if loss.requires_grad else loss  # keeps no graph alive, and copies nothing
        if loss._is_view():
            number = number.clone()  # or all of the tensor that it is a part of would be kept
        total = number if self.sum is None else _total(self.sum, number)
        self.sum = UnreadLoss(total, Stamp.of(total))

    def read(self) -> None:
        """Read the sum now, such as together with a flag that the host waits for anyway."""
        if isinstance(self.sum, UnreadLoss):
            self.sum = self.sum.read()
            self._is_known = self.sum is not None

    def take(self) -> UnreadLoss | float | None:
        """Return the sum, unread, and begin with the next iteration."""
        total, self.sum, self._is_known, self.in_graphs = self.sum, None, True, None
        return total


@torch.no_grad()
def _total(total: UnreadLoss | float, loss: Tensor) -> Tensor:
    """Return a sum in float32 at least."""
    if not isinstance(total, UnreadLoss):
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) + total
    before = total.tensor
    wide = torch.promote_types(before.dtype, torch.float32)
    return before.view(()).to(wide) + loss.view(()).to(before.device, non_blocking=True)


# ---- Numbers that may be tensors ---------------------------------------------------------------------------


def _wide(number: Any, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(device, widest(device))
    dtype = widest(device)
    number = 0.0 if number is None else number
    if number > torch.finfo(dtype).max:  # 2**128, which float32 does not hold: PyTorch would raise
        number = math.inf
    return torch.full((), number, dtype=dtype, device=device)


def _powers(first: int, device: torch.device) -> Tensor:
    """Return 2**first, ..., 2**HIGHEST as float32, from their bits: 0 below 2**-149, inf above 2**127."""
    exponents = torch.arange(first, HIGHEST + 1, dtype=torch.int32, device=device)
    one = torch.ones_like(exponents)
    subnormal = one.bitwise_left_shift((exponents - LOWEST).clamp(0, 22)) * (exponents >= LOWEST)
    normal = (exponents + 127).clamp(min=0).bitwise_left_shift(23)
    return torch.where(exponents < -126, subnormal, normal).view(torch.float32)


def _larger(a: Any, b: Any) -> Any:
    if isinstance(b, Tensor):
        a, b = b, a
    if not isinstance(a, Tensor):
        return max(a, b)
    return torch.maximum(a, b.to(a.device) if isinstance(b, Tensor) else torch.full_like(a, b))


def all_true(finite: Iterable[Any]) -> Any:
    return reduce(_both, _tensors_first(finite))


def _both(a: Any, b: Any) -> Any:
    return a & (b.to(a.device) if isinstance(b, Tensor) else b)


def _tensors_first(numbers: Iterable[Any]) -> list[Any]:
    return sorted(numbers, key=lambda one: not isinstance(one, Tensor))
