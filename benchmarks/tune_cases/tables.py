"""The tables that are compared with what tune finds, and a greedy search for one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from preamp import casting
from preamp.autocasting.tables import Casting
from preamp.torch import autocast
from preamp.torch.autocasting import operators
from tune_cases import Batch, Loss

__all__ = ["CUDA", "EVERYTHING_LOW", "JAX", "Exact", "Greedy", "gradients", "greedy", "low_share"]

EVERYTHING_LOW = casting.DEFAULT.lower(*sorted(operators.arithmetic()))
"""Every operator that computes something rounds its inputs, its results and their gradients."""

_NOTHING = dict.fromkeys(casting.CPU.rules, "untouched")

CUDA = Casting({**_NOTHING, **casting.CUDA.rules})
"""PyTorch's table for CUDA, without what only the table for CPUs lists."""

# What JAX's primitives are called in PyTorch, where that is something else.
IN_PYTORCH = {
    "conv_general_dilated": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    "dot_general": """
        addbmm addmm addmv addr baddbmm bmm einsum inner linalg_multi_dot linalg_vecdot linear matmul mm mv
        tensordot
    """,
    "cumlogsumexp": "logcumsumexp",
    "erf_inv": "erfinv",
    "exp": "exp logsumexp softmax",
    "log": "log log_softmax cross_entropy_loss",
    "reduce_prod": "prod",
    "reduce_sum": "sum mean var std mse_loss linalg_vector_norm layer_norm native_layer_norm",
}

RIGHT = 0.01  # relative error of a gradient in float32


def _as_in_jax() -> Casting:
    """Return the nearest table to JAX's: its rules "lower" and "float32"; everything else is untouched.

    "widest" is left out: PyTorch promotes operands so. An operator of PyTorch's that is several primitives in
    JAX, such as softmax, has the rule of the sum or exponential in it.
    """
    rules = dict(_NOTHING)
    for primitive, rule in casting.JAX.rules.items():
        if rule in ("lower", "float32"):
            for name in IN_PYTORCH.get(primitive, primitive).split():
                if name in operators.arithmetic():
                    rules[name] = rule
    return Casting(rules)  # type: ignore[arg-type]


JAX = _as_in_jax()
"""The nearest table to `casting.JAX` in PyTorch's operators."""


def gradients(
    model: nn.Module,
    loss_fn: Loss,
    batch: Batch,
    dtype: torch.dtype | None,
    table: Casting | None,
    scale: float,
) -> list[Tensor]:
    """Return the gradients of one step, without the loss scale; as the model is without a dtype."""
    model.zero_grad()
    if dtype is None:
        loss = loss_fn(batch)
    else:
        with autocast("cpu", dtype, casting=table, model=model, emulate=True):
            loss = loss_fn(batch)
    (loss * scale).backward()
    found = [
        torch.zeros_like(weight) if weight.grad is None else weight.grad / scale
        for weight in model.parameters()
    ]
    model.zero_grad()
    return found


class Exact:
    """The exact gradients of a step, to compare others with.

    They are computed in float64. Parameters whose gradient is not right in float32 either are left out, as
    those that nothing depends on, whose gradient is zero but for rounding.
    """

    def __init__(self, model: nn.Module, loss_fn: Loss, batch: Batch) -> None:
        found = gradients(model, loss_fn, batch, None, None, 1.0)
        wide = tuple(each.double() if each.is_floating_point() else each for each in batch)
        exact = gradients(model.double(), loss_fn, wide, None, None, 1.0)
        model.float()
        self._gradients = [
            wanted if _relative(each, wanted) < RIGHT else None
            for each, wanted in zip(found, exact, strict=True)
        ]

    def error(self, found: Sequence[Tensor]) -> tuple[float, float]:
        """Return how far gradients are from exact: how many are not finite, and how far the others are.

        Returns:
            The share of values that are not finite, and the root mean square, over the parameters, of the
            relative errors in the 2-norm.
        """
        broken = sum(int((~each.isfinite()).sum()) for each in found) / sum(each.numel() for each in found)
        errors = [
            _relative(each, wanted)
            for each, wanted in zip(found, self._gradients, strict=True)
            if wanted is not None and each.isfinite().all()
        ]
        return broken, math.sqrt(sum(error**2 for error in errors) / max(1, len(errors)))


def _relative(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


def low_share(model: nn.Module, loss_fn: Loss, batch: Batch, dtype: torch.dtype, table: Casting) -> float:
    """Return the share of the FLOPs of products, in the forward pass, that run in low precision."""
    region = autocast("cpu", dtype, casting=table, model=model, emulate=True, report=True)
    with region:
        loss_fn(batch)
    rows = region.report().rows
    return sum(row.flops for row in rows if row.runs in ("float16", "bfloat16")) / sum(
        row.flops for row in rows
    )


@dataclass(frozen=True)
class Greedy:
    """What a greedy search found.

    Attributes:
        casting: the table.
        kept: what it keeps in float32.
        rehearsals: the number of steps that it ran.
    """

    casting: Casting
    kept: tuple[str, ...]
    rehearsals: int


def greedy(
    model: nn.Module,
    loss_fn: Loss,
    batch: Batch,
    dtype: torch.dtype,
    target: tuple[float, float],
    exact: Exact,
    scale: float,
    most: int,
) -> Greedy:
    """Keep one more operator or module in float32 at a time: the one that leaves the smallest error.

    Args:
        model: the model.
        loss_fn: its loss function.
        batch: of the rehearsed step.
        dtype: the low precision.
        target: the error to reach.
        exact: the step's exact gradients.
        scale: the loss scale.
        most: how many steps may be run.
    """
    table, rehearsals = EVERYTHING_LOW, 2  # exactly and with this table
    kept: tuple[str, ...] = ()
    error = exact.error(gradients(model, loss_fn, batch, dtype, table, scale))
    names = list(_candidates(model, loss_fn, batch, dtype))
    while error > target and names:
        tried: list[tuple[tuple[float, float], int]] = []
        for place in range(len(names)):
            if rehearsals == most:
                return Greedy(table, kept, rehearsals)
            rehearsals += 1
            found = gradients(model, loss_fn, batch, dtype, _with(table, *names[place]), scale)
            tried.append((exact.error(found), place))
        error, best = min(tried)
        of, name = names.pop(best)
        table, kept = _with(table, of, name), (*kept, name)
    return Greedy(table, kept, rehearsals)


def _with(table: Casting, of: str, name: str) -> Casting:
    return table.module(name, "float32") if of == "modules" else table.float32(name)


def _candidates(
    model: nn.Module, loss_fn: Loss, batch: Batch, dtype: torch.dtype
) -> Iterator[tuple[str, str]]:
    """Yield the operators of a step and the paths of the modules without modules inside."""
    region = autocast("cpu", dtype, casting=EVERYTHING_LOW, model=model, emulate=True, report=True)
    with region:
        loss_fn(batch)
    for name in dict.fromkeys(row.operator for row in region.report().rows if row.rule == "lower"):
        yield "operators", name
    for path, module in model.named_modules():
        if path and not any(module.children()):
            yield "modules", path
