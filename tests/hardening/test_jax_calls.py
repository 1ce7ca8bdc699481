"""`loss_scaled` in any order of calls: eager or compiled, saved and loaded, and misused.

Beside it stands a policy on plain floats. Nothing here is changed in place, so a refusal has to leave what it
was given usable: the next legal call shows it.
"""

from __future__ import annotations

import math
import pickle
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from preamp import Dynamic, Policy, PreampError, Tolerant
from preamp.jax import (
    LossScaledState,
    apply_gradients,
    check_exhausted,
    last_step,
    loss_scaled,
    value_and_grad,
)
from preamp.jax import step as make_step
from preamp.scaling import Measured, advance, start

from .calling import Calling, drive, drive_long

POLICIES: list[Policy[Any]] = [
    Dynamic(init_scale=2.0**10, growth_interval=2),
    Dynamic(init_scale=2.0, growth_interval=3, min_scale=0.25, hysteresis=2, hysteresis_reset="growth"),
    Dynamic(init_scale=1.0, min_scale=0.5, at_floor="raise", growth_interval=2),
    Tolerant(init_scale=2.0**12, tolerance=0.3, growth_interval=2),
]
INNER: list[Any] = [lambda: optax.sgd(0.125, momentum=0.5), lambda: optax.adamw(0.01)]
factors = st.sampled_from([1.0, 0.5, -2.0, 3.0, 1e-6, 0.0, math.inf, -math.inf, math.nan])


def loss(params: Any, factor: Any) -> Any:
    return jnp.sum(params["w"]) + factor * jnp.sum(params["b"].astype(jnp.float32))


@cache
def made(policy: int, inner: int, clips: bool) -> tuple[Any, Any, Any]:
    """Return an optimizer and its compiled step and update, which are the same for all machines."""
    optimizer = loss_scaled(INNER[inner](), POLICIES[policy], max_norm=1.0 if clips else None)
    return optimizer, jax.jit(make_step(loss, optimizer)), jax.jit(optimizer.update)


differentiate = jax.jit(value_and_grad(loss))


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


class TransformationCalls(Calling):
    """Init, update, apply and step, with what they take and what they do not take."""

    @initialize(policy=st.integers(0, 3), inner=st.integers(0, 1), clips=st.booleans())
    def make(self, policy: int, inner: int, clips: bool) -> None:
        self.policy = POLICIES[policy]
        self.optimizer, self.compiled, self.updated = made(policy, inner, clips)
        self.params = {"b": jnp.ones(2, jnp.bfloat16), "w": jnp.array([1.0, -2.0, 0.5])}
        self.opt_state = self.call(self.optimizer.init, self.params)
        self.model = start(self.policy)
        self.saved: Any = None

    def everything(self) -> Any:
        return bits((self.params, self.opt_state))

    def found(self, factor: float) -> tuple[Any, Any]:
        """Return gradients and the state of a backward pass."""
        _, gradients, pending = self.call(differentiate, self.params, self.opt_state, factor)
        return gradients, pending

    def went(self, finite: bool, before: list[bytes]) -> None:
        """Compare with the policy after a step."""
        measured = Measured(finite, self.model.policy_state.scale)
        self.model, _ = advance(self.policy, self.model, measured)
        told = last_step(self.opt_state)
        assert told is not None
        assert (told.index, told.finite, told.skipped) == (self.model.steps - 1, finite, not finite)
        assert (bits((self.params, self.opt_state.inner_state)) == before) is not finite

    def before(self) -> list[bytes]:
        return bits((self.params, self.opt_state.inner_state))

    # What is legal

    @rule(factor=factors)
    def step(self, factor: float) -> None:
        before = self.before()
        _, self.params, self.opt_state = self.call(self.compiled, self.params, self.opt_state, factor)
        self.went(math.isfinite(factor), before)

    @rule(factor=factors)
    def update(self, factor: float) -> None:
        before = self.before()
        updates, self.opt_state = self.call(self.updated, *self.found(factor), self.params)
        self.params = optax.apply_updates(self.params, updates)
        self.went(math.isfinite(factor), before)

    @rule(factor=factors)
    def apply_eagerly(self, factor: float) -> None:
        before = self.before()
        self.params, self.opt_state = self.call(
            apply_gradients, self.optimizer, *self.found(factor), self.params
        )
        self.went(math.isfinite(factor), before)

    @rule()
    def look_whether_it_gave_up(self) -> None:
        if self.model.exhausted_overflows:
            self.refused(PreampError, check_exhausted, self.opt_state, self.policy)
        else:
            self.call(check_exhausted, self.opt_state, self.policy)

    @rule()
    def save(self) -> None:
        self.saved = pickle.dumps((self.params, self.opt_state)), self.model

    @precondition(lambda self: self.saved)
    @rule()
    def load(self) -> None:
        (self.params, self.opt_state), self.model = pickle.loads(self.saved[0]), self.saved[1]

    # What is not

    @rule(wrong=st.sampled_from([None, {}, 3.0, (), "state", {"scale": 1.0}]))
    def give_what_is_no_state(self, wrong: Any) -> None:
        self.refused(PreampError, last_step, wrong)
        self.refused(PreampError, check_exhausted, wrong, self.policy)
        self.refused((PreampError, TypeError), self.compiled, self.params, wrong, 1.0)  # JAX takes no words
        gradients, _ = self.found(1.0)
        self.refused(PreampError, value_and_grad(loss), self.params, wrong, 1.0)
        self.refused(PreampError, self.optimizer.update, gradients, wrong, self.params)
        self.refused(PreampError, apply_gradients, self.optimizer, gradients, wrong, self.params)

    @rule()
    def swap_arguments(self) -> None:
        self.refused(PreampError, self.compiled, self.opt_state, self.params, 1.0)
        self.refused(PreampError, apply_gradients, self.optimizer, *self.found(1.0), None)

    @rule()
    def leave_out_the_backward_pass_or_the_update(self) -> None:
        gradients, pending = self.found(1.0)
        self.refused(PreampError, self.updated, gradients, self.opt_state, self.params)
        self.refused(PreampError, apply_gradients, self.optimizer, gradients, self.opt_state, self.params)
        self.refused(PreampError, differentiate, self.params, pending, 1.0)
        self.refused(PreampError, self.compiled, self.params, pending, 1.0)

    @rule(name=st.sampled_from(["b", "w"]), leaf=st.sampled_from([None, np.ones(7, np.float32), ...]))
    def give_gradients_that_do_not_match(self, name: str, leaf: Any) -> None:
        gradients, pending = self.found(1.0)
        wrong = {**gradients, name: leaf}
        if leaf is ...:
            del wrong[name]
        self.refused(PreampError, self.updated, wrong, pending, self.params)
        self.refused(PreampError, apply_gradients, self.optimizer, wrong, pending, self.params)

    @rule()
    def wrap_twice(self) -> None:
        self.refused(PreampError, loss_scaled(self.optimizer).init, self.params)
        twice = {"a": self.opt_state, "b": self.opt_state}
        self.refused(PreampError, last_step, twice)

    @rule(wrong=st.sampled_from([0, -1.0, math.nan, "1", True]))
    def clip_to_what_is_no_norm(self, wrong: Any) -> None:
        self.refused(PreampError, loss_scaled, optax.sgd(0.1), max_norm=wrong)

    @rule(wrong=st.sampled_from([None, 5, "adam", optax.sgd, object()]))
    def wrap_what_is_no_transformation(self, wrong: Any) -> None:
        self.refused(PreampError, loss_scaled, wrong)

    @rule(wrong=st.sampled_from([5, "dynamic", Dynamic, [1.0]]))
    def scale_by_what_is_no_policy(self, wrong: Any) -> None:
        self.refused(PreampError, loss_scaled, optax.sgd(0.1), wrong)

    @rule()
    def ask_inside_a_transformed_function(self) -> None:
        self.refused(PreampError, jax.eval_shape, lambda s: last_step(s) and 1.0, self.opt_state)

    # What always holds

    @invariant()
    def the_state_is_the_policys(self) -> None:
        assert isinstance(self.opt_state, LossScaledState)
        state, model = self.opt_state, self.model
        assert [float(number) for number in state.policy_state] == list(model.policy_state)
        assert float(state.exhausted_scale) == model.exhausted_scale
        assert float(state.exhausted_overflows) == model.exhausted_overflows
        assert (int(state.steps), int(state.skipped_steps)) == (model.steps, model.skipped_steps)

    @invariant()
    def parameters_are_finite(self) -> None:
        assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(self.params))
        assert self.params["b"].dtype == jnp.bfloat16


def test_no_order_of_calls_harms_parameters_or_scale() -> None:
    drive(TransformationCalls, 3, 20)


@pytest.mark.slow
def test_no_order_of_calls_harms_parameters_or_scale_in_the_long_run() -> None:
    drive_long(TransformationCalls)
