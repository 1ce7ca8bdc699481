"""A user's code on JAX."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax

from preamp import Dynamic, Snapshot, Step, casting
from preamp.autocasting.report import CastReport
from preamp.guards import SpikeGuard
from preamp.jax import (
    FlowSlot,
    LossScaledState,
    PendingState,
    accumulate,
    all_finite,
    apply_gradients,
    autocast,
    casts,
    check_exhausted,
    exponent_histogram,
    flow_slot,
    last_step,
    loss_scaled,
    mismatch,
    restart_guard,
    restart_loss_scale,
    snapshot,
    step,
    value_and_grad,
    watch,
    zero_grads,
)
from preamp.record.mismatch import Mismatch


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def train(w: jax.Array, x: jax.Array) -> Step | None:
    optimizer = loss_scaled(optax.adamw(1e-3), Dynamic(), max_norm=1.0, guard=SpikeGuard())
    state = optimizer.init(w)
    _, w, state = step(autocast(loss, jnp.float16), optimizer)(w, state, x)
    _, gradients, pending = value_and_grad(loss)(w, state, x)
    w, state = apply_gradients(optimizer, gradients, pending, w)
    total, pending = accumulate(zero_grads(w, state), (gradients, pending))
    w, state = apply_gradients(optimizer, total, pending, w)
    assert_type(restart_loss_scale(state, Dynamic()), LossScaledState)
    assert_type(restart_guard(state, SpikeGuard()), LossScaledState)
    assert_type(state.taken, jax.Array)
    check_exhausted(state, Dynamic())
    return last_step(state)


@autocast(dtype=jnp.bfloat16, casting=casting.JAX.float32("dot_general"))
def scores(w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ w


def keeps_the_signature(w: jax.Array) -> None:
    assert_type(autocast(loss, jnp.float16)(w, w), jax.Array)
    assert_type(scores(w, w), jax.Array)
    assert_type(casts(loss, w, w, dtype=jnp.float16), CastReport)


def measured(w: jax.Array, pending: PendingState) -> None:
    assert_type(all_finite(w), jax.Array)
    assert_type(pending.state, LossScaledState)
    assert_type(pending.finite, jax.Array)


def see(w: jax.Array) -> Snapshot:
    slot: FlowSlot = flow_slot()
    assert_type(watch(w, slot), jax.Array)
    return snapshot(exponent_histogram(w), index=3, scale=8.0, low_dtype="float16")


def measure(logp: jax.Array, drawn: np.ndarray[Any, np.dtype[np.float32]]) -> Mismatch[jax.Array]:
    measured = mismatch(logp, drawn, logp < 0.0, clip_low=0.1)
    assert_type(measured, Mismatch[jax.Array])
    assert_type(measured.k3, jax.Array)
    return measured


def named(state: LossScaledState) -> Any:
    return state.last_scale


def mistakes(w: jax.Array) -> None:
    loss_scaled(optax.adamw(1e-3), 3)  # type: ignore[arg-type]
    loss_scaled(optax.adamw(1e-3), maximum_norm=1.0)  # type: ignore[call-arg]
    loss_scaled(optax.adamw(1e-3), max_norm="1")  # type: ignore[arg-type]
    casts("loss", w)  # type: ignore[arg-type]
    casts(loss, w, casting="lower")  # type: ignore[arg-type]
    autocast(loss, jnp.float16, "table")  # type: ignore[call-overload]
    autocast(loss, jnp.float16)(w)  # type: ignore[call-arg]
    scores("w", w)  # type: ignore[arg-type]
    snapshot(w)  # type: ignore[call-arg]
    snapshot(w, index=3, what="weights")  # type: ignore[arg-type]
    value_and_grad(3)  # type: ignore[arg-type]
    mismatch([0.0], w)  # type: ignore[arg-type]
    mismatch(w, w, clip=0.2)  # type: ignore[call-arg]
