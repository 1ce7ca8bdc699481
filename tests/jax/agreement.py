"""How programs are run every way there is, with autocast and without, and what is compared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest

from preamp.jax import autocast

from . import derivative_programs, library_programs, structured_programs  # noqa: F401  # fill PROGRAMS
from .programs import PROGRAMS, Program
from .trainings import enable_x64

__all__ = ["ROUNDINGS", "Run", "compiled_agrees", "eager_agrees", "off_by", "products_are_low", "run", "slow"]

PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
COMPILED = re.compile(
    r"(?:stablehlo\.dot_general|stablehlo\.convolution|chlo\.ragged_dot).* : "
    r"\(tensor<([^>]*)>, tensor<([^>]*)>"
)
FLOATS = {"float16", "bfloat16", "float32"}
ROUNDINGS = 8
NAMES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def is_float(leaf: Any) -> bool:
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 1


class Run:
    """A program as a function of two lists of arrays: its floats, and the others.

    Args:
        program: a program.
        transformation: what is put around its function.
    """

    def __init__(
        self, program: Program, transformation: Callable[..., Any] = lambda function: function
    ) -> None:
        self.program = program
        self.leaves, self.tree = jax.tree.flatten((program.arguments, program.options or {}))
        self.floats = [leaf for leaf in self.leaves if is_float(leaf)]
        self.others = [leaf for leaf in self.leaves if is_array(leaf) and not is_float(leaf)]
        self.function = program.under(transformation)
        self.traces: dict[str, Any] = {}

    def whole(self, floats: Any, others: Any) -> Any:
        """Return what the function returns."""
        floats, others = iter(floats), iter(others)
        leaves = [
            next(floats) if is_float(leaf) else next(others) if is_array(leaf) else leaf
            for leaf in self.leaves
        ]
        arguments, options = jax.tree.unflatten(self.tree, leaves)
        return self.function(*arguments, **options)

    def forward(self, floats: Any, others: Any) -> Any:
        """Return the arrays that the function returns."""
        return [leaf for leaf in jax.tree.leaves(self.whole(floats, others)) if is_array(leaf)]

    def grad(self, floats: Any, others: Any) -> Any:
        return jax.grad(lambda floats: weighed(self.forward(floats, others)))(floats)

    def grad_of_jit(self, floats: Any, others: Any) -> Any:
        return jax.grad(lambda floats: weighed(jax.jit(self.forward)(floats, others)))(floats)

    def vmap(self, floats: Any, others: Any) -> Any:
        both = [jnp.stack([leaf, leaf / 2]) for leaf in floats]
        return jax.vmap(self.forward, (0, None))(both, others)

    @property
    def ways(self) -> list[Callable[..., Any]]:
        gradients = [self.grad, self.grad_of_jit] if self.program.differentiable else []
        return [self.forward, *gradients, *([self.vmap] if self.program.mapped else [])]

    @cached_property
    def jitted(self) -> dict[str, list[Any]]:
        """The results of every way, from one compiled program."""
        run = jax.jit(lambda *inputs: [way(*inputs) for way in self.ways])
        with enable_x64(self.program.x64):
            return dict(zip([way.__name__ for way in self.ways], run(self.floats, self.others), strict=True))

    @cached_property
    def eager(self) -> dict[str, list[Any]]:
        """The results operator by operator, and of the gradient as well."""
        ways = [way for way in self.ways if way.__name__ in ("forward", "grad")]
        with enable_x64(self.program.x64):
            return {way.__name__: way(self.floats, self.others) for way in ways}

    def trace(self, way: str) -> Any:
        if way not in self.traces:
            with enable_x64(self.program.x64):
                self.traces[way] = jax.jit(getattr(self, way)).trace(self.floats, self.others)
        return self.traces[way]

    def traced(self, way: str) -> Counter[str]:
        """Count products by the dtype of their inputs, in the jaxpr and in every jaxpr inside."""
        return Counter(dtypes(self.trace(way).jaxpr.jaxpr))

    def lowered(self, way: str) -> Counter[str]:
        """Count products by the dtype of their inputs, in the program that XLA is given for a TPU.

        For a CPU, JAX itself widens some products of bfloat16. A callback only runs there.
        """
        traced = self.trace(way)
        platform = "cpu" if "callback" in str(traced.jaxpr) else "tpu"
        with enable_x64(self.program.x64):
            shapes = COMPILED.findall(traced.lower(lowering_platforms=(platform,)).as_text())
        types = (shape.split("x")[-1] for shape in chain(*shapes))
        names = (NAMES.get(each, each) for each in types)
        return Counter(map(common, zip(names, names, strict=True)))


@cache
def run(name: str, low: Any = None) -> Run:
    """Return a program under autocast; as it is where there is no dtype."""
    return Run(PROGRAMS[name], partial(autocast, dtype=low)) if low else Run(PROGRAMS[name])


def compiled_agrees(name: str, low: Any) -> None:
    """Assert it of the results of a compiled program, `jit(grad)`, `grad(jit)` and `vmap`."""
    _agrees(name, run(name, low).jitted, low)


def eager_agrees(name: str, low: Any) -> None:
    """Assert it of the results and the gradient, operator by operator."""
    _agrees(name, run(name, low).eager, low)


def _agrees(name: str, results: dict[str, list[Any]], low: Any) -> None:
    for way, expected in run(name).jitted.items():
        if way in results:
            off = off_by(results[way], expected, low, together="grad" in way)
            assert off <= ROUNDINGS * PROGRAMS[name].loose, way


def products_are_low(name: str, low: Any) -> None:
    """Assert that every product is low, in the jaxpr and in what XLA is given, forward and in the gradient.

    Products of other numbers than these floats must be left alone.
    """
    dtype = np.dtype(low).name
    assert run(name, low).traced("forward")[dtype] == PROGRAMS[name].products
    for way in ("forward", "grad")[: 1 + PROGRAMS[name].differentiable]:
        now, before = run(name, low).traced(way), run(name).traced(way)
        assert of_others(now) == of_others(before)
        for count in (now, run(name, low).lowered(way)):
            assert PROGRAMS[name].kept or count[dtype] == count.total() - sum(of_others(count).values())


def of_others(count: Counter[str]) -> dict[str, int]:
    return {each: number for each, number in count.items() if each not in FLOATS}


def slow(*values: Any) -> list[Any]:
    """Return parameters that only `make test-slow` runs with."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def every_fifth(values: list[Any]) -> list[Any]:
    """Return parameters of which `make test` runs with every fifth one, and one that moves operands."""
    quick = {*values[::5], "transposed_convolution"}
    return [value if value in quick else slow(value)[0] for value in values]


@jax.jit
def weighed(results: list[Any]) -> Any:
    """Return one number that depends on every result differently."""
    split = ((leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,) for leaf in results)
    wide = [
        part.astype(jnp.promote_types(part.dtype, jnp.float32)) for part in chain(*split) if is_float(part)
    ]
    return sum((part.ravel() * weights(part)).sum() for part in wide)


def weights(part: Any) -> Any:
    return (0.5 + np.arange(part.size) * 0.618 % 1).astype(part.dtype)


def dtypes(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        if equation.primitive.name in PRODUCTS:
            yield common(each.aval.dtype.name for each in equation.invars[:2])
        held = getattr(equation.params.get("_prim"), "params", {})  # of an object, since JAX 0.12
        for value in jax.tree.leaves([*equation.params.values(), *held.values()], is_leaf=is_jaxpr):
            if is_jaxpr(value):
                yield from dtypes(getattr(value, "jaxpr", value))


def common(names: Iterable[str]) -> str:
    """Return the dtype of both inputs of a product: "bfloat16 float32" where they differ."""
    return " ".join(dict.fromkeys(names))


def is_jaxpr(value: Any) -> bool:
    return isinstance(value, jex.Jaxpr | jex.ClosedJaxpr)


def off_by(results: list[Any], expected: list[Any], low: Any, together: bool = False) -> float:
    """Return the largest error, in roundings to `low` of the largest number that was expected.

    Args:
        results: arrays.
        expected: arrays of the same shapes and dtypes, though floats of 32 bits may be low in `results`.
            Integers, booleans and keys must be equal, and what is not finite must be so in both.
        low: a dtype.
        together: whether the largest number is that of all arrays, not of each, as for gradients: one that
            should be zero comes out as the rounding of larger ones.
    """
    sizes = [largest(each) for each in expected]
    sizes = [max(sizes, default=0.0)] * len(sizes) if together else sizes
    errors = map(error, results, expected, [low] * len(sizes))
    return max(
        (e / (s * float(jnp.finfo(low).eps)) for e, s in zip(errors, sizes, strict=True) if e), default=0.0
    )


def numbers(array: Any) -> Any:
    """Return an array as NumPy's, in the widest dtype of its kind."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(array))
    if jnp.issubdtype(array.dtype, jnp.floating):
        return np.asarray(array).astype(np.float64)
    return np.asarray(array)


def largest(array: Any) -> float:
    values = numbers(array)
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def error(result: Any, expected: Any, low: Any) -> float:
    assert result.dtype == expected.dtype or (result.dtype == low and expected.dtype.name in FLOATS)
    assert result.shape == expected.shape
    exact = not jnp.issubdtype(expected.dtype, jnp.inexact)
    result, expected = numbers(result), numbers(expected)
    sound = np.zeros(result.shape, bool) if exact else np.isfinite(expected)
    assert (result[~sound] == expected[~sound]).all()
    return 0.0 if exact else float(np.abs(result[sound] - expected[sound]).max(initial=0.0))
