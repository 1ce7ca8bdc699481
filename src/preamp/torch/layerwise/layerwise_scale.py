"""`LayerwiseScale`: a loss scale for every layer, divided out of every `.grad`.

Forward hooks mark the layers, and hooks on autograd's nodes apply the factors. `rule` decides how much to
raise each layer, and `graph` where factors must agree. Neither parameters nor their `.grad` are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from preamp.checks import shown, whole
from preamp.errors import PolicyError, UsageError
from preamp.torch.layerwise.graph import Graph
from preamp.torch.layerwise.rule import Gradients, LayerRule, Statistics, is_layer
from preamp.torch.nested import require_tensor
from preamp.torch.scaling.unscaled import watch


class LayerwiseScale:
    """Raises the gradients of each linear or convolution layer by its own power of two.

    In front of a layer's backward, the gradient of its output is multiplied by a factor, so that the
    gradients computed from it, of the input and the weights, are not lost in the low precision. The product
    of the factors is divided out where a gradient reaches a leaf, so `.grad` is the gradient of the given
    loss, bit for bit, except for values that would have been flushed or have overflowed. This holds on any
    graph: residual sums, branches, modules called several times, shared and frozen weights, other autograd
    functions, `checkpoint(..., use_reentrant=False)`. It works together with a `GradScaler`, which scales the
    loss and skips steps that overflow.

    Factors are chosen by the rule of Zhao, Vogel and Ahmed (Adaptive Loss Scaling for Mixed Precision
    Training, arXiv 1910.12385). The mean squares of gradient and weight give the standard deviation of the
    gradient of the layer's input, which is taken to be normally distributed; the factor is the power of two
    at which a share `flushed` of it is below the smallest number of `dtype`. Limits are measured as well,
    among them the largest entry of every parameter's gradient. Where branches meet, or a limit requires it, a
    factor is below 1.

    Statistics are collected in backward passes 1, 2, 4, 8, ... and then in every `every`-th, with one read to
    the host in each of these and none in the others. They are of this rank's gradients; ranks may differ.

    Gradients of activations (`retain_grad`, hooks, `torch.autograd.grad` inside) include their factors. A
    backward function that is not linear, such as one that clips, receives raised gradients. Layers inside
    compiled code are not scaled.

    Args:
        model: its `Linear` and `Conv` layers, also transposed ones, are scaled from now on.
        dtype: the low precision of gradients.
        every: backward passes between statistics, after the first ones.
        flushed: the share of the gradient of a layer's input that may be lost.
        layer_bound: the largest factor of one layer.
        bound: the largest product of factors.

    Raises:
        PolicyError: for an invalid setting, or a model without such layers.

    >>> import torch
    >>> from torch import nn
    >>> from preamp.torch import LayerwiseScale
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> layerwise = LayerwiseScale(model)
    >>> layerwise.backward(model(torch.ones(2, 4)).square().mean() * 2.0**-20)
    >>> layerwise.backward(model(torch.ones(2, 4)).square().mean() * 2.0**-20)
    >>> layerwise.factors
    {'2': 16.0, '0': 256.0}
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype = torch.float16,
        every: int = 100,
        flushed: float = 1e-3,
        layer_bound: float = 16.0,
        bound: float = 1024.0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise PolicyError(
                f"model={shown(model)} is not a torch.nn.Module. "
                "Write LayerwiseScale(model) with the model itself."
            )
        whole("every", every, least=1, instead="every=100")
        layers = {name: module for name, module in model.named_modules() if is_layer(module)}
        if not layers:
            raise PolicyError(f"{type(model).__name__} has no Linear or Conv layer to scale. Leave it out.")
        self._rule = LayerRule(layers, dtype, flushed, layer_bound, bound)
        self._parameters = dict(model.named_parameters())
        self._every = every
        self._factors: dict[str, float] = {}
        self._passes, self._due = 0, False
        self._key = object()
        marking = [(module, _Marking(self._key, name)) for name, module in layers.items()]
        self._handles = [module.register_forward_hook(hook) for module, hook in marking]

    @property
    def factors(self) -> dict[str, float]:
        """The factor by which each layer's gradients were raised in the latest backward pass.

        Layers are in the order of backward. A layer that ran several times has the factor of its last run in
        this order.
        """
        return dict(self._factors)

    def backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensor | Iterable[Tensor] | None = None,
    ) -> None:
        """Do what `loss.backward` does, with factors.

        Args:
            loss: the loss, scaled by a `GradScaler` or not. Sum losses that are differentiated together.
            gradient: as for `Tensor.backward`.
            retain_graph: as for `Tensor.backward`.
            create_graph: as for `Tensor.backward`.
            inputs: as for `Tensor.backward`, leaves only.

        Raises:
            UsageError: before backward, for a loss that is not a tensor or does not depend on a layer of the
                model, for a reentrant checkpoint, and for `inputs` that are not leaves. During backward, if a
                hidden graph computes the gradient of a parameter.
        """
        require_tensor(loss, "layerwise.backward({})")
        watch.is_on = False  # gradients are scaled here, from the second step on
        leaves = None if inputs is None else [inputs] if isinstance(inputs, Tensor) else list(inputs)
        run = partial(loss.backward, gradient, retain_graph, create_graph, leaves)
        if not self._handles or loss.grad_fn is None:
            run()
            return
        _refuse_activations(leaves or [])
        graph = Graph(loss.grad_fn, self._key)
        if not graph.marks:
            raise UsageError(
                "This loss depends on no layer of the model, or they ran in compiled code. Call the model "
                "after making LayerwiseScale(model), do not compile it, or write loss.backward()."
            )
        self._run(graph, run)

    def measure(self) -> None:
        """Collect statistics in the next backward pass, such as after a skipped step."""
        self._due = True

    def close(self) -> None:
        """Remove all hooks from the model. Afterwards `backward` is the loss's own."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _run(self, graph: Graph, run: Callable[[], None]) -> None:
        potentials = graph.potentials(self._rule.potential_below)
        statistics = Statistics(graph) if self._takes_statistics() else None
        handles = [*(statistics.hooks() if statistics else ()), *_factors(graph, potentials)]
        handles += _guards(self._parameters, graph.leaves)
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
        self._passes += 1
        self._factors = {mark.name: 2.0 ** potentials[mark.below] for mark in graph.marks}
        if statistics:
            self._due = not self._rule.learn(statistics, potentials)

    def _takes_statistics(self) -> bool:
        number = self._passes + 1
        early = number < self._every and number & (number - 1) == 0
        return self._due or early or number % self._every == 0


class _Marking:
    """A forward hook that marks the node in front of which a layer's factor is applied."""

    def __init__(self, key: object, name: str) -> None:
        self._key, self._name = key, name

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        node: Any = None if torch.compiler.is_compiling() else getattr(output, "grad_fn", None)
        if node is not None:
            node.metadata[self._key] = self._name


def _factors(graph: Graph, potentials: dict[int, int]) -> Iterator[RemovableHandle]:
    """Register the hooks that give every part's gradients their factor."""
    for mark in graph.marks:
        power = potentials[mark.below] - potentials[mark.above]
        if power:
            yield mark.node.register_prehook(partial(_multiplied, 2.0**power))
    leaving: dict[Any, dict[int, float]] = {}
    for edge in graph.edges:
        power = potentials[edge.below] - potentials[edge.above]
        if power:
            leaving.setdefault(edge.node, {})[edge.slot] = 2.0**power
    for node, factors in leaving.items():
        yield node.register_hook(partial(_multiplied_in, factors))


def _multiplied(factor: float, gradients: Gradients) -> Gradients:
    return tuple(_times(gradient, factor) for gradient in gradients)


def _multiplied_in(factors: dict[int, float], gradients: Gradients, _: Gradients) -> Gradients:
    """Multiply the gradients in some slots."""
    return tuple(_times(gradient, factors.get(slot, 1.0)) for slot, gradient in enumerate(gradients))


def _times(gradient: Tensor | None, factor: float) -> Tensor | None:
    if gradient is None or factor == 1.0:
        return gradient
    if gradient.element_size() == 1:  # float8, which PyTorch does not multiply
        return (gradient.float() * factor).to(gradient.dtype)
    return gradient * factor


def _guards(parameters: dict[str, nn.Parameter], leaves: set[int]) -> Iterator[RemovableHandle]:
    """Register hooks on the parameters outside the graph: only a hidden graph can give them gradients."""
    for name, parameter in parameters.items():
        if id(parameter) not in leaves and parameter.requires_grad and parameter.is_leaf:
            yield parameter.register_hook(partial(_refuse_hidden, name))  # type: ignore[no-untyped-call]


def _refuse_hidden(name: str, gradient: Tensor) -> NoReturn:
    raise UsageError(
        f"The gradient of {name} comes from a graph that did not exist before backward: some function runs "
        "its own backward pass, whose factor is unknown. Set all gradients to zero, and write "
        "loss.backward(), or leave that function out."
    )


def _refuse_activations(inputs: list[Tensor]) -> None:
    if any(not tensor.is_leaf for tensor in inputs):
        raise UsageError(
            "inputs= has a tensor that is computed from others: its gradient would include factors. "
            "Write inputs=[...] with leaves only, or loss.backward(inputs=...)."
        )
