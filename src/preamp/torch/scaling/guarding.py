"""A guard beside a scaler: its state for each optimizer, and the loss that it receives.

Each optimizer has statistics of its own: the norms of two optimizers' gradients need not be alike.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from preamp.arrays.torch_devices import widest
from preamp.checks import level_of_caller, shown
from preamp.errors import PolicyError, UsageError
from preamp.guards import Guard
from preamp.guards.base import dump_state, map_state
from preamp.guards.skips import SkipsInARow
from preamp.policy import choose
from preamp.scaling import GuardRecord, Measured, judge
from preamp.torch.scaling.gradient_stats import Losses, MeasuredGradients, Number, UnreadLoss
from preamp.torch.scaling.ranks import number_of_ranks

TO_RESTART = "To start the guard again, write del state_dict['preamp_state']['guard'] before load_state_dict."


DROPS_GUARD = (
    "The checkpoint holds the state of a guard, and there is none here: spikes are not skipped. Write guard= "
    "as in the run that saved it, and load it again."
)


def has_guard(state_dict: object) -> bool:
    """Return whether the state dict of a scaler holds the state of a guard."""
    ours = state_dict.get("preamp_state") if isinstance(state_dict, Mapping) else None
    return isinstance(ours, Mapping) and bool(ours.get("guard"))


class Size(NamedTuple):
    """What an optimizer is recognized by in a checkpoint.

    Attributes:
        tensors: how many parameters it has.
        entries: how many entries these have; on this rank, where shards are flat.
    """

    tensors: int
    entries: int

    @classmethod
    def of(cls, optimizer: Any) -> Size:
        """Return the size of an optimizer."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return cls(len(parameters), sum(parameter.numel() for parameter in parameters))


@dataclass
class Track:
    """What a guard remembers of one optimizer.

    Attributes:
        state: the guard's state, in Python numbers or in tensors.
        size: of the optimizer.
        after: what was decided in this iteration, until it is committed.
        finite: whether its last gradients were.
        optimizer: a reference that does not keep it alive.
    """

    state: Any
    size: Size
    after: GuardRecord[Any] | None = None
    finite: bool | Tensor = True
    optimizer: weakref.ref[Any] | None = None


class Guarding:
    """A guard's states, one for each optimizer.

    Args:
        guard: the rule.
        loss_group: the ranks whose mean loss it judges; None for all.
    """

    def __init__(self, guard: Guard[Any], loss_group: Any = None) -> None:
        self.guard, self.loss_group = guard, loss_group
        self.uses_loss, self.uses_norm = "loss" in guard.uses, "grad_norm" in guard.uses
        self._skips = SkipsInARow(guard)
        self._tracks: dict[int, Track] = {}  # by the optimizer's id, in the order of their first steps
        self._saved: list[Track] = []  # of a checkpoint, until an optimizer takes its first step

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tracks": {}, "_saved": self._on_host()}

    @torch.no_grad()
    def judge(self, optimizer: object, measured: MeasuredGradients, loss: Number | None) -> GuardRecord[Any]:
        """Return what the guard decides about an optimizer's step. `commit` makes it remember the step.

        Args:
            optimizer: whose step it is.
            measured: what was found in its gradients, in Python numbers or in tensors.
            loss: the mean over ranks; None for a guard that does not use it.
        """
        if id(optimizer) not in self._tracks:
            self._begin(optimizer)
        track = self._tracks[id(optimizer)]
        norm = None if measured.norm is None else measured.norm / measured.divisor
        finite = measured.finite
        if isinstance(finite, Tensor):
            track.state = _to_device(track.state, finite.device)
            loss, norm = [_here(one, finite.device) for one in (loss, norm)]
            where: Any = torch.where
        else:
            track.state = _to_host(track.state)
            loss, norm = [None if one is None else float(one) for one in (loss, norm)]
            where = choose
        one = Measured(finite, measured.scale, norm, loss=loss)
        track.after = record = judge(self.guard, track.state, one, where)
        track.finite = finite
        return record

    @torch.no_grad()
    def commit(self) -> None:
        """Remember the steps of this iteration."""
        for track in self._tracks.values():
            record, track.after = track.after, None
            if record is None:
                continue
            if isinstance(record.taken, Tensor):
                _write(track.state, record.state)
            else:
                track.state = record.state
                self._skips.note(record.taken, record.taken or bool(track.finite), "torch")

    def forget(self) -> None:
        """Forget what was judged in this iteration."""
        for track in self._tracks.values():
            track.after = None

    def state_dict(self) -> dict[str, Any]:
        """Return the states and the sizes of their optimizers, in Python numbers. Reads the device.

        Tuples, because `torch.distributed.checkpoint` saves them whole, of whatever length.
        """
        tracks = self._on_host()
        sizes = tuple(tuple(track.size) for track in tracks)
        return {"guard": tuple(dump_state(track.state) for track in tracks), "guard_of": sizes}

    def check(self, saved: Mapping[str, Any]) -> list[Track]:
        """Return the states that a checkpoint holds.

        Args:
            saved: the entries of `state_dict`, among others. Without them there are no states.

        Raises:
            PolicyError: for what this guard has not saved.
        """
        states, sizes = saved.get("guard", ()), saved.get("guard_of", ())
        if not isinstance(states, list | tuple):
            raise PolicyError(f"{shown(states)} is not a list of a guard's states. {TO_RESTART}")
        if not isinstance(sizes, list | tuple) or len(sizes) != len(states):
            raise PolicyError(f"guard_of={shown(sizes)} is not a size for each state. {TO_RESTART}")
        try:
            restored = list(map(self.guard.restore, states))
        except PolicyError as error:
            raise PolicyError(f"{error} {TO_RESTART}") from None
        return [Track(state, Size(*size)) for state, size in zip(restored, sizes, strict=True)]

    def load(self, saved: list[Track]) -> None:
        """Resume from what `check` returned.

        Raises:
            UserWarning: a warning, for an optimizer whose state is not among it.
        """
        self._saved = list(saved)
        for track in self._tracks.values():
            found = self._claimed(track.size)
            state = self.guard.start() if found is None else found.state
            leaf = next(iter(_tensors(track.state)), None)
            if leaf is None:
                track.state = state
            else:
                _write(track.state, _to_device(state, leaf.device))
            track.after = None

    def _begin(self, optimizer: Any) -> None:
        """Begin to remember an optimizer that takes its first step, with what a checkpoint holds of it."""
        size = Size.of(optimizer)
        found = self._claimed(size)
        track = Track(self.guard.start() if found is None else found.state, size)
        self._tracks[id(optimizer)] = track
        if not torch.compiler.is_compiling():
            with suppress(TypeError):  # an object of a class with __slots__
                forget = partial(_forget, self._tracks, id(optimizer))
                track.optimizer = weakref.ref(optimizer, forget)  # another object may get its id

    def _claimed(self, size: Size) -> Track | None:
        """Return the saved state of an optimizer of some size; None if there is none."""
        if not self._saved:
            return None
        alike = [track for track in self._saved if track.size == size]
        # Flat shards have other sizes with another number of ranks, but there are as many.
        alike = alike or [track for track in self._saved if track.size.tensors == size.tensors]
        if not alike:
            tensors = ", ".join(str(track.size.tensors) for track in self._saved)
            warnings.warn(
                f"{self.guard!r} starts again for an optimizer of {size.tensors} parameters: the checkpoint "
                f"holds its state for optimizers of {tensors}.",
                stacklevel=level_of_caller("torch"),
            )
            return None
        if len(alike) > 1:
            warnings.warn(
                f"{self.guard!r} has states for {len(alike)} optimizers of the same size, and gives them out "
                "in the order in which the optimizers take their first steps. Keep that order.",
                stacklevel=level_of_caller("torch"),
            )
        found = alike[0]
        self._saved = [track for track in self._saved if track is not found]
        return found

    def _on_host(self) -> list[Track]:
        tracks = [*self._tracks.values(), *self._saved]
        return [Track(_to_host(track.state), track.size) for track in tracks]


def loss_of(losses: Losses, how_to_scale: str, guard: Guard[Any], *, may_lack: bool) -> Number | None:
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


def mean_over_ranks(loss: Number | None, device: torch.device, group: Any = None) -> Number:
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


def loss_and_count(loss: Number | None, device: torch.device) -> Tensor:
    """Return what ranks add up: the loss, 0 where there is none, and how many there are."""
    dtype = widest(device)
    if isinstance(loss, Tensor):
        value = loss.to(device, dtype)
        return torch.stack([value, torch.ones_like(value)])
    return torch.tensor([0.0, 0.0] if loss is None else [loss, 1.0], dtype=dtype, device=device)


def _forget(tracks: dict[int, Track], key: int, _: object) -> None:
    tracks.pop(key, None)


def _write(state: Any, new: Any) -> None:
    """Write a state into the tensors of another: a captured graph reads and writes these."""
    for old, leaf in zip(_tensors(state), _tensors(new), strict=True):
        old.copy_(leaf)


def _to_host(state: Any) -> Any:
    if not any(isinstance(leaf, Tensor) for leaf in _leaves(state)):
        return state
    return map_state(_read, state)


def _read(leaf: Tensor) -> Any:
    return tuple(leaf.tolist()) if leaf.dim() else leaf.item()


def _to_device(state: Any, device: torch.device) -> Any:
    if all(isinstance(leaf, Tensor) for leaf in _leaves(state)):
        return state
    return map_state(lambda leaf: torch.tensor(leaf, dtype=torch.float32, device=device), state)


def _here(number: Number | None, device: torch.device) -> Tensor | None:
    if number is None:
        return None
    if not isinstance(number, Tensor):
        return torch.full((), number, dtype=torch.float32, device=device)
    return number.detach().to(device, torch.float32)


def _leaves(state: Any) -> list[Any]:
    leaves: list[Any] = []
    map_state(leaves.append, state)
    return leaves


def _tensors(state: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(state) if isinstance(leaf, Tensor)]
