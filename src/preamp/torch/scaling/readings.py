"""What is seen in one optimizer's gradients on all ranks: are they finite, what is their norm, their sight?

Once as Python numbers and once as tensors that nobody reads. This room refuses to know what follows from it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from preamp.arrays.torch import Gradients
from preamp.arrays.torch_devices import widest
from preamp.checks import FLOAT32_MAX
from preamp.torch.scaling.ranks import Agreement
from preamp.torch.scaling.sight import Sight, look, packed, unpacked
from preamp.torch.scaling.watch import Watch


class Seen(NamedTuple):
    """What was seen in one optimizer's gradients, on the host or as tensors that nobody reads.

    Attributes:
        finite: whether all are finite, and stay so when divided.
        norm: their global L2 norm; None if it was not taken.
        sight: what a policy that uses gradient statistics is shown.
        sizes: the norm or the peak of each gradient on this rank; of what is not read.
    """

    finite: Any
    norm: Any
    sight: Sight | None
    sizes: Any = None


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

    def watch(self, optimizer: Any, *, peaks: bool) -> Watch:
        """Watch an optimizer's gradients from now on, for their peaks too if the policy uses them."""
        watch = Watch(optimizer, peaks=peaks)
        if id(optimizer) in self._watches:
            self._watches[id(optimizer)].remove()
        self._watches[id(optimizer)] = watch
        return watch

    def watches(self, optimizer: Any) -> bool:
        """Return whether an optimizer is watched."""
        if optimizer is None:  # of which the compiler of 2.6 cannot trace the id
            return False
        return id(optimizer) in self._watches and self._watches[id(optimizer)].covers(optimizer)

    def look(
        self, optimizer: Any, gradients: Gradients, edge: float | None, device: torch.device, *, read: bool
    ) -> Sight:
        """Look at gradients on this rank that are still scaled: `sight.look`, or what a watch has seen."""
        watched = gradients.tensors and self.watches(optimizer)
        each = self._watches[id(optimizer)].peaks(gradients) if watched else None
        return look(gradients, edge, device, read=read, each=each)

    def on_host(
        self,
        optimizer: Any,
        gradients: Gradients,
        divisor: float,
        device: torch.device,
        *,
        finite: bool = True,
        norm: bool,
        sight: Sight | None = None,
    ) -> Seen:
        """Read whether all gradients are finite, and stay so when divided, and their global L2 norm.

        Args:
            optimizer: the owner of the gradients.
            gradients: as they are, scaled or not.
            divisor: what they will be divided by.
            device: where other ranks expect what this one has seen, wherever its gradients are.
            finite: what is known of this rank before.
            norm: whether the norm is wanted.
            sight: what this rank has seen in them while they were scaled, if the policy uses them.

        Raises:
            PolicyError: for a norm or a share over ranks that cannot be told.
        """
        squared = 0.0
        if norm:
            squared = self._squared_norm(optimizer, gradients)
            if not math.isfinite(squared):
                squared = gradients.exact_squared_norm()
            finite = finite and math.isfinite(squared)
        elif finite:
            finite = gradients.are_finite() if sight is None else math.isfinite(sight.peak)
        finite = finite and (divisor >= 1.0 or gradients.fits(divisor))
        if self.agreement.needed(gradients.meshes):
            unit = divisor * divisor  # other ranks' gradients may be unscaled already
            seen = [not finite, squared / unit if finite else 0.0]
            mine = torch.tensor(seen, dtype=widest(device), device=device)
            total, sight = self._agreed(mine, gradients.meshes, norm, sight)
            overflows, squared = total.tolist()
            finite, squared = overflows == 0.0 and math.isfinite(squared), squared * unit
        return Seen(finite, math.sqrt(squared) if finite and norm else None, sight and sight.read())

    def on_device(
        self,
        optimizer: Any,
        gradients: Gradients,
        divisor: Tensor,
        *,
        norm: bool,
        agree: bool = True,
        sight: Sight | None = None,
    ) -> Seen:
        """Return the same as 0-dim tensors, unread.

        Without `agree` all of this is of this rank alone. Here a float32 norm that overflows counts as
        gradients that are not finite. A norm that is not wanted comes for free, unless peaks tell enough.
        """
        if sight is not None and sight.each is not None and not norm:
            sizes = sight.each
            total = sizes.amax().to(divisor.device)
        else:
            total, sizes = self.norm_on_device(optimizer, gradients, divisor.device)
        finite = total / divisor <= FLOAT32_MAX
        if agree and self.agreement.needed(gradients.meshes):
            wide = widest(total.device)
            squared = torch.where(finite, (total.to(wide) / divisor).square(), 0.0)
            mine = torch.stack([finite.logical_not().to(wide), squared])
            (overflows, squared), sight = self._agreed(mine, gradients.meshes, norm, sight)
            finite = (overflows == 0.0) & squared.isfinite()
            total = (squared.sqrt() * divisor).to(divisor.dtype)
        return Seen(finite, None if sight is not None and sizes is sight.each else total, sight, sizes)

    def norm_on_device(
        self, optimizer: Any, gradients: Gradients, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's L2 norm of all gradients on a device, and that of each, unread."""
        sizes = self._sizes(optimizer, gradients, device)
        return torch.linalg.vector_norm(_shared(sizes, gradients.shares)).to(device), sizes

    def flags(
        self,
        found: dict[torch.device, Tensor],
        meshes: list[Any],
        device: torch.device,
        sight: Sight | None = None,
    ) -> tuple[dict[torch.device, Tensor], Sight | None]:
        """Return found_inf flags, and a sight, that all ranks agree on, unread; they meet on a device."""
        if not self.agreement.needed(meshes):
            return found, sight
        flag = torch.stack([one.to(device, widest(device)) for one in found.values()]).sum()
        mine = torch.stack([flag, torch.zeros_like(flag)])
        (overflows, _), sight = self._agreed(mine, meshes, False, sight)
        return {place: (overflows > 0.0).to(place, torch.float32) for place in found}, sight

    def of_each(self, gradients: Gradients) -> Tensor:
        """Return the L2 norm of each gradient, unread; of a DTensor that of the whole."""
        norms = gradients.norms()
        if gradients.shares is None:
            return norms
        self.agreement.refuse_norm(gradients.meshes)
        shares = torch.tensor(gradients.shares, device=norms.device)
        squares = norms.to(widest(norms.device)).square() * shares
        return self.agreement.over_meshes(squares, gradients.meshes).sqrt().to(norms)

    def _squared_norm(self, optimizer: Any, gradients: Gradients) -> float:
        if not self.watches(optimizer) or not gradients.tensors:
            return gradients.squared_norm()
        squares = self._watches[id(optimizer)].squares(gradients)
        return float(squares.sum(dtype=widest(squares.device)).item())

    def _sizes(self, optimizer: Any, gradients: Gradients, device: torch.device) -> Tensor:
        """Return the norm of each gradient, unread."""
        if self.watches(optimizer):
            return self._watches[id(optimizer)].squares(gradients).sqrt()
        return gradients.norms() if gradients.tensors else torch.zeros(1, device=device)

    def _agreed(
        self, mine: Tensor, meshes: list[Any], norm: bool, sight: Sight | None
    ) -> tuple[Tensor, Sight | None]:
        """Return the sum of two numbers over ranks, and what all have seen."""
        if norm:
            self.agreement.refuse_norm(meshes)
        if sight is None:
            return self.agreement(mine, meshes), None
        if sight.above is not None:
            self.agreement.refuse_share(meshes)
        total = self.agreement(torch.cat([mine, packed(sight, mine.device)]), meshes)
        return total[: len(mine)], unpacked(total[len(mine) :], sight)


def _shared(sizes: Tensor, shares: list[float] | None) -> Tensor:
    """Return this rank's share of each norm."""
    return sizes if shares is None else sizes * torch.tensor(shares, device=sizes.device).sqrt()
