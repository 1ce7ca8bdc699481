"""Programs of every kind: under autocast they agree with float32, and their products are low."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from preamp.jax import autocast

from .agreement import (
    ROUNDINGS,
    Run,
    compiled_agrees,
    eager_agrees,
    every_fifth,
    off_by,
    products_are_low,
    run,
    slow,
)
from .programs import PROGRAMS, Program, x

pytestmark = [
    pytest.mark.usefixtures("quick_compiler"),
    pytest.mark.filterwarnings("ignore:The jitted function .* includes a pmap:UserWarning"),  # before JAX 0.8
]
half = pytest.mark.parametrize("low", [jnp.float16, *slow(jnp.bfloat16)])
NAMES = list(PROGRAMS)
each_program = pytest.mark.parametrize("name", NAMES)


@half
@pytest.mark.parametrize("name", every_fifth(NAMES))
def test_the_compiled_program_agrees_with_float32(name: str, low: Any) -> None:
    compiled_agrees(name, low)


@pytest.mark.parametrize("name", slow(*NAMES))
def test_the_program_agrees_with_float32_without_jit(name: str) -> None:
    eager_agrees(name, jnp.float16)


@half
@each_program
def test_every_product_is_low_forward_and_backward(name: str, low: Any) -> None:
    products_are_low(name, low)


def test_a_product_that_stays_wide_is_counted() -> None:
    def half_cast(a: Any, w: Any) -> Any:
        low = autocast(jnp.matmul)(a, w)
        return jax.lax.scan(lambda h, _: (h @ w + jax.lax.dot(low, w), None), a, length=2)

    here = Run(Program(lambda: (half_cast, x(2, 8), x(8, 8)), 1))
    assert here.traced("forward") == {"bfloat16": 1, "float32": 1, "bfloat16 float32": 1}
    assert here.lowered("forward")["bfloat16"] == 1
    assert here.lowered("forward").total() == 3


def test_a_rule_that_is_not_kept_is_seen() -> None:
    rule = PROGRAMS["custom_vjp"]
    without = Run(Program(lambda: (lambda a, w: jnp.sin(a @ w), *rule.arguments), 1))
    expected = run("custom_vjp").jitted
    assert off_by(without.eager["grad"], expected["grad"], jnp.bfloat16) > 10 * ROUNDINGS
    assert off_by(without.eager["forward"], expected["forward"], jnp.bfloat16) < 1


def test_what_is_no_array_passes_through() -> None:
    here = run("trees", jnp.bfloat16)
    results = here.whole(here.floats, here.others)
    assert results["name"] == "a string"
    assert type(results["number"]) is int
    assert results["out"][1] is results["in"]["more"][1] is None
