"""What grampax, an autocast by custom tracers, does with programs of the matrix. Ours runs all of them.

Its last release needs quax 0.3; beside later ones it fails on every program.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest

from .agreement import Run, run
from .programs import PROGRAMS

grampax = pytest.importorskip("grampax")

FAILS = {
    "scan_with_a_constant": TypeError,
    "scan_over_weights": TypeError,
    "fori_loop": TypeError,
    "lax_map": TypeError,
    "custom_vjp": NotImplementedError,
    "shard_map": AttributeError,
    "pmap": AttributeError,
    "keywords_only": TypeError,
}
KEEPS = ["checkpoint", "checkpoint_with_policies", "ragged_product"]


def counted(name: str) -> Any:
    return Run(PROGRAMS[name], partial(grampax.autocast, dtype=jnp.bfloat16)).traced("forward")


@pytest.mark.parametrize("name", ["matmul", "cond", "grad"])
def test_grampax_lowers_products(name: str) -> None:
    assert counted(name) == {"bfloat16": PROGRAMS[name].products}


@pytest.mark.parametrize("name", FAILS)
def test_grampax_fails_where_ours_lowers_every_product(name: str) -> None:
    with pytest.raises(FAILS[name]):
        counted(name)
    assert run(name, jnp.bfloat16).traced("forward") == {"bfloat16": PROGRAMS[name].products}


@pytest.mark.parametrize("name", KEEPS)
def test_grampax_silently_keeps_products_that_ours_lowers(name: str) -> None:
    assert counted(name) == {"float32": PROGRAMS[name].products}
    assert run(name, jnp.bfloat16).traced("forward") == {"bfloat16": PROGRAMS[name].products}
