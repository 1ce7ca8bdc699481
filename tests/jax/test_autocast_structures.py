"""Programs with programs or derivatives inside: they agree with float32, and their products are low."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from . import derivative_programs, structured_programs
from .agreement import compiled_agrees, eager_agrees, every_third, products_are_low, slow
from .programs import written_in

pytestmark = [
    pytest.mark.usefixtures("quick_compiler"),
    pytest.mark.filterwarnings("ignore:The jitted function .* includes a pmap:UserWarning"),  # before JAX 0.8
]
half = pytest.mark.parametrize("low", [jnp.float16, *slow(jnp.bfloat16)])
NAMES = written_in(structured_programs, derivative_programs)
each_program = pytest.mark.parametrize("name", NAMES)
without_jit = pytest.mark.parametrize("name", slow(*NAMES))


@half
@pytest.mark.parametrize("name", every_third(NAMES))
def test_the_compiled_program_agrees_with_float32(name: str, low: Any) -> None:
    compiled_agrees(name, low)


@without_jit
def test_the_program_agrees_with_float32_without_jit(name: str) -> None:
    eager_agrees(name, jnp.float16)


@half
@each_program
def test_every_product_is_low_forward_and_backward(name: str, low: Any) -> None:
    products_are_low(name, low)
