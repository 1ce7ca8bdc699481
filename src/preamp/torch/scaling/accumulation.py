"""The sum of several micro-steps' gradients, of which some may have been dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from preamp.arrays.torch import HALF_DTYPES
from preamp.checks import shown, whole
from preamp.errors import PolicyError
from preamp.torch.nested import check_shapes


class Accumulation:
    """Sums of unscaled gradients.

    Attributes:
        sums: for each parameter a sum, float32 for half-precision gradients, or None.
        calls: micro-steps since the last update, dropped ones included.
        summed: micro-steps in the sums.
        losses: of those micro-steps, for a guard.
    """

    def __init__(self) -> None:
        self.sums: list[Tensor | None] = []
        self.calls, self.summed = 0, 0
        self.losses: list[float] = []

    def add_loss(self, loss: float | None) -> None:
        """Note the loss of a micro-step, unless there is no guard that uses it."""
        if loss is not None:
            self.losses.append(loss)

    def take_loss(self) -> float | None:
        """Return the mean of the losses since the last update; None without any."""
        losses, self.losses = self.losses, []
        return sum(losses) / len(losses) if losses else None

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Add the parameters' gradients and take them away."""
        self.sums += [None] * (len(parameters) - len(self.sums))
        taken: set[int] = set()
        for index, parameter in enumerate(parameters):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if id(gradient) in taken:  # two parameters have one gradient; each needs a sum
                gradient = gradient.clone()
            taken.add(id(gradient))
            total = self.sums[index]
            if total is None:
                self.sums[index] = gradient.float() if gradient.dtype in HALF_DTYPES else gradient
            else:
                total.add_(gradient)
        self.summed += 1

    def mean_to(self, parameters: Sequence[Tensor]) -> None:
        """Make the mean of what was summed the parameters' gradients, and start again from nothing."""
        for parameter, total in zip(parameters, self.sums, strict=False):
            parameter.grad = None if total is None else total.div_(self.summed).to(parameter.dtype)
        self.sums, self.calls, self.summed = [], 0, 0

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold."""
        sums = [None if total is None else total.clone() for total in self.sums]
        return {"sums": sums, "calls": self.calls, "summed": self.summed, "losses": list(self.losses)}

    def check(self, saved: Any, parameters: Sequence[Tensor]) -> None:
        """Refuse what `saved` has not returned for such parameters.

        Raises:
            PolicyError: saying what is wrong.
        """
        if saved is None:
            return
        if not isinstance(saved, Mapping) or {"sums", "calls", "summed"} - set(saved):
            raise PolicyError(
                f"accumulation={shown(saved)} is not a saved sum. Write None to start from nothing."
            )
        check_shapes("sums of gradients", saved["sums"], parameters, may_lack=True)
        whole("calls", saved["calls"], least=0, instead="accumulation=None to start from nothing")
        whole("summed", saved["summed"], least=0, instead="accumulation=None to start from nothing")

    def load(self, saved: dict[str, Any] | None, parameters: Sequence[Tensor]) -> None:
        """Resume from a checkpoint, on the parameters' devices; from nothing if it has no sums."""
        saved = saved or {"sums": [], "calls": 0, "summed": 0}
        pairs = zip(saved["sums"], parameters, strict=False)
        self.sums = [None if total is None else total.to(p.device, copy=True) for total, p in pairs]
        self.calls, self.summed = saved["calls"], saved["summed"]
        self.losses = [float(loss) for loss in saved.get("losses", [])]
