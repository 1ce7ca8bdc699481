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
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from preamp.checks import level_of_caller, shown
from preamp.errors import PolicyError
from preamp.guards import Guard
from preamp.guards.base import dump_state, map_state
from preamp.guards.skips import SkipsInARow
from preamp.policy import Where, choose
from preamp.scaling import GuardRecord, Measured, judge
from preamp.torch.scaling.measure import read_measured
from preamp.torch.scaling.ranks import number_of_ranks
from preamp.torch.scaling.scaled import SCALES, ScaledLosses, loss_and_count, loss_of, mean_over_ranks

TO_RESTART = "To start the guard again, write del state_dict['preamp_state']['guard'] before load_state_dict."
DROPS_GUARD = (
    "The checkpoint holds the state of a guard, and there is none here: spikes are not skipped. Write guard= "
    "as in the run that saved it, and load it again."
)


def has_guard(state_dict: object) -> bool:
    """Return whether the state dict of a scaler holds the state of a guard."""
    ours = state_dict.get("preamp_state") if isinstance(state_dict, Mapping) else None
    return isinstance(ours, Mapping) and bool(ours.get("guard"))


class Fingerprint(NamedTuple):
    """The fingerprint by which a checkpoint's states are matched to optimizers.

    Attributes:
        tensors: how many parameters it has.
        entries: how many entries these have; on this rank, where shards are flat.
    """

    tensors: int
    entries: int

    @classmethod
    def of(cls, optimizer: Any) -> Fingerprint:
        """Return the fingerprint of an optimizer."""
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
    size: Fingerprint
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
    def judge(self, optimizer: object, measured: Measured[Any]) -> GuardRecord[Any]:
        """Return what the guard decides about an optimizer's step. `commit` makes it remember the step.

        Args:
            optimizer: whose step it is.
            measured: what was found in its gradients, in Python numbers or in tensors, and the mean loss over
                ranks.
        """
        if id(optimizer) not in self._tracks:
            self._begin(optimizer)
        track, where = self._tracks[id(optimizer)], cast(Where, choose)
        device = measured.finite.device if isinstance(measured.finite, Tensor) else None
        track.state = _moved(track.state, device)
        if device is None:
            measured = read_measured(measured)
        else:
            where = torch.where
            norm, loss = _here(measured.grad_norm, device), _here(measured.loss, device)
            measured = Measured(measured.finite, measured.scale, norm, measured.amax, loss)
        track.after = record = judge(self.guard, track.state, measured, where)
        track.finite = measured.finite
        return record

    @torch.no_grad()
    def loss(
        self, losses: ScaledLosses, device: torch.device, *, joins: bool, may_lack: bool, on_host: bool
    ) -> tuple[Any, Tensor | None]:
        """Return the mean loss over ranks or, if it is to join a sum over ranks, its addends.

        It joins where the ranks of the gradients are those of the loss. Ranks that hold copies of a model see
        other losses, and have to make the same decision: then the loss has an all-reduce of its own.

        Args:
            losses: those that were scaled on this rank.
            device: where the ranks meet.
            joins: whether there is such a sum.
            may_lack: whether other ranks may be those that have a loss.
            on_host: whether the host may synchronize.
        """
        if on_host:
            losses.read()
        lacks = may_lack and number_of_ranks(self.loss_group) > 1
        loss = loss_of(losses, SCALES, self.guard, may_lack=lacks)
        if joins:
            return None, loss_and_count(loss, device)
        return mean_over_ranks(loss, device, self.loss_group), None

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
        return [Track(state, Fingerprint(*size)) for state, size in zip(restored, sizes, strict=True)]

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
                _write(track.state, _moved(state, leaf.device))
            track.after = None

    def _begin(self, optimizer: Any) -> None:
        """Begin to remember an optimizer that takes its first step, with what a checkpoint holds of it."""
        size = Fingerprint.of(optimizer)
        found = self._claimed(size)
        track = Track(self.guard.start() if found is None else found.state, size)
        self._tracks[id(optimizer)] = track
        if not torch.compiler.is_compiling():
            with suppress(TypeError):  # an object of a class with __slots__
                forget = partial(_forget, self._tracks, id(optimizer))
                track.optimizer = weakref.ref(optimizer, forget)  # another object may get its id

    def _claimed(self, size: Fingerprint) -> Track | None:
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
        return [Track(_moved(track.state, None), track.size) for track in tracks]


def _forget(tracks: dict[int, Track], key: int, _: object) -> None:
    tracks.pop(key, None)


def _write(state: Any, new: Any) -> None:
    """Write a state into the tensors of another: a captured graph reads and writes these."""
    for old, leaf in zip(_tensors(state), _tensors(new), strict=True):
        old.copy_(leaf)


def _moved(state: Any, device: torch.device | None) -> Any:
    """Return a state in float32 tensors on a device or, for None, in Python numbers."""
    found = _leaves(state)
    if device is None:
        return map_state(_read, state) if any(isinstance(leaf, Tensor) for leaf in found) else state
    if all(isinstance(leaf, Tensor) for leaf in found):
        return state
    return map_state(lambda leaf: torch.tensor(leaf, dtype=torch.float32, device=device), state)


def _read(leaf: Tensor) -> Any:
    return tuple(leaf.tolist()) if leaf.dim() else leaf.item()


def _here(number: Any, device: torch.device) -> Tensor | None:
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
