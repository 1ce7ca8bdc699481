"""One policy, advanced by every framework: the same numbers as on Python floats, to the last bit.

The readings of a policy that needs the amax are those that its own scales make of a drifting amax:
some are 0, and what comes with an overflow is inf, NaN or 0.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from preamp import (
    Dynamic,
    Headroom,
    Moving,
    Policy,
    Reading,
    Static,
    Tolerant,
)
from tests.originals import keras_worker
from tests.strategies import RULES, quietly

_draw = random.Random(0)
SCRIPT = "".join("1" if _draw.random() < (0.1, 0.5, 0.02, 0.0)[step // 100] else "0" for step in range(400))

# No scale of these is subnormal: XLA and TensorFlow flush subnormal numbers to 0.
BOUNDED = {"min_scale": 2.0**-20, "max_scale": 2.0**40}
DELAYED = {"compat": {"growth_delay": 1}}
SETTINGS: list[tuple[type[Policy[Any]], dict[str, Any]]] = [
    (Static, {"scale": 1000.0}),
    (Dynamic, {"growth_interval": 5}),
    (
        Dynamic,
        {"growth_interval": 3, "max_scale": 2.0**20, "compat": {"growth_delay": 2, "at_ceiling": "refuse"}},
    ),
    (Dynamic, {"growth_interval": 2, "growth_factor": 1.1, "backoff_factor": 0.7, **BOUNDED}),
    (Dynamic, {"growth_interval": 4, "hysteresis": 3, "hysteresis_reset": "growth", "max_scale": None}),
    (Dynamic, {"growth_interval": 4, "hysteresis": 2}),
    (Dynamic, {"growth_interval": 2, "init_scale": 1e-3, "min_scale": 1.0, "compat": {"bounds": "moves"}}),
    (Dynamic, {"growth_interval": 3, "growth_factor": 4.0, "compat": {"backoff_divisor": 8.0}, **BOUNDED}),
    (Tolerant, {"growth_interval": 5, "tolerance": 0.3}),
    (Tolerant, {"growth_interval": 2, "tolerance": 0.05, "growth_factor": 1.5, **BOUNDED, **DELAYED}),
]
SETTINGS += [(kind, {}) for kind in RULES.values() if kind not in dict(SETTINGS)]
OTHERS: list[tuple[type[Policy[Any]], dict[str, Any]]] = [
    (Headroom, {"margin": 2.3, "largest": 57344.0, "memory": 5, "patience": 16, **BOUNDED}),
]
WIDE = {"scale_dtype": "float64", "factor_dtype": "float64"}

# One of each kind, where a framework does not care which.
SOME = [SETTINGS[4], SETTINGS[9], (Headroom, {})]
some_policies = pytest.mark.parametrize(("make", "settings"), SOME, ids=[make.__name__ for make, _ in SOME])
each_policy = pytest.mark.parametrize(
    ("make", "settings"),
    [
        *[pytest.param(*one, id=f"{one[0].__name__}-{i}") for i, one in enumerate(SETTINGS)],
        *[
            pytest.param(*one, id=f"{one[0].__name__}-other-{i}", marks=pytest.mark.slow)
            for i, one in enumerate(OTHERS)
        ],
    ],
)

States = list[list[float]]


def read(policy: Policy[Any], scale: float, step: int) -> Reading:
    """Return what a policy reads on a step of the script, at a scale."""
    if not policy.needs_amax:
        return Reading(SCRIPT[step] == "0")
    log = 20.0 * math.sin(step / 30.0) - (45.0 if 200 < step < 260 else 0.0) + random.Random(step).gauss(0, 1)
    amax = float(np.float32(2.0**log * scale))
    if SCRIPT[step] == "1" or amax > 65504.0:
        return Reading(False, [math.inf, math.nan, 0.0][step % 3])
    return Reading(True, amax if amax >= 2.0**-24 else 0.0)


def on_floats(policy: Policy[Any]) -> tuple[list[Reading], States]:
    """Return what the policy reads, and the state after each reading."""
    readings, states, state = [], [], policy.start()
    for step in range(len(SCRIPT)):
        readings.append(read(policy, state.scale, step))
        state = policy.step(state, readings[-1])
        states.append(list(state))
    return readings, states


def rowwise(policy: Policy[Any], array: Callable[[Any], Any]) -> Reading:
    """Return all readings of a policy as one reading of arrays."""
    columns = zip(*on_floats(policy)[0], strict=True)
    return Reading(*[None if column[0] is None else array(column) for column in columns])


def by_hand(policy: Policy[Any], scalar: Callable[[float], Any], boolean: Any, where: Any) -> States:
    """Advance eagerly on the scalars of a framework; every one must stay of the type it began with."""
    states, state = [], type(policy.start())(*map(scalar, policy.start()))
    kind = [value.dtype for value in state]
    for finite, *seen in on_floats(policy)[0]:
        values = [None if value is None else scalar(value) for value in seen]
        state = policy.advance(state, Reading(boolean(finite), *values), where)
        assert [value.dtype for value in state] == kind
        states.append([float(value) for value in state])
    return states


def test_the_script_moves_every_scale_up_and_down() -> None:
    for make, settings in (*SETTINGS[1:], *OTHERS):
        scales = [scale for scale, *_ in on_floats(quietly(make, **settings))[1]]
        assert any(a < b for a, b in pairwise(scales))
        assert any(a > b for a, b in pairwise(scales))


@each_policy
def test_numpy(make: Any, settings: dict[str, Any]) -> None:
    policy = quietly(make, **settings)
    assert by_hand(policy, np.float32, np.bool_, np.where) == on_floats(policy)[1]


@some_policies
def test_torch(make: Any, settings: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")

    policy = quietly(make, **settings)
    assert by_hand(policy, torch.tensor, torch.tensor, torch.where) == on_floats(policy)[1]


@some_policies
def test_wide_numpy_and_torch(make: Any, settings: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")

    wide = {"compat": {**settings.get("compat", {}), **WIDE}} if issubclass(make, Moving) else {}
    policy = quietly(make, **{**settings, **wide})
    expected = on_floats(policy)[1]
    assert by_hand(policy, np.float64, np.bool_, np.where) == expected
    assert (
        by_hand(policy, lambda x: torch.tensor(x, dtype=torch.float64), torch.tensor, torch.where) == expected
    )


@pytest.mark.parametrize(
    ("make", "settings", "weak"), [*((*one, False) for one in SETTINGS), (*SETTINGS[4], True)]
)
def test_jax_scan_compiles_once(make: Any, settings: dict[str, Any], weak: bool) -> None:
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    policy, traced = quietly(make, **settings), 0

    def step(state: Any, reading: Reading) -> Any:
        nonlocal traced
        traced += 1
        after = policy.advance(state, reading, jnp.where)
        return after, after

    start = policy.start() if weak else jax.tree.map(jnp.float32, policy.start())
    readings = rowwise(policy, jnp.array)
    with jax.checking_leaks(), jax.numpy_dtype_promotion("strict"):
        run = jax.jit(lambda state, readings: jax.lax.scan(step, state, readings))
        last, states = run(start, readings)
        compiled = traced
        run(start, readings._replace(finite=~readings.finite))
    assert traced == compiled <= 1 + weak  # scan traces again to find the strong type of a weak carry
    assert all(value.dtype == jnp.float32 and value.shape == () for value in last)
    assert jnp.stack(states, 1).tolist() == on_floats(policy)[1]


@some_policies
def test_tensorflow_function_traces_once(make: Any, settings: dict[str, Any]) -> None:
    tf = pytest.importorskip("tensorflow")

    policy = quietly(make, **settings)
    step = tf.function(lambda state, reading: policy.advance(state, reading, tf.where))
    states, state = [], type(policy.start())(*map(tf.constant, policy.start()))
    for reading in on_floats(policy)[0]:
        state = step(state, Reading(*[None if value is None else tf.constant(value) for value in reading]))
        states.append([float(value) for value in state])
    assert step.experimental_get_tracing_count() == 1
    assert states == on_floats(policy)[1]


@some_policies
def test_keras_ops_on_jax(make: Any, settings: dict[str, Any]) -> None:
    readings, states = on_floats(quietly(make, **settings))
    assert keras_worker("jax")("policy", make.__name__, settings, readings) == states


@pytest.mark.parametrize("make", [Dynamic, Tolerant])
def test_giving_up_is_seen_inside_jit_too(make: Any) -> None:
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    policy = make(init_scale=4.0, min_scale=1.0, at_floor="raise")
    advance = jax.jit(lambda state, finite: policy.advance(state, Reading(finite), jnp.where))
    exhausted = jax.jit(lambda state, finite: policy.exhausted(state, Reading(finite), jnp.where))
    state = jax.tree.map(jnp.float32, policy.start())
    given_up = []
    for mark in "110101":
        given_up.append(bool(exhausted(state, mark == "0")))
        state = advance(state, mark == "0")
    assert given_up == [False, False, False, True, False, True]
