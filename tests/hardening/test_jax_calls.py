"""`loss_scaled` and `LossScale` in any order of calls: eager or compiled, saved and loaded, and misused.

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
    LossScale,
    LossScaledState,
    ScaledGradients,
    apply_gradients,
    check_exhausted,
    last_step,
    loss_scaled,
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
        self.scale = LossScale(self.policy)
        self.model = start(self.policy)
        self.saved: Any = None

    def everything(self) -> Any:
        return bits((self.params, self.opt_state, self.scale))

    def gradients(self, factor: float) -> Any:
        scale = self.opt_state.policy_state.scale
        return ScaledGradients({"b": jnp.full(2, factor * scale), "w": jnp.full(3, scale)}, scale)

    def went(self, finite: bool, before: list[bytes]) -> None:
        """Compare with the policy after a step."""
        measured = Measured(finite, self.model.policy_state.scale)
        self.model, _ = advance(self.policy, self.model, measured)
        self.scale = self.call(self.scale.advance, finite)
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
        updates, self.opt_state = self.call(self.updated, self.gradients(factor), self.opt_state, self.params)
        self.params = optax.apply_updates(self.params, updates)
        self.went(math.isfinite(factor), before)

    @rule(factor=factors)
    def apply_eagerly(self, factor: float) -> None:
        before = self.before()
        self.params, self.opt_state = self.call(
            apply_gradients, self.optimizer, self.gradients(factor), self.opt_state, self.params
        )
        self.went(math.isfinite(factor), before)

    @rule()
    def look_whether_it_gave_up(self) -> None:
        for check, arguments in (
            (check_exhausted, (self.opt_state, self.policy)),
            (self.scale.check_exhausted, ()),
        ):
            if self.model.exhausted_overflows:
                self.refused(PreampError, check, *arguments)
            else:
                self.call(check, *arguments)

    @rule()
    def save(self) -> None:
        scale = (self.scale.state, self.scale.exhausted_scale, self.scale.exhausted_overflows)
        self.saved = pickle.dumps((self.params, self.opt_state, scale)), self.model

    @precondition(lambda self: self.saved)
    @rule()
    def load(self) -> None:
        self.params, self.opt_state, scale = pickle.loads(self.saved[0])
        self.scale, self.model = LossScale(self.policy, *scale), self.saved[1]

    # What is not

    @rule(wrong=st.sampled_from([None, {}, 3.0, (), "state", {"scale": 1.0}]))
    def give_what_is_no_state(self, wrong: Any) -> None:
        self.refused(PreampError, last_step, wrong)
        self.refused(PreampError, check_exhausted, wrong, self.policy)
        self.refused((PreampError, TypeError), self.compiled, self.params, wrong, 1.0)  # JAX takes no words
        gradients = self.gradients(1.0)
        self.refused(PreampError, self.optimizer.update, gradients, wrong, self.params)
        self.refused(PreampError, apply_gradients, self.optimizer, gradients, wrong, self.params)

    @rule()
    def swap_arguments(self) -> None:
        self.refused(PreampError, self.compiled, self.opt_state, self.params, 1.0)
        self.refused(PreampError, apply_gradients, self.optimizer, self.gradients(1.0), self.opt_state, None)

    @rule()
    def give_gradients_without_a_scale(self) -> None:
        plain = self.gradients(1.0).gradients
        self.refused(PreampError, self.updated, plain, self.opt_state, self.params)
        self.refused(PreampError, apply_gradients, self.optimizer, plain, self.opt_state, self.params)

    @rule(name=st.sampled_from(["b", "w"]), leaf=st.sampled_from([None, np.ones(7, np.float32), ...]))
    def give_gradients_that_do_not_match(self, name: str, leaf: Any) -> None:
        scaled = self.gradients(1.0)
        wrong = {**scaled.gradients, name: leaf}
        if leaf is ...:
            del wrong[name]
        given = ScaledGradients(wrong, scaled.scale)
        self.refused(PreampError, self.updated, given, self.opt_state, self.params)
        self.refused(PreampError, apply_gradients, self.optimizer, given, self.opt_state, self.params)

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
        self.refused(PreampError, LossScale, wrong)

    @rule(wrong=st.sampled_from([1.0, math.nan, np.float32(0.5), "yes", None, [True, False], 1]))
    def advance_by_what_is_no_flag(self, wrong: Any) -> None:
        self.refused(PreampError, self.scale.advance, wrong)

    @rule(wrong=st.sampled_from([5, (1.0, 2.0, 3.0), "state", {"scale": 1.0}]))
    def go_on_from_what_is_no_state(self, wrong: Any) -> None:
        self.refused(PreampError, LossScale, self.policy, wrong)

    @rule()
    def ask_inside_a_transformed_function(self) -> None:
        self.refused(PreampError, jax.eval_shape, lambda s: last_step(s) and 1.0, self.opt_state)

    # What always holds

    @invariant()
    def the_state_is_the_policys(self) -> None:
        assert isinstance(self.opt_state, LossScaledState)
        state, model = self.opt_state, self.model
        for held, scaler in ((state.policy_state, state), (self.scale.state, self.scale)):
            assert [float(number) for number in held] == list(model.policy_state)
            assert float(scaler.exhausted_scale) == model.exhausted_scale
            assert float(scaler.exhausted_overflows) == model.exhausted_overflows
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
