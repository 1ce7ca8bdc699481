"""float32 copies of an optimizer's float16 and bfloat16 parameters.

An update that is small beside its weight is lost in half precision; the copy keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from preamp.arrays.torch import HALF_DTYPES
from preamp.checks import shown
from preamp.errors import PolicyError, UsageError


class MasterWeights:
    """Have an optimizer update float32 copies of its float16 and bfloat16 parameters.

    The optimizer's groups then hold the copies in place of those parameters, and its state is float32. Two
    calls are added to the training step, with a scaler or without:

    - `take_gradients()` after `backward()`, before `scaler.unscale_` and `scaler.step`;
    - `write_back()` after the optimizer's step, taken or skipped. It also drops the gradients: without it,
      those of a skipped step are added to the next ones.

    In between, the model's parameters have no gradients. Clip with `scaler.step(optimizer, max_norm=1.0)`, or
    clip the parameters in `optimizer.param_groups`. To discard a backward pass, call `model.zero_grad()`.

    If weights are loaded into the model, the copies follow. Other parameters stay as they are, and parameters
    that `add_param_group` adds later get copies too.

    Args:
        optimizer: any optimizer of PyTorch that reads its parameters from its groups, which LBFGS does not.
            The model is in half precision already.

    Attributes:
        weights: pairs of a model's parameter and its float32 copy, which has the same shape and device.

    Raises:
        UsageError: for what is not such an optimizer. `optimizer.step` raises it if gradients were not taken,
            and `take_gradients` if the optimizer has stepped since the last `write_back`.

    >>> import torch
    >>> from preamp.torch import GradScaler, MasterWeights
    >>> model = torch.nn.Linear(1, 1, bias=False).half()
    >>> _ = torch.nn.init.ones_(model.weight)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    >>> masters, scaler = MasterWeights(optimizer), GradScaler("cpu")
    >>> for _ in range(100):
    ...     scaler.scale(model(torch.ones(1, 1).half()).float().sum()).backward()
    ...     masters.take_gradients()
    ...     scaler.step(optimizer, max_norm=1.0)
    ...     masters.write_back()
    ...     scaler.update()
    >>> round(model.weight.item(), 3)  # without the copy it is 1.0: float16 has no 0.9999
    0.99
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                f"optimizer={shown(optimizer)} is not an optimizer whose parameters can be replaced. "
                "Write MasterWeights(torch.optim.AdamW(model.parameters()))."
            )
        self.weights: list[tuple[Tensor, Tensor]] = []
        self._optimizer = optimizer
        self._has_stepped = False  # and was not written back
        self._replace()
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def take_gradients(self) -> None:
        """Move the gradients, still scaled, from the model's parameters to the copies, in float32.

        They are added to what is there, so several micro-steps add up in float32, each with a call of its
        own.
        """
        if self._has_stepped:
            raise UsageError(
                "the optimizer's last step has not reached the model. Write masters.write_back() after it."
            )
        self._follow()
        for parameter, master in self.weights:
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the copies to the model's parameters, and drop their gradients."""
        for parameter, master in self.weights:
            parameter.copy_(master)
            master.grad = None
        self._has_stepped = False

    def state_dict(self) -> dict[str, Any]:
        """Return the copies, for a checkpoint beside the optimizer's own state."""
        self._follow()
        return {"weights": [master.detach().clone() for _, master in self.weights]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the copies and round them to the model.

        Raises:
            PolicyError: for a checkpoint of other parameters. Nothing was changed.
        """
        if not isinstance(state_dict, Mapping) or "weights" not in state_dict:
            raise PolicyError(f"{shown(state_dict)} has no weights. Load what masters.state_dict() returned.")
        saved, masters = state_dict["weights"], [master for _, master in self.weights]
        theirs, ours = ([tuple(weight.shape) for weight in weights] for weights in (saved, masters))
        if theirs != ours:
            raise PolicyError(
                f"the checkpoint has master weights of shapes {shown(theirs)}, the optimizer of "
                f"{shown(ours)}. Make the same optimizer as when the checkpoint was written."
            )
        with torch.no_grad():
            for master, value in zip(masters, saved, strict=True):
                master.copy_(value)
        self.write_back()

    @torch.no_grad()
    def _follow(self) -> None:
        """Copy parameters that were added to the groups, and entries that were written into the model."""
        self._replace()
        if self._has_stepped:  # the copies are newer
            return
        for parameter, master in self.weights:
            is_same = master.to(parameter.dtype) == parameter
            master.copy_(torch.where(is_same, master, parameter.float()))

    def _replace(self) -> None:
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.dtype in HALF_DTYPES:
                    master = torch.nn.Parameter(parameter.detach().float(), parameter.requires_grad)
                    master.master_of = parameter  # type: ignore[attr-defined]  # for its name
                    group["params"][index] = master
                    if parameter in state:
                        state[master] = {
                            name: value.float() if getattr(value, "dtype", None) in HALF_DTYPES else value
                            for name, value in state.pop(parameter).items()
                        }
                    self.weights.append((parameter, master))

    def _before_step(self, *_: object) -> None:
        if any(parameter.grad is not None for parameter, _ in self.weights):
            raise UsageError(
                "the optimizer updates float32 copies, and the model's parameters still have the gradients. "
                "Write masters.take_gradients() between backward() and the step."
            )

    def _after_step(self, *_: object) -> None:
        self._has_stepped = True
