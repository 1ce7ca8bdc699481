"""The state of `loss_scaled`: what it tells, how it is exported and resumed, how a wrong one is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest

from preamp import Dynamic, Headroom, PolicyError, Static, Tolerant, UsageError
from preamp.jax import (
    PendingState,
    apply_gradients,
    check_exhausted,
    last_step,
    loss_scaled,
    restart_loss_scale,
    step,
    value_and_grad,
)
from preamp.policy import Policy

from .trainings import batches, handed, identical, loss, parameters, shard_map

POLICY = Dynamic(init_scale=2.0**10, growth_interval=2)
POLICIES: list[Policy[Any]] = [POLICY, Headroom(), Tolerant(), Static(8.0)]
OPTIMIZER = loss_scaled(optax.adam(0.05), POLICY)
PARAMS = parameters()
X = next(batches())[0]


def trained(optimizer: Any = OPTIMIZER, script: str = "0010") -> tuple[Any, Any]:
    params, state, train = PARAMS, optimizer.init(PARAMS), jax.jit(step(loss, optimizer))
    for x, _ in batches(script):
        _, params, state = train(params, state, x)
    return params, state


# What it tells


@pytest.mark.parametrize("policy", [Headroom(), Tolerant()], ids=repr)
def test_every_name_in_the_state_is_found_once(policy: Policy[Any]) -> None:
    """`optax.tree.get` refuses a name that two leaves have."""
    state = loss_scaled(optax.adamw(0.05), policy).init(PARAMS)
    for name in (*state.policy_state._fields, *state._fields):
        assert optax.tree.get(state, name, "missing") is not "missing"  # noqa: F632
    assert optax.tree.get(state, "scale") is state.policy_state.scale


def test_every_way_to_take_a_step_tells_the_loss() -> None:
    optimizer = loss_scaled(optax.sgd(0.1), POLICY)
    state, train = optimizer.init(PARAMS), jax.jit(step(loss, optimizer))
    for x, overflowed in batches("01"):
        value, _, state = train(PARAMS, state, x)
        told = last_step(state).loss
        assert np.array_equal(told, value, equal_nan=True)
        assert np.isfinite(told) is np.bool_(not overflowed)
    value, *found = value_and_grad(loss)(PARAMS, state, X)
    assert last_step(optimizer.update(*found, PARAMS)[1]).loss == value
    assert last_step(apply_gradients(optimizer, *found, PARAMS)[1]).loss == value


@pytest.mark.parametrize("true", [float("-inf"), float("nan"), -3e38])
def test_a_loss_is_told_whatever_it_is(true: float) -> None:
    def diverged(params: Any) -> Any:
        return jnp.sum(params["w"]) * 0.0 + true

    def train(params: Any, state: Any) -> Any:
        _, *found = value_and_grad(diverged)(params, state)
        return apply_gradients(OPTIMIZER, *found, params)

    for run in (step(diverged, OPTIMIZER), train):
        *_, state = jax.jit(run)(PARAMS, OPTIMIZER.init(PARAMS))
        assert np.array_equal(last_step(state).loss, np.float32(true), equal_nan=True)


@pytest.mark.parametrize("checked", [True, False])
def test_the_loss_of_devices_without_an_axis_name_is_their_mean(checked: bool) -> None:
    """Parameters are equal on all devices, examples are not: JAX has summed the gradients."""
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("d",))
    split, whole = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()

    def train(params: Any, state: Any, x: Any) -> Any:
        value, params, state = step(loss, OPTIMIZER, axis_name=())(params, state, x)
        return value[None], params, state

    run = jax.jit(shard_map(train, mesh, (whole, whole, split), (split, whole, whole), checked))
    values, _, state = run(PARAMS, OPTIMIZER.init(PARAMS), X)
    expected = values.mean() if checked else values[0]
    if not checked:  # each device has its own
        state = jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, state)
    assert last_step(state).loss == pytest.approx(float(expected), rel=1e-6)


# In other programs, and with other policies


@pytest.mark.parametrize(
    ("before", "after"), [*zip(POLICIES, [*POLICIES[1:], POLICY], strict=True)], ids=repr
)
def test_a_training_resumes_with_another_policy(before: Policy[Any], after: Policy[Any]) -> None:
    inner = optax.adam(0.05)
    params, state = trained(loss_scaled(inner, before), "00")
    resumed = restart_loss_scale(state, after)
    assert identical(resumed.inner_state, state.inner_state)
    assert (int(resumed.steps), int(resumed.skipped_steps)) == (2, int(state.skipped_steps))
    assert [float(number) for number in resumed.policy_state] == [*after.start()]
    assert jax.tree.structure(resumed) == jax.tree.structure(loss_scaled(inner, after).init(params))
    _, _, state = step(loss, loss_scaled(inner, after))(params, resumed, X)
    assert last_step(state).index == 2


def test_resuming_with_another_policy_without_that_line_names_it() -> None:
    params, state = trained()
    for policy in (Headroom(), Tolerant()):
        train = jax.jit(step(loss, loss_scaled(optax.adam(0.05), policy)))
        with pytest.raises(
            UsageError, match=r"made by another policy.*restart_loss_scale\(opt_state, policy\)"
        ):
            train(params, state, X)


# What is said of a wrong one


@pytest.mark.parametrize("limit", [float("inf"), jnp.array(jnp.inf)])
def test_an_infinite_limit_clips_nothing(limit: Any) -> None:
    state = OPTIMIZER.init(PARAMS)
    ours, theirs = (
        step(loss, loss_scaled(optax.adam(0.05), POLICY, max_norm=number))(PARAMS, state, X)[1]
        for number in (limit, None)
    )
    assert identical(ours, theirs)


def test_a_limit_that_is_traced_is_refused() -> None:
    with pytest.raises(PolicyError, match="max_norm is a value that JAX is tracing"):
        jax.jit(lambda limit: loss_scaled(optax.sgd(0.1), max_norm=limit) and 0)(1.0)


def found(state: Any, **changed: Any) -> tuple[Any, PendingState]:
    """Return what a backward pass found for the parameters with these changes."""
    return handed({name: leaf for name, leaf in {**PARAMS, **changed}.items() if leaf is not ...}, state)


WRONG_GRADIENTS = {
    "missing": (..., r"the gradients have no leaf \['w'\], but params\['w'\] has shape \(6, 4\)"),
    "None": (None, r"the gradients\['w'\] are None, but params\['w'\] has shape \(6, 4\)"),
    "shape": (
        jnp.ones((4, 6)),
        r"the gradients\['w'\] have shape \(4, 6\), but params\['w'\] has shape \(6, 4\)",
    ),
    "scalar": (jnp.ones(()), r"the gradients\['w'\] have shape \(\)"),
}


@pytest.mark.parametrize("case", WRONG_GRADIENTS)
def test_a_gradient_that_does_not_match_is_named(case: str) -> None:
    leaf, message = WRONG_GRADIENTS[case]
    state = OPTIMIZER.init(PARAMS)
    for call in (OPTIMIZER.update, lambda *args: apply_gradients(OPTIMIZER, *args)):
        with pytest.raises(UsageError, match=message):
            jax.jit(call)(*found(state, w=leaf), PARAMS)
    with pytest.raises(UsageError, match=r"gradients have a leaf \['extra'\], and the parameters have none"):
        OPTIMIZER.update(*found(state, extra=jnp.ones(2)), PARAMS)


def test_a_gradient_of_none_where_the_parameter_is_none_is_right() -> None:
    params = {**PARAMS, "frozen": None}
    after, _ = apply_gradients(OPTIMIZER, *found(OPTIMIZER.init(params), frozen=None), params)
    assert after["frozen"] is None


WRONG_PARAMETERS: dict[str, tuple[Any, str]] = {
    "missing": ({"w": PARAMS["w"]}, r"inner_state\[0\]\.mu\['b'\] is of shape \(4,\).*must be missing"),
    "more": (
        {**PARAMS, "c": jnp.ones(2)},
        r"inner_state\[0\]\.mu\['c'\] is missing.*must be of shape \(2,\)",
    ),
    "shape": (
        {**PARAMS, "b": jnp.ones((1, 4))},
        r"mu\['b'\] is of shape \(4,\).*must be of shape \(1, 4\)",
    ),
}


@pytest.mark.parametrize("case", WRONG_PARAMETERS)
def test_parameters_that_are_not_those_of_the_state_are_named(case: str) -> None:
    params, message = WRONG_PARAMETERS[case]
    _, state = trained()
    train = step(lambda p, x: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(p)) * jnp.mean(x), OPTIMIZER)
    with pytest.raises(UsageError, match=rf"opt_state\.{message}|{message}"):
        jax.jit(train)(params, state, X)


def untyped(state: Any, folder: Path) -> Any:
    """Return a state as orbax restores it without a template."""
    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        return checkpointer.restore(folder / "state")


def pending(state: Any) -> PendingState:
    """Return a backward pass that began at what may be no state."""
    return found(OPTIMIZER.init(PARAMS))[1]._replace(state=state)


ASKS: dict[str, Callable[[Any], Any]] = {
    "last_step": last_step,
    "check_exhausted": lambda state: check_exhausted(state, POLICY),
    "step": lambda state: step(loss, OPTIMIZER)(PARAMS, state, X),
    "compiled step": lambda state: jax.jit(step(loss, OPTIMIZER))(PARAMS, state, X),
    "value_and_grad": lambda state: value_and_grad(loss)(PARAMS, state, X),
    "update": lambda state: OPTIMIZER.update(PARAMS, pending(state), PARAMS),
    "apply_gradients": lambda state: apply_gradients(OPTIMIZER, PARAMS, pending(state), PARAMS),
    "restart_loss_scale": lambda state: restart_loss_scale(state, POLICY),
}
each_ask = pytest.mark.parametrize("ask", ASKS)


@each_ask
def test_no_state_is_said_to_be_none(ask: str) -> None:
    with pytest.raises(UsageError, match=r"opt_state=None.*Write opt_state = optimizer\.init\(params\)"):
        ASKS[ask](None)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_a_state_without_its_types_is_told_from_others(tmp_path: Path) -> None:
    _, state = trained()
    restored = untyped(state, tmp_path)
    for ask in ASKS.values():
        with pytest.raises(
            UsageError, match=r"is a dict with the keys.*orbax restores without a template.*Write"
        ):
            ask(restored)
    partly = state._replace(inner_state=restored["inner_state"])
    with pytest.raises(UsageError, match=r"opt_state\.inner_state\[0\]\.count is missing.*lost its types"):
        ASKS["step"](partly)
    partly = state._replace(policy_state=restored["policy_state"])
    with pytest.raises(UsageError, match=r"in opt_state, a dict, is not that of.*has lost the types"):
        ASKS["update"](partly)


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        *((ask, "policy_state.scale") for ask in ASKS),
        ("step", "last_scale"),
        ("last_step", "steps"),
        ("update", "loss"),
    ],
)
def test_a_leaf_that_is_none_is_named(ask: str, name: str) -> None:
    _, state = trained()
    policy_state = state.policy_state
    if name == "policy_state.scale":
        wrong = state._replace(policy_state=policy_state._replace(scale=None))
    else:
        wrong = state._replace(**{name: None})
    with pytest.raises(UsageError, match=rf"opt_state\.{re.escape(name)} is None, not an array"):
        ASKS[ask](wrong)


@pytest.mark.parametrize("ask", ["compiled step", "update"])
def test_the_state_of_several_devices_is_refused_by_its_shape(ask: str) -> None:
    _, state = trained()
    several = state._replace(steps=jnp.stack([state.steps] * 2))
    with pytest.raises(UsageError, match=r"opt_state\.steps has shape \(2,\) and must be a scalar"):
        ASKS[ask](several)
