"""What the tests of `LayerwiseScale` share: deep nets, ways to go backward, and comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FAINT = 2.0**-30  # what a loss is multiplied by so that its gradients need factors
Named = dict[str, Tensor | None]


def gradients(model: nn.Module, *others: Tensor) -> Named:
    """Return copies of the gradients of a model's parameters, and of inputs."""
    inputs = [(f"input {number}", tensor) for number, tensor in enumerate(others)]
    named = [*model.named_parameters(), *inputs]
    return {name: None if one.grad is None else one.grad.clone() for name, one in named}


def backward_of(run: Callable[[Tensor], Any], model: nn.Module, loss: Tensor, *others: Tensor) -> Named:
    """Return the gradients that a way to go backward leaves."""
    for parameter in (*model.parameters(), *others):
        parameter.grad = None
    run(loss)
    return gradients(model, *others)


def assert_same(found: Named, expected: Named) -> None:
    """Compare gradients bit by bit."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        other = found[name]
        assert (gradient is None) == (other is None), name
        assert gradient is None or other is None or torch.equal(other, gradient), name


def relative_error(found: Any, exact: Any) -> float:
    """Return the largest distance of a gradient from an exact one, in norms of the exact one."""
    pairs = [(found[name].double(), exact[name]) for name in exact]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def deep(depth: int = 8, width: int = 16, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Return a net whose weights have standard deviation 1 / sqrt(width), always the same."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) for _ in range(depth)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=1.0 / math.sqrt(width))
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*[part for layer in layers for part in (layer, activation())][:-1])
