"""Every program of the matrix, in float16 and bfloat16: it agrees with float32, and its products are low.

What another autocast does with the same programs is in `test_autocast_peers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from preamp.jax import autocast

from .agreement import FLOATS, Run, off_by, run
from .programs import PROGRAMS, Program, x

ROUNDINGS = 4
each_half = pytest.mark.parametrize("low", [jnp.float16, jnp.bfloat16], ids=lambda low: np.dtype(low).name)
each_program = pytest.mark.parametrize("name", PROGRAMS)


@pytest.fixture(autouse=True, scope="module")
def quick_compiler() -> Iterator[None]:
    """What runs once is compiled faster."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@each_half
@each_program
def test_the_compiled_program_agrees_with_float32(name: str, low: Any) -> None:
    """Its results, `jit(grad)`, `grad(jit)` and `vmap`."""
    expected = run(name).jitted
    for way, results in run(name, low).jitted.items():
        assert off_by(results, expected[way], low, "grad" in way) <= ROUNDINGS * PROGRAMS[name].loose, way


@each_half
@each_program
def test_the_program_agrees_with_float32_without_jit(name: str, low: Any) -> None:
    """Its results and its gradient."""
    expected = run(name).jitted
    for way, results in run(name, low).eager.items():
        assert off_by(results, expected[way], low, "grad" in way) <= ROUNDINGS * PROGRAMS[name].loose, way


@each_half
@each_program
def test_every_product_is_low_forward_and_backward(name: str, low: Any) -> None:
    """In the jaxpr and in what XLA is given; products of other numbers than these floats stay."""
    program, dtype = PROGRAMS[name], np.dtype(low).name
    assert run(name, low).traced("forward")[dtype] == program.products
    for way in ("forward", "grad")[: 1 + program.differentiable]:
        for count in (Run.traced, Run.lowered):
            now, before = count(run(name, low), way), count(run(name), way)
            wide = now.total() - now[dtype]
            assert {each: now[each] for each in now - FLOATS} == {
                each: before[each] for each in before - FLOATS
            }
            assert program.kept or not wide


def test_a_product_that_stays_wide_is_counted() -> None:
    def half_cast(a: Any, w: Any) -> Any:
        return jax.lax.scan(lambda h, _: (autocast(jnp.matmul)(h, w) @ w, None), a, length=2)

    here = Run(Program(lambda: (half_cast, x(2, 8), x(8, 8)), 1))
    assert here.traced("forward") == here.lowered("forward") == {"bfloat16": 1, "float32": 1}


def test_a_rule_that_is_not_kept_is_seen() -> None:
    rule = PROGRAMS["custom_vjp"]
    without = Run(Program(lambda: (lambda a, w: jnp.sin(a @ w), *rule.arguments), 1))
    assert off_by(without.eager["grad"], run("custom_vjp").jitted["grad"], jnp.bfloat16) > 10 * ROUNDINGS
    assert off_by(without.eager["forward"], run("custom_vjp").jitted["forward"], jnp.bfloat16) < 1


def test_what_is_no_array_passes_through() -> None:
    here = run("trees", jnp.bfloat16)
    results = here.whole(here.floats, here.others)
    assert results["name"] == "a string"
    assert type(results["number"]) is int
    assert results["out"][1] is results["in"]["more"][1] is None
