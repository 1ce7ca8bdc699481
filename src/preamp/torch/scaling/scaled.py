"""What was scaled since the last update: the losses, and the mistakes that can be seen from them."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from preamp.arrays.torch import Stamp
from preamp.arrays.torch_compat import is_of_transform
from preamp.arrays.torch_devices import is_capturing, widest
from preamp.checks import level_of_caller, some_of
from preamp.errors import UsageError
from preamp.guards import Guard
from preamp.scaling import Measured
from preamp.torch.scaling.buffers import some_are_ruined, statistics_in
from preamp.torch.scaling.culprits import Culprits, backward_order, culprits, largest, names
from preamp.torch.scaling.measure import OptimizerState
from preamp.torch.scaling.optimizers import OptimizerLike, parameters_of
from preamp.torch.scaling.ranks import number_of_ranks

SCALES = "scaler.scale(loss).backward()"  # what the user of a GradScaler writes


@dataclass(slots=True)
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


class ScaledLosses:
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

    def __init__(self, *, keeps_in_graphs: bool = False) -> None:
        self.sum: UnreadLoss | float | None = None
        self._is_known = True
        self.in_graphs: Tensor | None = None
        self.keeps_in_graphs = keeps_in_graphs

    def __getstate__(self) -> dict[str, Any]:
        return vars(ScaledLosses(keeps_in_graphs=self.keeps_in_graphs))

    def __copy__(self) -> ScaledLosses:
        twin = ScaledLosses()
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


def loss_of(losses: ScaledLosses, how_to_scale: str, guard: Guard[Any], *, may_lack: bool) -> Any:
    """Return the loss of this rank for a guard, not copied to the host if it is on a device.

    Args:
        losses: those that were scaled since the last update.
        how_to_scale: what the user of this scaler writes.
        guard: that uses it.
        may_lack: whether other ranks may be those that have a loss, as for a pipeline's first stages.

    Raises:
        UsageError: if it is not known.
    """
    known = losses.sum
    if torch.compiler.is_compiling() or losses.in_graphs is not None:
        inside = losses.in_graphs
        if isinstance(known, UnreadLoss):  # scaled in eager code; writes to it cannot be noticed here
            eager = known.tensor.detach().view(())
            return eager if inside is None else eager + inside
        if inside is not None:
            return inside
    if isinstance(known, UnreadLoss):
        if known.is_unchanged():
            return known.tensor.detach().view(())
    elif known is not None or (may_lack and losses.is_none):
        return known
    raise UsageError(
        f"{guard!r} needs the loss, which is not known: it is known if every {how_to_scale} of this step was "
        "given a single number in eager code, and the tensor was not changed in place since. Write a guard "
        'that needs only the norm of the gradients: SpikeGuard(watch="grad_norm").'
    )


def mean_over_ranks(loss: Any, device: torch.device, group: Any = None) -> Any:
    """Return the mean of a loss over all ranks that have one, in one all-reduce.

    Args:
        loss: of this rank; None where it has none.
        device: where the ranks meet.
        group: the ranks; None for all.
    """
    if number_of_ranks(group) == 1:
        assert loss is not None  # `loss_of` has seen to it
        return loss
    pair = loss_and_count(loss, device)
    dist.all_reduce(pair, group=group)
    mean = pair[0] / pair[1]
    return mean if isinstance(loss, Tensor) else float(mean)


def loss_and_count(loss: Any, device: torch.device) -> Tensor:
    """Return what ranks add up: the loss, 0 where there is none, and how many there are."""
    dtype = widest(device)
    if isinstance(loss, Tensor):
        value = loss.to(device, dtype)
        return torch.stack([value, torch.ones_like(value)])
    return torch.tensor([0.0, 0.0] if loss is None else [loss, 1.0], dtype=dtype, device=device)


class Scaled:
    """What a scaler has scaled since the last update.

    Args:
        keeps_in_graphs: as in `ScaledLosses`.
        expects_loss: whether a step without a loss is a mistake. Other ranks may scale it, and a replayed
            graph never calls `scale`.
        warns_of_ruined: whether nothing restores buffers that a skipped step leaves at inf.
        model: whose buffers are looked at; None to look at BatchNorm's statistics in the graph of the loss.

    Attributes:
        losses: their sum.
        count: how often, so that a closure that never scales is noticed.
        changed_by: what changed the scale after a loss was scaled with another.
    """

    def __init__(
        self, *, keeps_in_graphs: bool, expects_loss: bool, warns_of_ruined: bool, model: nn.Module | None
    ) -> None:
        self.losses = ScaledLosses(keeps_in_graphs=keeps_in_graphs)
        self.count = 0
        self.changed_by: str | None = None
        self._order: dict[int, int] | None = None  # in which backward reaches parameters, by their id
        self._statistics: list[weakref.ref[Tensor]] = []  # of batch norms
        self._is_pending = False  # whether a loss was scaled since the last update
        self._was_scaled = False  # whether one was since the last update after a step
        self._expects_loss, self._warns_of_ruined, self._model = expects_loss, warns_of_ruined, model

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None, "_statistics": []}

    def add(self, output: Tensor) -> None:
        """Note what is about to be scaled."""
        self.losses.add(output)
        self._is_pending, self._was_scaled, self.changed_by = True, True, None
        if torch.compiler.is_compiling():
            return
        self.count += 1
        if not output.is_cpu and is_capturing(output):
            self._is_pending = self._expects_loss = False  # a replayed graph never calls `scale`
        if self._order is None and output.grad_fn is not None:
            self._order = backward_order(output.grad_fn)
            if self._warns_of_ruined and self._model is None:
                self._statistics = statistics_in(output.grad_fn)

    def change_scale(self, by: str, before: float | None, after: float | None) -> None:
        """Note that the scale was changed, for gradients that have the one from before in them.

        Args:
            by: what changed it.
            before: the scale before, None where it is not known on the host.
            after: the scale after.
        """
        if self._is_pending and (before is None or before != after):
            self.changed_by = by

    def refuse_other_scale(self, optimizer: OptimizerLike) -> None:
        """Refuse scaled gradients that would be divided by another scale than the one in them."""
        if self.changed_by is not None and any(p.grad is not None for p in parameters_of(optimizer)):
            raise UsageError(
                f"{self.changed_by} changed the scale after the loss was scaled, so the gradients would be "
                f"divided by another number than they were multiplied by. Write {self.changed_by} after "
                "scaler.step(optimizer), or zero the gradients and scale the loss again."
            )

    @contextmanager
    def evaluation(self, losses: ScaledLosses) -> Iterator[None]:
        """Have a closure's evaluation replace the losses of those before it: the last one counts.

        Args:
            losses: a copy of those from before the first evaluation.

        Raises:
            UsageError: if the closure scales no loss.
        """
        count, self.losses = self.count, copy.copy(losses)
        yield
        if self.count == count:
            raise UsageError(f"the closure did not scale its loss. Write {SCALES} in it.")

    def note_culprits(
        self, state: OptimizerState, measured: Measured[Any], taken: Any, sizes: Tensor | None
    ) -> None:
        """Note how to name the parameters to blame for a step that is skipped; on the host name them.

        Args:
            state: of the optimizer, with its gradients.
            measured: in these.
            taken: whether the step is taken.
            sizes: the norm or the amax of each gradient, where that was not read.
        """
        if torch.compiler.is_compiling():  # which knows no weak references
            return
        gradients, owner = state.gradients, _weak(state.optimizer)
        name = partial(self._culprits, owner, list(map(id, gradients.parameters)))
        if sizes is not None:
            state.culprits = lambda spike: name(sizes.tolist(), spike)
        elif taken is False:
            is_spike = measured.finite and bool(gradients.tensors)
            named = name(gradients.norms().tolist() if is_spike else gradients.amaxes(), is_spike)
            state.culprits = lambda _: named

    def _culprits(
        self, owner: Callable[[], OptimizerLike | None], ids: list[int], sizes: list[float], spike: bool
    ) -> Culprits:
        optimizer = owner()
        if optimizer is None:
            return Culprits()
        named = names(optimizer, self._model)
        if spike:
            return largest(named, ids, sizes)
        order, self._order = self._order or {}, None  # a graph that changes is learnt again
        return culprits(named, ids, sizes, order)

    def next_iteration(self, *, stepped: bool) -> UnreadLoss | float | None:
        """Begin the next iteration; return the loss of this one, unread.

        Raises:
            UserWarning: a warning, once, if an optimizer has stepped and no loss was scaled.
        """
        self._is_pending, loss = False, self.losses.take()
        if not stepped:
            return loss
        if not self._was_scaled and self._expects_loss:
            self._expects_loss = False
            warnings.warn(
                "no loss was scaled before this step, so it divided the gradients by a scale that they were "
                f"not multiplied with. Write {SCALES}. With several optimizers, call update() once, after "
                "the last of their steps. If you multiply the loss by get_scale() yourself, ignore this.",
                UserWarning,
                stacklevel=level_of_caller("torch", "deepspeed"),
            )
        self._was_scaled = False
        return loss

    def warn_of_ruined(self, buffers: Callable[[], Any], kind: str) -> None:
        """Warn, once, if a skipped step has left inf or NaN in buffers and nothing puts them back.

        Args:
            buffers: names those of the model.
            kind: the scaler's class.
        """
        if not self._warns_of_ruined:
            return
        names = buffers().names
        if not names and not some_are_ruined(self._statistics):
            return
        self._warns_of_ruined = False
        found = some_of(names) or "the running statistics of BatchNorm"
        remedy = "restore_buffers=True beside model=model"
        if self._model is None:
            remedy = f"{kind}(..., model=model, restore_buffers=True)"
        warnings.warn(
            f"a skipped step left inf or NaN in {found}, and nothing restores them. The weights are "
            "unharmed, but in evaluation the model gives NaN, and so does an average of it that takes over "
            f"its buffers, such as AveragedModel. Write {remedy}.",
            UserWarning,
            stacklevel=level_of_caller("torch", "deepspeed"),
        )


def _weak(optimizer: OptimizerLike) -> Callable[[], OptimizerLike | None]:
    """Return what gives back an optimizer while it lives: a record keeps none alive."""
    with suppress(TypeError):  # an object of a class with __slots__
        return weakref.ref(optimizer)
    return lambda: optimizer


def read_loss(loss: UnreadLoss | Tensor | float | None) -> float | None:
    """Return a loss that may not have been read; None if it is not known."""
    if isinstance(loss, Tensor):
        return float(loss)
    return loss.read() if isinstance(loss, UnreadLoss) else loss
