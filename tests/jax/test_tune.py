"""Tune in JAX: what it keeps in float32, and what is left of a step with its table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from preamp import casting
from preamp.autocasting.tables import Casting
from preamp.errors import PreampError
from preamp.jax import autocast, blame, tune

KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {"up": jax.random.normal(KEYS[0], (16, 64)) / 4, "down": jax.random.normal(KEYS[1], (64, 4)) / 8}
X, Y = jax.random.normal(KEYS[2], (32, 16)), jax.random.normal(KEYS[3], (32, 4))


def loss(params, amount):
    hidden = amount * jax.nn.relu(X @ params["up"])
    return jnp.mean((hidden @ params["down"] / amount - Y) ** 2)


def test_a_healthy_step_needs_nothing():
    found = tune(loss, PARAMS, 1.0, dtype="float16")
    assert found.solved
    assert (found.kept, found.rehearsals, found.casting) == ([], 1, casting.DEFAULT)
    assert found.low_share == 1.0


def test_what_overflows_is_kept_in_float32_and_the_table_survives_a_file():
    found = tune(loss, PARAMS, 1e6, dtype="float16")
    assert found.solved
    assert found.kept
    assert found.rehearsals <= 20
    table = Casting.from_dict(found.to_dict())
    assert not any(row.overflowed for row in blame(loss, PARAMS, 1e6, dtype="float16", casting=table).rows)
    kept = autocast(loss, "float16", casting=table, emulate=True)
    assert jnp.isfinite(kept(PARAMS, 1e6))
    assert not jnp.isfinite(autocast(loss, "float16", emulate=True)(PARAMS, 1e6))
    assert max(map(len, str(found).splitlines())) <= 80


def test_the_share_of_a_rule_is_of_all_that_it_covers():
    def two(params):
        with jax.named_scope("ffn"):
            hidden = X @ params["up"]
        return jnp.mean((hidden @ params["down"]) ** 2)

    params = {"up": 1e6 * PARAMS["up"], "down": PARAMS["down"] / 1e6}
    found = tune(two, params, dtype="float16")
    assert [(each.name, each.flops) for each in found.kept] == [("dot_general", found.after.flops)]


def test_a_target_is_met():
    error = blame(loss, PARAMS, 1.0).gradient_error
    found = tune(loss, PARAMS, 1.0, target=0.5 * error)
    assert found.solved
    assert found.after.gradient_error <= 0.5 * error < found.before.gradient_error
    assert found.low_share < 1.0


@pytest.mark.parametrize("wrong", [{"rehearsals": 0}, {"target": -1.0}])
def test_arguments_are_checked(wrong):
    with pytest.raises(PreampError):
        tune(loss, PARAMS, 1.0, **wrong)


def test_a_program_that_casts_by_itself_is_tuned_and_its_cast_is_no_rule():
    def cast(params, x):
        hidden = (x @ params["up"]).astype(jnp.bfloat16) + 300
        centered = (hidden - jnp.mean(hidden, -1, keepdims=True)).astype(jnp.float32)
        return jnp.mean((centered @ params["down"] - Y) ** 2)

    found = tune(cast, PARAMS, X)
    assert "convert_element_type" not in {kept.name for kept in found.kept}
    with pytest.raises(PreampError, match="the program's own cast"):
        blame(cast, PARAMS, X, casting=casting.DEFAULT.float32("convert_element_type"))
