"""`blame` names the operation that loses the accuracy, and no other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from preamp import casting
from preamp.jax import autocast, blame

from .blamed import PARAMS, X, attention, cross_entropy, perceptron


def first(found: Any) -> tuple[str, str]:
    return found.rows[0].operator, found.rows[0].direction


@pytest.mark.parametrize("low", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_healthy_models_have_no_guilty_operation(low: str) -> None:
    for loss in (perceptron, attention):
        found = blame(loss, PARAMS, X, dtype=low)
        assert not found.guilty, found
        assert found.rows
        assert found.loss_scale == (2.0**16 if low == "float16" else 1.0)


def test_large_attention_logits() -> None:
    found = blame(attention, PARAMS, X, 100.0)
    assert first(found) in [("add", "forward"), ("dot_general", "forward")]
    assert {row.direction for row in found.guilty[:2]} == {"forward"}
    assert found.rows[0].severity > 5


def test_a_variance_as_a_difference_of_squares() -> None:
    def loss(p: Any, x: Any, offset: float) -> Any:
        h = (x @ p["up"] + offset).astype(jnp.bfloat16)
        variance = jnp.mean(h * h, -1, keepdims=True) - jnp.mean(h, -1, keepdims=True) ** 2
        return cross_entropy(h * lax.rsqrt(jnp.maximum(variance, 0.1)) @ p["down"])

    assert not blame(loss, PARAMS, X, 0.0).guilty
    assert first(blame(loss, PARAMS, X, 30.0)) in [("add", "forward"), ("mul", "forward")]  # sums are float32


def test_a_variance_that_is_negative_gives_nan_which_is_laid_at_the_door_of_what_feeds_it() -> None:
    def loss(p: Any, x: Any) -> Any:
        h = (x @ p["up"] + 30.0).astype(jnp.bfloat16)
        variance = jnp.mean(h * h, -1, keepdims=True) - jnp.mean(h, -1, keepdims=True) ** 2
        return cross_entropy(h * lax.rsqrt(variance + 1e-3) @ p["down"])

    found = blame(loss, PARAMS, X, casting=casting.DEFAULT.lower("sum"))
    assert jnp.isnan(found.loss)
    assert found.guilty
    assert "rsqrt" not in {row.operator for row in found.guilty}
    assert "rsqrt" in found.notes[0]


def test_cancellation() -> None:
    def loss(p: Any, x: Any) -> Any:
        h = x @ p["up"]
        h = h + 1000.0
        return cross_entropy((h - 1000.0) @ p["down"])

    found = blame(loss, PARAMS, X)
    assert first(found) == ("add", "forward")
    assert found.rows[0].severity > 20


def test_an_overflow_is_named_where_it_happens_first() -> None:
    def loss(p: Any, x: Any) -> Any:
        h = x @ p["up"]
        return cross_entropy(((h * 300.0) * (h * 300.0)) @ p["down"] / 1e4)

    found = blame(loss, PARAMS, X, dtype="float16", loss_scale=1.0)
    assert first(found) == ("mul", "forward")
    assert found.rows[0].overflowed
    assert found.rows[0].amax > found.rows[0].limit == 65504
    assert not any(row.overflowed for row in blame(loss, PARAMS, X, dtype="bfloat16").rows)


def test_a_loss_scale_that_is_too_large() -> None:
    found = blame(perceptron, PARAMS, X, dtype="float16", loss_scale=2.0**30)
    assert {row.direction for row in found.guilty} == {"backward"}
    assert all(row.overflowed for row in found.guilty)


def test_gradients_that_are_flushed_to_zero_without_a_loss_scale() -> None:
    def loss(p: Any, x: Any) -> Any:
        return perceptron(p, x) * 1e-7

    found = blame(loss, PARAMS, X, dtype="float16", loss_scale=1.0)
    assert first(found) == ("dot_general", "backward")
    assert found.rows[0].lost_share > 0.3
    assert found.rows[0].runs == "float16"
    assert not blame(loss, PARAMS, X, dtype="float16").guilty
    assert not blame(loss, PARAMS, X, dtype="bfloat16").guilty


@pytest.mark.parametrize("bias", [-26.0, 16.0])
def test_a_result_that_rounds_to_a_constant_is_accused_of_the_gradient_that_is_lost_with_it(
    bias: float,
) -> None:
    def loss(p: Any, x: Any) -> Any:
        saturated = jax.nn.sigmoid(x @ p["lost"] + bias)  # its derivative is y * (1 - y)
        return cross_entropy((jnp.tanh(x @ p["up"]) + saturated) @ p["down"])

    found = blame(loss, {**PARAMS, "lost": PARAMS["up"]}, X, dtype="float16")
    assert first(found) == ("logistic", "forward")
    assert found.rows[0].parameter == "params['lost']"
    assert found.rows[0].parameter_error == pytest.approx(1, abs=0.1)


def test_where_all_gradients_are_lost_the_effect_is_in_units_of_those_in_float32() -> None:
    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jax.nn.sigmoid(x @ p["up"] - 26))

    found = blame(loss, {"up": PARAMS["up"]}, X, dtype="float16")
    assert first(found) == ("logistic", "forward")
    assert found.rows[0].effect == pytest.approx(1, abs=0.3)


def test_a_sum_of_many_terms() -> None:
    def loss(p: Any, x: Any) -> Any:
        terms = jnp.square(jnp.tanh(x @ p["up"])).astype(jnp.bfloat16).ravel()

        def add(total: Any, term: Any) -> Any:
            return total + term, None

        return lax.scan(add, jnp.zeros((), jnp.bfloat16), terms[:50])[0].astype(jnp.float32)

    found = blame(loss, PARAMS, X)
    assert first(found) == ("add", "forward")
    assert found.rows[0].calls == pytest.approx(50, abs=10)
    assert found.predicted_loss == pytest.approx(found.loss, rel=1e-3)


def test_the_loss_scale_is_the_largest_with_which_nothing_overflows() -> None:
    def loss(p: Any, x: Any) -> Any:
        return perceptron(p, x) * 2.0**12

    found = blame(loss, PARAMS, X, dtype="float16")
    assert not found.guilty
    assert 1.0 < found.loss_scale < 2.0**16
    assert f"{found.loss_scale:g}" in found.notes[0]
    twice = blame(loss, PARAMS, X, dtype="float16", loss_scale=2 * found.loss_scale)
    assert {row.direction for row in twice.guilty} == {"backward"}


def test_the_loss_is_what_the_region_computes() -> None:
    found = blame(perceptron, PARAMS, X)
    assert found.loss == pytest.approx(float(autocast(perceptron)(PARAMS, X)), rel=1e-4)
    assert found.float32_loss == pytest.approx(float(jax.jit(perceptron)(PARAMS, X)), rel=1e-6)
