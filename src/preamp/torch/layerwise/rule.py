"""Compute target exponents for the layers: the rule of Zhao, Vogel and Ahmed, and its limits."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from statistics import NormalDist
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from preamp.checks import between, is_number
from preamp.errors import PolicyError
from preamp.torch.layerwise.graph import LEAF, Graph, Mark

Gradients: TypeAlias = tuple[Tensor | None, ...]

DTYPES = (torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)
HEADROOM = 16.0  # how much the largest entries may grow until the next statistics
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
    """Return whether the rule can predict how a module changes the size of gradients."""
    return isinstance(module, LAYERS)


class _Target(NamedTuple):
    """Potentials for the part below a layer, from statistics.

    Attributes:
        raised: the smallest at which few enough of the gradients that leave the layer are lost.
        limit: the largest at which nothing should overflow.
        finite: False if something has overflowed. The limit is then below the potential that was used.
    """

    raised: int
    limit: int
    finite: bool = True


class _Size(NamedTuple):
    """Root mean square and largest magnitude of a tensor, including its factor."""

    rms: float
    peak: float


class Statistics:
    """Statistics of one backward pass, which stay on the device until `read`."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._incoming: dict[Mark, Tensor] = {}
        self._leaving: dict[int, list[Tensor]] = defaultdict(list)

    def hooks(self) -> Iterator[RemovableHandle]:
        """Register the hooks that measure gradients before factors change them."""
        for mark in self.graph.marks:
            yield mark.node.register_prehook(partial(self._measure_incoming, mark))
        slots: dict[Node, list[tuple[int, int]]] = defaultdict(list)
        for edge in self.graph.edges:
            slots[edge.node].append((edge.slot, edge.above))
        for node, found in slots.items():
            yield node.register_hook(partial(self._measure_leaving, found))

    def read(
        self, weights: dict[str, Tensor]
    ) -> tuple[dict[Mark, _Size], dict[str, _Size], dict[int, float]]:
        """Return all sizes, with one read to the host.

        Returns:
            The size of the gradient at each mark that backward reached, above the mark; the sizes of the
            weights; and for each part the largest entry that left it for a leaf or for shared parameters.
        """
        peaks = {part: torch.stack(found).amax(0)[1:] for part, found in self._leaving.items()}
        tensors = [*self._incoming.values(), *map(_size, weights.values()), *peaks.values()]
        numbers = iter(torch.cat([tensor.to(tensors[0].device) for tensor in tensors]).tolist())
        incoming = {mark: _Size(next(numbers), next(numbers)) for mark in self._incoming}
        sizes = {name: _Size(next(numbers), next(numbers)) for name in weights}
        return incoming, sizes, dict(zip(peaks, numbers, strict=True))

    def _measure_incoming(self, mark: Mark, gradients: Gradients) -> None:
        found = [_size(gradient) for gradient in gradients if gradient is not None]
        if found:
            self._incoming[mark] = torch.stack(found).amax(0)

    def _measure_leaving(self, slots: list[tuple[int, int]], gradients: Gradients, _: Gradients) -> None:
        for slot, part in slots:
            gradient = gradients[slot]
            if gradient is not None:
                self._leaving[part].append(_size(gradient))


class LayerRule:
    """The target potential below each layer. The arguments are those of `LayerwiseScale`.

    Each entry of the gradient that leaves a layer is a sum of n products. If their factors are independent,
    its standard deviation is rms(gradient) rms(weight) sqrt(n / 2), where the paper's 2 is for an activation
    that passes half of it. It is large enough when a share `flushed` of a normal distribution of this width
    is below the low precision's smallest number.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        dtype: torch.dtype,
        flushed: float,
        layer_bound: float,
        bound: float,
    ) -> None:
        if dtype not in DTYPES:
            names = ", ".join(map(str, DTYPES))
            raise PolicyError(f"dtype={dtype!r} is not a low precision. Write one of {names}.")
        between("flushed", flushed, 0.0, 1.0, instead="flushed=1e-3")
        info = torch.finfo(dtype)
        self._layers = layers
        self._enough = info.smallest_normal * info.eps / NormalDist().inv_cdf((1.0 + flushed) / 2.0)
        self._largest = info.max
        self._layer_power = _power("layer_bound", layer_bound, "16.0")
        self._power = _power("bound", bound, "1024.0")
        self._targets: dict[tuple[str, int], _Target] = {}

    def potential_below(self, mark: Mark, above: int) -> int:
        """Return the target potential below a layer, given the potential above it."""
        target = self._targets.get((mark.name, mark.use))
        if target is None:
            return above
        raised = above + min(max(target.raised - above, 0), self._layer_power)
        return max(0, min(raised, target.limit, self._power))

    def learn(self, statistics: Statistics, potentials: dict[int, int]) -> bool:
        """Compute targets from the statistics of a backward pass.

        Returns:
            Whether everything was finite.
        """
        names = dict.fromkeys(mark.name for mark in statistics.graph.marks)
        weights = {name: _weight(self._layers[name]).detach() for name in names}
        incoming, sizes, leaving = statistics.read(weights)
        peaks = _with_tails(leaving, statistics.graph, potentials)
        learned = {
            (mark.name, mark.use): self._target(
                mark, size, sizes[mark.name], peaks.get(mark.below, 0.0), potentials
            )
            for mark, size in incoming.items()
        }
        self._targets |= learned
        return all(target.finite for target in learned.values())

    def _target(
        self, mark: Mark, incoming: _Size, weight: _Size, leaving: float, potentials: dict[int, int]
    ) -> _Target:
        """Compute a target."""
        above, below = potentials[mark.above], potentials[mark.below]
        terms = _terms(self._layers[mark.name])
        outgoing = incoming.rms * weight.rms * math.sqrt(terms / 2.0)
        computed = math.ldexp(incoming.peak, -above) * max(HEADROOM, weight.peak * terms)
        most = computed + math.ldexp(leaving, -below) * HEADROOM
        if not math.isfinite(outgoing + most):
            return _Target(below, max(below - 1, 0), finite=False)
        before = self._targets.get((mark.name, mark.use))
        unknown = before.raised if before else above  # if the whole gradient was flushed, keep the old target
        raised = _powers(self._enough, outgoing) + above if outgoing else unknown
        return _Target(raised, _powers(self._largest, most) if most else self._power)


def _with_tails(peaks: dict[int, float], graph: Graph, potentials: dict[int, int]) -> dict[int, float]:
    """Add the peaks of parts without layers to those of the parts above them with the same potential."""
    found = dict(peaks)
    for edge in graph.edges:
        if edge.below != LEAF and potentials[edge.above] == potentials[edge.below]:
            found[edge.above] = max(found.get(edge.above, 0.0), peaks.get(edge.below, 0.0))
    return found


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


def _terms(layer: nn.Module) -> int:
    """Return the number of products in each entry of the gradient of a layer's input."""
    inputs = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    assert isinstance(inputs, int)
    return _weight(layer).numel() // inputs


@torch.no_grad()
def _size(tensor: Tensor) -> Tensor:
    """Return root mean square and largest magnitude, of shape [2]; of a DTensor, those of this rank."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    dense = local.coalesce().values() if local.is_sparse else local
    narrow = dense.element_size() == 1  # float8, which PyTorch does not promote
    wide = dense.to(torch.float32 if narrow else torch.promote_types(dense.dtype, torch.float32))
    if not wide.numel():
        return torch.zeros(2, device=wide.device)
    norm, peak = torch.linalg.vector_norm(wide), torch.linalg.vector_norm(wide, math.inf)
    return torch.stack([norm / math.sqrt(wide.numel()), peak])


def _power(name: str, bound: float, instead: str) -> int:
    if not is_number(bound) or bound < 1.0:
        raise PolicyError(f"{name}={bound!r} is not a number of at least 1. Write {name}={instead}.")
    return _powers(float(bound), 1.0)


def _powers(number: float, unit: float) -> int:
    """Return the exponent of the largest power of two times a unit that does not exceed a number."""
    return math.floor(math.log2(number) - math.log2(unit))
