"""What is seen in one optimizer's gradients on all ranks: are they finite, and what is their norm?

Once as Python numbers and once as tensors that nobody reads. This room refuses to know what follows from it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from preamp.checks import FLOAT32_MAX
from preamp.torch.agreement import Agreement
from preamp.torch.gradients import Gradients
from preamp.torch.watch import Watch

__all__ = ["Readings"]


class Readings:
    """Reads gradients, with the help of watches and of other ranks.

    Args:
        agreement: how ranks agree.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self._watches: dict[int, Watch] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"agreement": self.agreement, "_watches": {}}  # hooks stay with their parameters

    def watch(self, optimizer: Any) -> Watch:
        """Watch an optimizer's gradients from now on."""
        watch = Watch(optimizer)
        if id(optimizer) in self._watches:
            self._watches[id(optimizer)].remove()
        self._watches[id(optimizer)] = watch
        return watch

    def watches(self, optimizer: Any) -> bool:
        """Return whether an optimizer is watched."""
        return id(optimizer) in self._watches and self._watches[id(optimizer)].sees(optimizer)

    def on_host(
        self,
        optimizer: Any,
        gradients: Gradients,
        divisor: float,
        device: torch.device,
        *,
        finite: bool = True,
        norm: bool,
    ) -> tuple[bool, float | None]:
        """Read whether all gradients are finite, and stay so when divided, and their global L2 norm.

        Args:
            optimizer: the owner of the gradients.
            gradients: as they are, scaled or not.
            divisor: what they will be divided by.
            device: where other ranks expect what this one has seen, wherever its gradients are.
            finite: what is known of this rank before.
            norm: whether the norm is wanted.

        Raises:
            PolicyError: for a norm over ranks that cannot be told.
        """
        squared = 0.0
        if norm:
            squared = self._squared_norm(optimizer, gradients)
            if not math.isfinite(squared):
                squared = gradients.exact_squared_norm()
            finite = finite and math.isfinite(squared)
        elif finite:
            finite = gradients.are_finite()
        finite = finite and (divisor >= 1.0 or gradients.fits(divisor))
        if self.agreement.needed(gradients.meshes):
            unit = divisor * divisor  # other ranks' gradients may be unscaled already
            seen = [not finite, squared / unit if finite else 0.0]
            mine = torch.tensor(seen, dtype=torch.float64, device=device)
            overflows, squared = self._agreed(mine, gradients, norm).tolist()
            finite, squared = overflows == 0.0, squared * unit
        return finite, math.sqrt(squared) if finite and norm else None

    def on_device(
        self, optimizer: Any, gradients: Gradients, divisor: Tensor, *, norm: bool, agree: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same as 0-dim tensors, unread, and the norm of each gradient on this rank.

        Without `agree` all of this is of this rank alone. Here a float32 norm that overflows counts as
        gradients that are not finite.
        """
        if self.watches(optimizer):
            sizes = self._watches[id(optimizer)].squares(gradients).sqrt()
        else:
            sizes = gradients.norms() if gradients.tensors else torch.zeros(1, device=divisor.device)
        shared = sizes
        if gradients.shares is not None:
            shared = sizes * torch.tensor(gradients.shares, device=sizes.device).sqrt()
        total = torch.linalg.vector_norm(shared).to(divisor.device)
        finite = total / divisor <= FLOAT32_MAX
        if agree and self.agreement.needed(gradients.meshes):
            squared = torch.where(finite, (total.double() / divisor).square(), 0.0)
            mine = torch.stack([finite.logical_not().double(), squared])
            overflows, squared = self._agreed(mine, gradients, norm)
            finite, total = overflows == 0.0, (squared.sqrt() * divisor).to(divisor.dtype)
        return finite, total, sizes

    def flags(
        self, found: dict[torch.device, Tensor], meshes: list[Any], device: torch.device
    ) -> dict[torch.device, Tensor]:
        """Return found_inf flags that all ranks agree on, unread; they meet on a device."""
        if not self.agreement.needed(meshes):
            return found
        flag = torch.stack([one.double().to(device) for one in found.values()]).sum()
        overflows = self.agreement(torch.stack([flag, torch.zeros_like(flag)]), meshes)[0]
        return {place: (overflows > 0.0).to(place, torch.float32) for place in found}

    def of_each(self, gradients: Gradients) -> Tensor:
        """Return the L2 norm of each gradient, unread; of a DTensor that of the whole."""
        norms = gradients.norms()
        if gradients.shares is None:
            return norms
        self.agreement.refuse_norm(gradients.meshes)
        squares = norms.double().square() * torch.tensor(gradients.shares, device=norms.device)
        return self.agreement.over_meshes(squares, gradients.meshes).sqrt().to(norms)

    def _squared_norm(self, optimizer: Any, gradients: Gradients) -> float:
        if not self.watches(optimizer) or not gradients.tensors:
            return gradients.squared_norm()
        return float(self._watches[id(optimizer)].squares(gradients).sum(dtype=torch.float64).item())

    def _agreed(self, mine: Tensor, gradients: Gradients, norm: bool) -> Tensor:
        if norm:
            self.agreement.refuse_norm(gradients.meshes)
        return self.agreement(mine, gradients.meshes)
