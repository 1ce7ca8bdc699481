"""Follows inf and NaN through a step, to the operator that makes them first, forward or backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from preamp.torch.blaming.calls import raised
from preamp.torch.blaming.saved import memory_of
from preamp.torch.blaming.tallies import Place, amax_of

# What an inf that the program itself writes, such as that of a mask, is written with.
WRITING = ("fill", "full", "full_like", "index_fill", "masked_fill", "new_full", "setitem", "where")


class Unrepaired(NamedTuple):
    """A tensor as the program has it: what is not finite in it has not been replaced.

    Attributes:
        value: the tensor.
        suspects: the rows that made it so. Each has what makes inf or NaN of the values that it lost, "" if
            these overflowed.
    """

    value: Tensor
    suspects: dict[Place, str]


class Origin(NamedTuple):
    """Where a tensor in float32 comes from.

    Attributes:
        what: it has: "inf", "NaN" or "".
        maker: who made it or, if the step did not, the first call that uses it.
        inputs: of which it was made; none if the step did not make it.
        was_inf: whether it is NaN because an input has inf.
    """

    what: str
    maker: Place
    inputs: Sequence[Origin]
    was_inf: bool = False

    def first(self, what: str) -> Origin:
        """Return where the inf or NaN in it comes from."""
        origin = self
        while before := next((each for each in origin.inputs if each.what == what), None):
            origin = before
        return origin


class Search:
    """What is known of a step's calls while inf and NaN are followed.

    Attributes:
        unrepaired: of the program's tensors, those that it would have otherwise.
        zeros: of the program's tensors in which values became zero, the rows that lost them.
        confirmed: the suspects that change the loss or a gradient.
        origin: of the loss, followed back to who first made what is not finite in it; None before.
        first: the call whose backward pass first makes a gradient that is not finite of finite ones, and
            what it makes; None before.
    """

    def __init__(self) -> None:
        self.unrepaired: Any = WeakTensorKeyDictionary()
        self.zeros: Any = WeakTensorKeyDictionary()
        self.confirmed: dict[Place, str] = {}
        self.origin: Origin | None = None
        self.first: tuple[Any, str] | None = None
        self._views: dict[int, Tensor] = {}
        self._origins: Any = WeakTensorKeyDictionary()
        self._nodes: dict[Any, Any] = {}

    def of(self, tensors: Sequence[Tensor]) -> tuple[dict[int, Unrepaired], dict[Place, str]]:
        """Return what is known of the inputs of a call: by place, and who lost values to zero."""
        unrepaired: dict[int, Unrepaired] = {}
        zeros: dict[Place, str] = {}
        for at, tensor in enumerate(tensors):
            view = self._views.get(tensor.untyped_storage().data_ptr())
            if tensor in self.unrepaired:
                unrepaired[at] = self.unrepaired[tensor]
            elif view is not None and view in self.unrepaired:
                memory, found = memory_of(tensor).clone(), self.unrepaired[view]
                memory.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(found.value)
                value = memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                unrepaired[at] = found._replace(value=value)
            zeros |= self.zeros.get(tensor, {})
        return unrepaired, zeros

    def follow(
        self,
        call: Any,
        own: Sequence[Tensor],
        results: Sequence[Tensor],
        otherwise: Sequence[Tensor],
        exact: Sequence[Tensor],
    ) -> None:
        """Note what a call's results have from its inputs and by itself.

        Args:
            call: the call.
            own: the tensors of the program.
            results: what they have now.
            otherwise: what they would have in the program.
            exact: what they have in float32.
        """
        suspects = dict(call.suspects)
        for each in call.unrepaired.values():
            suspects |= each.suspects
        for key, result, other, expected in zip(own, results, otherwise, exact, strict=True):
            self.unrepaired.pop(key, None)
            self.zeros.pop(key, None)
            if suspects and not torch.equal(raised(result), raised(other)):
                self.unrepaired[key] = Unrepaired(other, suspects)
                self._views[key.untyped_storage().data_ptr()] = key  # others may share its memory
            losers = call.losers or call.zeros
            if losers and ((result == 0) & (expected != 0)).any():
                self.zeros[key] = losers

    def note(
        self,
        maker: Place,
        inputs: Sequence[Tensor],
        copies: Sequence[Tensor],
        results: Sequence[Tensor],
        made: Sequence[Tensor],
        without_inf: Callable[[], Sequence[Tensor]],
    ) -> None:
        """Note who made which tensors of the program, of what, and what they are in float32.

        The last argument makes them of inputs without inf: then NaN is the call's own, and an inf that it was
        given is harmless, as that of a mask.
        """
        origins = [
            self._origins.get(tensor) or Origin(what_is_in(copy), maker, ())
            for tensor, copy in zip(inputs, copies, strict=True)
        ]
        given = {each.what for each in origins}
        for result, value in zip(results, made, strict=True):
            what = what_is_in(value)
            was_inf = what == "NaN" and "inf" in given and "NaN" not in given
            was_inf = was_inf and "NaN" not in map(what_is_in, without_inf())
            self._origins[result] = Origin(what, maker, origins, was_inf)

    def arrive(self, loss: Tensor) -> None:
        """Note who made what is not finite in the loss."""
        if loss in self.unrepaired:
            self.confirmed |= self.unrepaired[loss].suspects
        origin = self._origins.get(loss)
        if origin is None:
            return
        self.origin = origin = origin.first(origin.what)
        if origin.was_inf and (inf := origin.first("inf")).maker.operator.strip("_") not in WRITING:
            self.origin = inf

    def watch(self, results: Sequence[Tensor], call: object) -> None:
        """Look at the gradients that a call's part of autograd's graph makes."""
        waiting = [result.grad_fn for result in results]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in self._nodes:
                self._nodes[node] = node.register_hook(partial(self._look, call))
                waiting += [before for before, _ in node.next_functions]

    def _look(self, call: object, made: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        if self.first is None and not any(map(what_is_in, given)):
            what = max(map(what_is_in, made), default="")
            self.first = (call, what) if what else None

    def end(self) -> None:
        """Let go of autograd's graph."""
        for handle in self._nodes.values():
            handle.remove()
        self._nodes.clear()


def what_is_in(x: Tensor | None) -> str:
    """Return "NaN" or "inf" if a tensor has one, else ""."""
    if x is None:
        return ""
    amax = amax_of(x.to_dense() if x.is_sparse else x)
    return "NaN" if math.isnan(amax) else "inf" if math.isinf(amax) else ""
