"""A guard beside a scaler: its state for each optimizer, and the loss that it receives.

Each optimizer has statistics of its own: the norms of two optimizers' gradients need not be alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from preamp.arrays.torch_devices import widest
from preamp.checks import shown
from preamp.errors import PolicyError, UsageError
from preamp.guards import Guard
from preamp.guards.base import dump_state, map_state
from preamp.policy import choose
from preamp.scaling import GuardRecord, Measured, judge
from preamp.torch.scaling.gradient_stats import Losses, MeasuredGradients, Number, UnreadLoss
from preamp.torch.scaling.ranks import number_of_ranks


class Guarding:
    """A guard's states, one for each optimizer in the order in which they first stepped.

    Args:
        guard: the rule.
    """

    def __init__(self, guard: Guard[Any]) -> None:
        self.guard = guard
        self.uses_loss, self.uses_norm = "loss" in guard.uses, "grad_norm" in guard.uses
        self._states: list[Any] = []
        self._places: dict[int, int] = {}  # by the optimizer's id
        self._after: dict[int, GuardRecord[Any]] = {}  # of this iteration, by place

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_states": self._on_host(), "_places": {}, "_after": {}}

    @torch.no_grad()
    def judge(self, optimizer: object, measured: MeasuredGradients, loss: Number | None) -> GuardRecord[Any]:
        """Return what the guard decides about an optimizer's step. `commit` makes it remember the step.

        Args:
            optimizer: whose step it is.
            measured: what was found in its gradients, in Python numbers or in tensors.
            loss: the mean over ranks; None for a guard that does not use it.
        """
        place = self._places.setdefault(id(optimizer), len(self._places))
        if place == len(self._states):
            self._states.append(self.guard.start())
        state = self._states[place]
        norm = None if measured.norm is None else measured.norm / measured.divisor
        finite = measured.finite
        if isinstance(finite, Tensor):
            state = self._states[place] = _to_device(state, finite.device)
            loss, norm = [_here(one, finite.device) for one in (loss, norm)]
            where: Any = torch.where
        else:
            state = self._states[place] = _to_host(state)
            loss, norm = [None if one is None else float(one) for one in (loss, norm)]
            where = choose
        one = Measured(finite, measured.scale, norm, loss=loss)
        self._after[place] = record = judge(self.guard, state, one, where)
        return record

    @torch.no_grad()
    def commit(self) -> None:
        """Remember the steps of this iteration."""
        for place, record in self._after.items():
            before = self._states[place]
            if isinstance(record.taken, Tensor):  # in place: a captured graph reads and writes these tensors
                for old, new in zip(_tensors(before), _tensors(record.state), strict=True):
                    old.copy_(new)
            else:
                self._states[place] = record.state
        self._after = {}

    def forget(self) -> None:
        """Forget what was judged in this iteration."""
        self._after = {}

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states in Python numbers. Reads the device they are on."""
        return list(map(dump_state, self._on_host()))

    def check(self, saved: object) -> list[Any]:
        """Return the states that a checkpoint holds.

        Raises:
            PolicyError: for what this guard has not saved.
        """
        if not isinstance(saved, list | tuple):
            raise PolicyError(f"{shown(saved)} is not a list of a guard's states. Leave it out to start it.")
        return list(map(self.guard.restore, saved))

    def load(self, states: list[Any]) -> None:
        """Resume from states, of optimizers in the order in which they step."""
        on_device = [isinstance(leaf, Tensor) for state in self._states for leaf in _leaves(state)]
        if any(on_device) and len(states) == len(self._states):
            for state, before in zip(states, self._states, strict=True):  # a captured graph uses the tensors
                moved = _to_device(state, _tensors(before)[0].device)
                for old, new in zip(_tensors(before), _tensors(moved), strict=True):
                    old.copy_(new)
            return
        self._states, self._after = list(states), {}

    def _on_host(self) -> list[Any]:
        return list(map(_to_host, self._states))


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


def mean_over_all_ranks(loss: Number | None, device: torch.device) -> Number:
    """Return the mean of a loss over all ranks that have one, in one all-reduce.

    Args:
        loss: of this rank; None where it has none.
        device: where the ranks meet.
    """
    if number_of_ranks() == 1:
        assert loss is not None  # `loss_of` has seen to it
        return loss
    pair = loss_and_count(loss, device)
    dist.all_reduce(pair)
    mean = pair[0] / pair[1]
    return mean if isinstance(loss, Tensor) else float(mean)


def loss_and_count(loss: Number | None, device: torch.device) -> Tensor:
    """Return what ranks add up: the loss, 0 where there is none, and how many there are."""
    dtype = widest(device)
    if isinstance(loss, Tensor):
        value = loss.to(device, dtype)
        return torch.stack([value, torch.ones_like(value)])
    return torch.tensor([0.0, 0.0] if loss is None else [loss, 1.0], dtype=dtype, device=device)


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
    return _leaves(state)
