"""What other loss scalers for JAX get wrong, the peer beside ours: both halves of each test must hold."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

from preamp import Dynamic, Static, dialects
from preamp.jax import last_step, loss_scaled, step, value_and_grad

from .trainings import handed

jmp, mpx = pytest.importorskip("jmp"), pytest.importorskip("mpx")


def square(w: Any) -> Any:
    return jnp.sum(w * w)


def state_of(policy: Any) -> Any:
    return loss_scaled(optax.sgd(0.1), policy).init(jnp.ones(2))


def grown(policy: Any, steps: int) -> list[float]:
    optimizer, scales = loss_scaled(optax.sgd(0.1), policy), []
    w, train, state = jnp.ones(2), jax.jit(step(square, optimizer)), state_of(policy)
    for _ in range(steps):
        _, w, state = train(w, state)
        scales.append(last_step(state).new_scale)
    return scales


def test_a_step_on_which_the_scale_grows_returns_the_exact_gradient() -> None:
    w = jnp.array([1.0, 3.0])
    scaling = mpx.DynamicLossScaling(jnp.float32(8.0), jnp.float32(1.0), period=1)
    halved = mpx.filter_value_and_grad(square, scaling)(w)
    assert halved[-1].tolist() == [1.0, 3.0]
    optimizer = loss_scaled(optax.sgd(1.0), Dynamic(init_scale=8.0, growth_interval=1))
    value, gradient, state = value_and_grad(square)(w, optimizer.init(w))
    assert (float(value), gradient.tolist()) == (10.0, [2.0, 6.0])
    assert last_step(optimizer.update(gradient, state, w)[1]).new_scale == 16.0
    _, after, state = step(square, optimizer)(w, optimizer.init(w))
    assert after.tolist() == [-1.0, -3.0]
    assert last_step(state).new_scale == 16.0


def test_the_floor_survives_trees_and_compilation() -> None:
    overflow = jnp.array(False)
    theirs = jax.jit(lambda scale: scale.adjust(overflow))(jmp.DynamicLossScale(8.0, min_loss_scale=4.0))
    for _ in range(5):
        theirs = theirs.adjust(overflow)
    assert float(theirs.loss_scale) == 1.0
    w, optimizer = jnp.full(2, jnp.inf), loss_scaled(optax.sgd(0.1), Dynamic(init_scale=8.0, min_scale=4.0))
    _, _, ours = jax.jit(step(square, optimizer))(w, optimizer.init(w))
    for _ in range(5):
        _, _, ours = step(square, optimizer)(w, jax.tree.map(lambda leaf: leaf, ours))
    assert last_step(ours).new_scale == 4.0


def test_a_program_can_be_lowered_for_a_loss_scale() -> None:
    theirs = jmp.DynamicLossScale(jnp.float32(8.0))
    with pytest.raises(TypeError):
        jax.jit(lambda scale: scale.adjust(jnp.array(True))).lower(theirs)
    w, optimizer = jnp.ones(2), loss_scaled(optax.sgd(0.1))
    ours = jax.jit(step(square, optimizer)).lower(w, optimizer.init(w)).compile()
    assert last_step(ours(w, optimizer.init(w))[2]).new_scale == 2.0**16


def test_a_program_is_traced_once() -> None:
    traced = {"theirs": 0, "ours": 0}

    @jax.jit
    def theirs(scale: Any, w: Any) -> Any:
        traced["theirs"] += 1
        return scale.value_and_grad(square)(w)[0]

    @jax.jit
    def ours(state: Any, w: Any) -> Any:
        traced["ours"] += 1
        return step(square, loss_scaled(optax.sgd(0.1)))(w, state)[2]

    flaxs, mine, w = DynamicScale(), state_of(Dynamic()), jnp.ones(2)
    for _ in range(3):
        flaxs, mine = theirs(flaxs, w), ours(mine, w)
    assert traced == {"theirs": 2, "ours": 1}


def test_a_float16_loss_and_its_gradient_are_finite_at_the_first_step() -> None:
    def loss(w: Any) -> Any:
        return jnp.mean(w * w)

    w = jnp.ones(4, jnp.float16)
    _, finite, value, gradient = DynamicScale().value_and_grad(loss)(w)
    assert not finite
    assert np.isnan(value)
    assert not np.all(np.isfinite(gradient))
    value, gradient, state = value_and_grad(loss)(w, state_of(dialects.FLAX()))
    assert state.finite
    assert (float(value), gradient.tolist()) == (1.0, [0.5] * 4)


def test_arguments_can_be_given_by_name() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(w * x)

    with pytest.raises(TypeError, match="unexpected keyword argument"):
        DynamicScale().value_and_grad(loss)(jnp.ones(2), x=jnp.ones(2))
    assert value_and_grad(loss)(jnp.ones(2), state_of(Dynamic()), x=jnp.ones(2))[0] == 2.0


def test_the_scale_grows_after_exactly_the_interval() -> None:
    theirs, scales = DynamicScale(growth_interval=3), []
    for _ in range(4):
        theirs, *_ = theirs.value_and_grad(square)(jnp.ones(2))
        scales.append(float(theirs.scale))
    assert scales == [2.0**16, 2.0**16, 2.0**16, 2.0**17]
    assert grown(Dynamic(growth_interval=3), 4) == [2.0**16, 2.0**16, 2.0**17, 2.0**17]
    assert grown(dialects.FLAX(growth_interval=3), 4) == scales


def test_growth_is_bounded() -> None:
    theirs = jmp.DynamicLossScale(jnp.float32(2.0**30), period=1)
    for _ in range(5):
        theirs = theirs.adjust(jnp.array(True))
    assert float(theirs.loss_scale) == 2.0**35
    assert grown(Dynamic(init_scale=2.0**30, growth_interval=1), 5)[-1] == 2.0**32


def test_a_float16_norm_does_not_overflow_into_updates_of_zero() -> None:
    gradients = jnp.full(2, 300.0, jnp.float16)
    clip = optax.clip_by_global_norm(1.0)
    assert clip.update(gradients, clip.init(gradients))[0].tolist() == [0.0, 0.0]
    optimizer = loss_scaled(optax.sgd(1.0), Dynamic(init_scale=1.0), max_norm=1.0)
    updates, _ = optimizer.update(*handed(gradients, optimizer.init(gradients)))
    assert np.allclose(updates, -(0.5**0.5))


def test_no_number_of_overflows_lets_one_through() -> None:
    w = bad = jnp.array([1.0, jnp.nan])
    w = jnp.ones(2)
    theirs, ours = optax.apply_if_finite(optax.sgd(1.0), 2), loss_scaled(optax.sgd(1.0))
    their_state, our_state = theirs.init(w), ours.init(w)
    for _ in range(3):
        updates, their_state = theirs.update(bad, their_state, w)
        mine, our_state = ours.update(*handed(bad, our_state), w)
    assert np.isnan(updates).any()
    assert mine.tolist() == [0.0, 0.0]


def test_accumulated_gradients_recover_from_an_overflow() -> None:
    """Optax multiplies its sum by zero to empty it, and zero times infinity stays."""
    w = jnp.ones(2)
    theirs = optax.MultiSteps(optax.apply_if_finite(optax.sgd(1.0), 9), 2)
    ours = loss_scaled(optax.MultiSteps(optax.sgd(1.0), 2), Static(1.0))
    their_state, our_state = theirs.init(w), ours.init(w)
    totals = jnp.zeros((2, 2))
    for entry in (1.0, jnp.inf, 1.0, 1.0, 1.0):
        gradient = jnp.full(2, entry)
        updates, their_state = theirs.update(gradient, their_state, w)
        mine, our_state = ours.update(*handed(gradient, our_state), w)
        totals += jnp.stack([updates, mine])
    assert np.isnan(their_state.acc_grads).all()
    assert totals.tolist() == [[0.0, 0.0], [-2.0, -2.0]]
