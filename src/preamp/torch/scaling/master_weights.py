"""float32 copies of float16 and bfloat16 parameters, for an optimizer to work on.

An update that is small beside its weight is lost in float16; the copy keeps it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from preamp.arrays.torch import HALF_DTYPES
from preamp.torch.nested import check_shapes
from preamp.torch.scaling.optimizers import OptimizerLike


class MasterWeights:
    """The masters of one optimizer, put in the place of its half-precision parameters.

    Attributes:
        weights: pairs of a model's parameter and its float32 master.
    """

    def __init__(self) -> None:
        self.weights: list[tuple[Tensor, Tensor]] = []
        self._versions: list[int] = []

    def replace(self, optimizer: OptimizerLike, group: dict[str, Any]) -> None:
        """Replace the half-precision parameters of a group; state they have goes over to the masters."""
        for index, parameter in enumerate(group["params"]):
            if parameter.dtype in HALF_DTYPES:
                master = torch.nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
                group["params"][index] = master
                if parameter in optimizer.state:
                    optimizer.state[master] = _widened(optimizer.state.pop(parameter))
                self.weights.append((parameter, master))
                self._versions.append(parameter._version)

    def take_gradients(self) -> None:
        """Move each gradient from a parameter to its master, in float32, still scaled."""
        self.follow()
        for parameter, master in self.weights:
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters to the model."""
        for parameter, master in self.weights:
            parameter.copy_(master)
        self._versions = [parameter._version for parameter, _ in self.weights]

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear what backward wrote."""
        for parameter, _ in self.weights:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def saved(self) -> list[Tensor]:
        """Return the masters, to be put into a checkpoint."""
        return [master.detach().clone() for _, master in self.weights]

    def check(self, saved: list[Tensor]) -> None:
        """Refuse masters of another model.

        Raises:
            PolicyError: if their shapes are not the same.
        """
        check_shapes("master weights", saved, [master for _, master in self.weights], all_of_them=True)

    @torch.no_grad()
    def load(self, saved: list[Tensor]) -> None:
        """Load masters and round them to the model."""
        for (_, master), value in zip(self.weights, saved, strict=True):
            master.copy_(value)
        self.write_back()

    @torch.no_grad()
    def follow(self) -> None:
        """Take over weights that others wrote into the model, such as a checkpoint that was loaded."""
        for index, (parameter, master) in enumerate(self.weights):
            if parameter._version != self._versions[index]:
                self._versions[index] = parameter._version
                if not torch.equal(master.to(parameter.dtype), parameter):
                    master.copy_(parameter)


def _widened(state: dict[str, Any]) -> dict[str, Any]:
    half = {name for name, value in state.items() if isinstance(value, Tensor) and value.dtype in HALF_DTYPES}
    return {name: value.float() if name in half else value for name, value in state.items()}
