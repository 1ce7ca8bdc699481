"""By how much each layer's gradients are raised: Zhao, Vogel and Ahmed's rule, and its limits.

This room takes statistics of gradients and weights and makes wishes of them, the binary exponents of
factors. It refuses to know how factors get into backward, and where they have to agree.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from statistics import NormalDist
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from preamp.checks import between, is_number
from preamp.errors import PolicyError
from preamp.torch.layerwise.potentials import LEAF, Graph, Mark

Gradients: TypeAlias = tuple[Tensor | None, ...]

DTYPES = (torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)
HEADROOM = 16.0  # by how much the largest entries may grow until the next statistics
LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def is_layer(module: nn.Module) -> bool:
    """Return whether the rule knows what a module does to the size of gradients."""
    return isinstance(module, LAYERS)


class _Wish(NamedTuple):
    """What statistics say of the part below a layer, as potentials.

    Attributes:
        raised: here few enough of the gradients that leave the layer are lost.
        limit: above this something may overflow.
        finite: False if something has overflowed. The limit is then below what was in force.
    """

    raised: int
    limit: int
    finite: bool = True


class _Size(NamedTuple):
    """Root mean square and largest magnitude of a tensor, as it was seen."""

    rms: float
    peak: float


class Statistics:
    """What one backward pass shows, left on the device until `read`.

    Args:
        graph: the graph that is about to run.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._incoming: dict[Mark, Tensor] = {}
        self._leaving: dict[int, list[Tensor]] = defaultdict(list)

    def hooks(self) -> Iterator[RemovableHandle]:
        """Look at gradients before factors change them."""
        for mark in self.graph.marks:
            yield mark.node.register_prehook(partial(self._see_incoming, mark))
        slots: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        for edge in self.graph.edges:
            slots[edge.node].append((edge.slot, edge.above))
        for node, found in slots.items():
            yield node.register_hook(partial(self._see_leaving, found))

    def read(
        self, weights: dict[str, Tensor]
    ) -> tuple[dict[Mark, _Size], dict[str, _Size], dict[int, float]]:
        """Return all sizes, with one read to the host.

        Args:
            weights: the weights whose sizes are wanted as well.

        Returns:
            The size of the gradient that came to each mark that backward reached, as it was above the mark;
            the sizes of the weights; and by part the largest entry that left it for a leaf or for shared
            parameters.
        """
        peaks = {part: torch.stack(found).amax(0)[1:] for part, found in self._leaving.items()}
        tensors = [*self._incoming.values(), *map(_size, weights.values()), *peaks.values()]
        numbers = iter(torch.cat([tensor.to(tensors[0].device) for tensor in tensors]).tolist())
        incoming = {mark: _Size(next(numbers), next(numbers)) for mark in self._incoming}
        sizes = {name: _Size(next(numbers), next(numbers)) for name in weights}
        return incoming, sizes, dict(zip(peaks, numbers, strict=True))

    def _see_incoming(self, mark: Mark, gradients: Gradients) -> None:
        found = [_size(gradient) for gradient in gradients if gradient is not None]
        if found:
            self._incoming[mark] = torch.stack(found).amax(0)

    def _see_leaving(self, slots: list[tuple[int, int]], gradients: Gradients, _: Gradients) -> None:
        for slot, part in slots:
            gradient = gradients[slot]
            if gradient is not None:
                self._leaving[part].append(_size(gradient))


class LayerRule:
    """Wishes for the potential below each layer. The arguments are those of `LayerwiseScale`.

    Each entry of the gradient that leaves a layer is a sum of n products. If their factors are independent,
    its standard deviation is rms(gradient) rms(weight) sqrt(n / 2), where the paper's 2 stands for an
    activation that lets half of it pass. It is enough when a share `flushed` of a normal distribution of this
    width lies below the low precision's smallest number.

    Raises:
        PolicyError: for a setting that cannot work.
    """

    def __init__(
        self, layers: dict[str, Any], dtype: torch.dtype, flushed: float, layer_bound: float, bound: float
    ) -> None:
        if dtype not in DTYPES:
            names = ", ".join(map(str, DTYPES))
            raise PolicyError(f"dtype={dtype!r} is no low precision. Write one of {names}.")
        between("flushed", flushed, 0.0, 1.0, instead="flushed=1e-3")
        info = torch.finfo(dtype)
        self._layers = layers
        self._enough = info.smallest_normal * info.eps / NormalDist().inv_cdf((1.0 + flushed) / 2.0)
        self._largest = info.max
        self._layer_power = _power("layer_bound", layer_bound, "16.0")
        self._power = _power("bound", bound, "1024.0")
        self._wishes: dict[tuple[str, int], _Wish] = {}

    def potential_below(self, mark: Mark, above: int) -> int:
        """Return the potential wanted below a layer that has the potential `above` above it."""
        wish = self._wishes.get((mark.name, mark.use))
        if wish is None:
            return above
        raised = above + min(max(wish.raised - above, 0), self._layer_power)
        return max(0, min(raised, wish.limit, self._power))

    def learn(self, statistics: Statistics, potentials: dict[int, int]) -> bool:
        """Make wishes of what a backward pass has shown.

        Args:
            statistics: those of the pass.
            potentials: those in force in it.

        Returns:
            Whether all was finite.
        """
        names = dict.fromkeys(mark.name for mark in statistics.graph.marks)
        weights = {name: self._layers[name].weight.detach() for name in names}
        incoming, sizes, leaving = statistics.read(weights)
        peaks = _with_tails(leaving, statistics.graph, potentials)
        learned = {
            (mark.name, mark.use): self._wish(
                mark, seen, sizes[mark.name], peaks.get(mark.below, 0.0), potentials
            )
            for mark, seen in incoming.items()
        }
        self._wishes |= learned
        return all(wish.finite for wish in learned.values())

    def _wish(
        self, mark: Mark, seen: _Size, weight: _Size, leaving: float, potentials: dict[int, int]
    ) -> _Wish:
        """Make a wish of what came to a layer, its weight, and the largest entry that left the part below."""
        above, below = potentials[mark.above], potentials[mark.below]
        terms = _terms(self._layers[mark.name])
        outgoing = seen.rms * weight.rms * math.sqrt(terms / 2.0)
        computed = math.ldexp(seen.peak, -above) * max(HEADROOM, weight.peak * terms)
        most = computed + math.ldexp(leaving, -below) * HEADROOM
        if not math.isfinite(outgoing + most):
            return _Wish(below, max(below - 1, 0), finite=False)
        before = self._wishes.get((mark.name, mark.use))
        unknown = before.raised if before else above  # of what was flushed whole
        raised = _powers(self._enough, outgoing) + above if outgoing else unknown
        return _Wish(raised, _powers(self._largest, most) if most else self._power)


def _with_tails(peaks: dict[int, float], graph: Graph, potentials: dict[int, int]) -> dict[int, float]:
    """Count what a part without layers shows for the parts above it, where the potential is the same."""
    found = dict(peaks)
    for edge in graph.edges:
        if edge.below != LEAF and potentials[edge.above] == potentials[edge.below]:
            found[edge.above] = max(found.get(edge.above, 0.0), peaks.get(edge.below, 0.0))
    return found


def _terms(layer: Any) -> int:
    """Return of how many products each entry of a layer's outgoing gradient is the sum."""
    inputs = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    return int(layer.weight.numel() // inputs)


@torch.no_grad()
def _size(tensor: Any) -> Tensor:
    """Return root mean square and largest magnitude, unread, of shape [2]; of a DTensor, this rank's."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    dense = local.coalesce().values() if local.is_sparse else local
    narrow = dense.element_size() == 1  # float8, which PyTorch does not promote
    wide = dense.to(torch.float32 if narrow else torch.promote_types(dense.dtype, torch.float32))
    if not wide.numel():
        return torch.zeros(2, device=wide.device)
    norm, peak = torch.linalg.vector_norm(wide), torch.linalg.vector_norm(wide, math.inf)
    return torch.stack([norm / math.sqrt(wide.numel()), peak])


def _power(name: str, bound: Any, instead: str) -> int:
    if not is_number(bound) or bound < 1.0:
        raise PolicyError(f"{name}={bound!r} is not a number of at least 1. Write {name}={instead}.")
    return _powers(float(bound), 1.0)


def _powers(number: float, unit: float) -> int:
    """Return the exponent of the largest power of two that does not take a unit beyond a number."""
    return math.floor(math.log2(number) - math.log2(unit))
