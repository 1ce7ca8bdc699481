"""One policy, advanced by every framework: the same numbers as on Python floats, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from preamp import Dynamic, Policy, Reading, Static, Tolerant

from .originals import keras_worker
from .strategies import play, quietly

_draw = random.Random(0)
SCRIPT = "".join("1" if _draw.random() < (0.1, 0.5, 0.02, 0.0)[step // 100] else "0" for step in range(400))

# No scale of these is subnormal: XLA and TensorFlow flush subnormal numbers to 0.
BOUNDED = {"min_scale": 2.0**-20, "max_scale": 2.0**40}
SETTINGS: list[tuple[type[Policy[Any]], dict[str, Any]]] = [
    (Static, {"scale": 1000.0}),
    (Dynamic, {"growth_interval": 5}),
    (Dynamic, {"growth_interval": 3, "growth_delay": 2, "max_scale": 2.0**20, "at_ceiling": "refuse"}),
    (Dynamic, {"growth_interval": 2, "growth_factor": 1.1, "backoff_factor": 0.7, **BOUNDED}),
    (Dynamic, {"growth_interval": 4, "hysteresis": 3, "hysteresis_reset": ("growth",), "max_scale": None}),
    (Dynamic, {"growth_interval": 4, "hysteresis": 2, "hysteresis_reset": ("clean", "backoff")}),
    (Dynamic, {"growth_interval": 4, "hysteresis": 2, "hysteresis_reset": ()}),
    (Dynamic, {"growth_interval": 2, "init_scale": 2.0**18, "max_scale": 65504.0, "bounds": "always"}),
    (Dynamic, {"growth_interval": 2, "init_scale": 1e-3, "min_scale": 1.0, "bounds": "moves"}),
    (Dynamic, {"growth_interval": 3, "growth_factor": 4.0, "backoff_divisor": 8.0, **BOUNDED}),
    (Tolerant, {"growth_interval": 5, "tolerance": 0.3}),
    (Tolerant, {"growth_interval": 2, "tolerance": 0.05, "growth_factor": 1.5, "growth_delay": 1, **BOUNDED}),
]
WIDE = {"scale_dtype": "float64", "factor_dtype": "float64"}

each_policy = pytest.mark.parametrize(
    ("make", "settings"), SETTINGS, ids=[f"{make.__name__}-{i}" for i, (make, _) in enumerate(SETTINGS)]
)

States = list[list[float]]


def on_floats(policy: Policy[Any]) -> States:
    states = [list(state) for state in play(policy, SCRIPT)[1:]]
    assert len(states) == len(SCRIPT)
    return states


def by_hand(policy: Policy[Any], scalar: Callable[[float], Any], boolean: Any, where: Any) -> States:
    """Advance eagerly on the scalars of a framework; every one must stay of the type it began with."""
    states, state = [], type(policy.start())(*map(scalar, policy.start()))
    kind = [value.dtype for value in state]
    for mark in SCRIPT:
        state = policy.advance(state, Reading(boolean(mark == "0")), where)
        assert [value.dtype for value in state] == kind
        states.append([float(value) for value in state])
    return states


def test_the_script_moves_every_scale_up_and_down() -> None:
    for make, settings in SETTINGS[1:]:
        scales = [scale for scale, *_ in on_floats(quietly(make, **settings))]
        assert any(a < b for a, b in pairwise(scales))
        assert any(a > b for a, b in pairwise(scales))


@each_policy
@pytest.mark.parametrize("array", [False, True])
def test_numpy(make: Any, settings: dict[str, Any], array: bool) -> None:
    import numpy as np

    policy = quietly(make, **settings)
    scalar = (lambda x: np.full((), x, np.float32)) if array else np.float32
    assert by_hand(policy, scalar, np.bool_, np.where) == on_floats(policy)


@each_policy
def test_torch(make: Any, settings: dict[str, Any]) -> None:
    import torch

    policy = quietly(make, **settings)
    assert by_hand(policy, torch.tensor, torch.tensor, torch.where) == on_floats(policy)


@each_policy
def test_wide_numpy_and_torch(make: Any, settings: dict[str, Any]) -> None:
    import numpy as np
    import torch

    policy = quietly(make, **settings, **(WIDE if make is not Static else {}))
    expected = on_floats(policy)
    assert by_hand(policy, np.float64, np.bool_, np.where) == expected
    assert (
        by_hand(policy, lambda x: torch.tensor(x, dtype=torch.float64), torch.tensor, torch.where) == expected
    )


@each_policy
@pytest.mark.parametrize("weak", [False, True])
def test_jax_scan_compiles_once(make: Any, settings: dict[str, Any], weak: bool) -> None:
    import jax
    import jax.numpy as jnp

    policy, traced = quietly(make, **settings), 0

    def step(state: Any, finite: Any) -> Any:
        nonlocal traced
        traced += 1
        after = policy.advance(state, Reading(finite), jnp.where)
        return after, after

    start = policy.start() if weak else jax.tree.map(jnp.float32, policy.start())
    finite = jnp.array([mark == "0" for mark in SCRIPT])
    with jax.checking_leaks(), jax.numpy_dtype_promotion("strict"):
        run = jax.jit(lambda state, finite: jax.lax.scan(step, state, finite))
        last, states = run(start, finite)
        compiled = traced
        run(start, ~finite)
    assert traced == compiled <= 1 + weak  # scan traces again to find the strong type of a weak carry
    assert all(value.dtype == jnp.float32 and value.shape == () for value in last)
    assert jnp.stack(states, 1).tolist() == on_floats(policy)


@each_policy
def test_tensorflow_function_traces_once(make: Any, settings: dict[str, Any]) -> None:
    import tensorflow as tf

    policy = quietly(make, **settings)
    step = tf.function(lambda state, finite: policy.advance(state, Reading(finite), tf.where))
    states, state = [], type(policy.start())(*map(tf.constant, policy.start()))
    for mark in SCRIPT:
        state = step(state, tf.constant(mark == "0"))
        states.append([float(value) for value in state])
    assert step.experimental_get_tracing_count() == 1
    assert states == on_floats(policy)


@each_policy
def test_keras_ops_on_jax(make: Any, settings: dict[str, Any]) -> None:
    states = keras_worker("jax")("policy", make.__name__, settings, SCRIPT)
    assert states == on_floats(quietly(make, **settings))


@pytest.mark.parametrize("make", [Dynamic, Tolerant])
def test_giving_up_is_seen_inside_jit_too(make: Any) -> None:
    import jax
    import jax.numpy as jnp

    policy = make(init_scale=4.0, min_scale=1.0, at_floor="raise")
    advance = jax.jit(lambda state, finite: policy.advance(state, Reading(finite), jnp.where))
    starved = jax.jit(lambda state, after, finite: policy.starved(state, after, Reading(finite), jnp.where))
    state = jax.tree.map(jnp.float32, policy.start())
    given_up = []
    for mark in "110101":
        after = advance(state, mark == "0")
        given_up.append(bool(starved(state, after, mark == "0")))
        state = after
    assert given_up == [False, False, False, True, False, True]
