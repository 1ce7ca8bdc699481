"""One guard, advanced by every framework: the same decisions as on Python floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import Reading, guards
from preamp.guards.base import dump_state, leaves_of, map_state
from preamp.guards.windows import Window, empty, mean_and_std, push
from preamp.policy import choose

GUARDS = {
    "spike": guards.SpikeGuard(),
    "spike-quick": guards.SpikeGuard(sigmas=4.0, warmup=4, patience=3),
    "norm": guards.NormLimit(3.0),
    "olmo": guards.OLMO(rolling_interval_length=24),
    "levanter": guards.LEVANTER(rolling_interval_length=16),
    "maxtext": guards.MAXTEXT(interval=7, scaling_factor=4.0),
    "megatron": guards.MEGATRON_NORM(3.0),
}
each_guard = pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)


def script() -> list[Reading]:
    """Return readings that float32 holds: a fall, spikes, runs of them, a new level, NaN and overflows."""
    rng = np.random.default_rng(11)
    readings = []
    for step in range(260):
        loss = 2.0 + 3.0 * math.exp(-step / 20.0) + 0.05 * rng.normal()
        norm = float(np.exp(0.2 * rng.normal()))
        if step >= 190:
            loss, norm = 1.8 * loss, 2.1 * norm
        if step % 37 == 36 or 120 <= step < 126:
            loss, norm = 9.0 * loss, 11.0 * norm
        finite = step < 100 or step % 53 != 52
        if (step >= 100 and step % 91 == 90) or not finite:
            loss, norm = math.nan, math.nan
        readings.append(Reading(finite, loss=float(np.float32(loss)), grad_norm=float(np.float32(norm))))
    return readings


def on_floats(guard: guards.Guard[Any]) -> tuple[list[bool], list[Any]]:
    """Return whether each step is taken, and the last state, in Python floats."""
    taken, state = [], guard.start()
    for reading in script():
        known = reading if reading.finite else reading._replace(grad_norm=None)
        taken.append(bool(reading.finite and guard.takes(state, known)))
        state = guard.advance(state, reading)
    return taken, [value for _, value in leaves_of(state)]


def close(found: list[Any], expected: list[Any]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(np.allclose(np.asarray(a), b, rtol=1e-3, equal_nan=True) for a, b in pairs)


def ages_aside(state: Any) -> list[Any]:
    """Return the leaves of a state, each window oldest first, as on the host."""
    found: list[Any] = []
    for value in state:
        if isinstance(value, Window):
            found += host(value)
        elif hasattr(value, "_fields"):
            found += ages_aside(value)
        else:
            found.append(np.asarray(value))
    return found


def host(window: Window) -> list[Any]:
    """Return a window as numbers, oldest first; in frameworks the ages say where that is."""
    order = np.argsort(-np.asarray(window.ages))
    return [np.asarray(window.values)[order], np.asarray(window.ages)[order], np.asarray(window.known)]


@each_guard
def test_the_script_has_steps_of_both_kinds(guard: guards.Guard[Any]) -> None:
    taken = on_floats(guard)[0]
    assert any(taken)
    assert any(reading.finite and not was for reading, was in zip(script(), taken, strict=True))


def by_hand(
    guard: guards.Guard[Any], array: Callable[[Any], Any], boolean: Any, where: Any
) -> tuple[list[bool], list[Any]]:
    """Advance eagerly on the scalars and vectors of a framework; each keeps its type and shape."""
    state, taken = map_state(array, guard.start()), []
    kinds = [(value.dtype, value.shape) for _, value in leaves_of(state)]
    for reading in script():
        given = Reading(boolean(reading.finite), loss=array(reading.loss), grad_norm=array(reading.grad_norm))
        taken.append(bool(reading.finite) and bool(guard.takes(state, given, where)))
        state = guard.advance(state, given, where)
        assert [(value.dtype, value.shape) for _, value in leaves_of(state)] == kinds
    return taken, ages_aside(state)


@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "value"),
    [("olmo", 1e36), ("levanter", 1e20), ("maxtext", 1e25), ("spike", 1e18), ("spike", 1e36)],
)
def test_values_whose_squares_exceed_float32_are_judged_as_in_float64(name: str, value: float) -> None:
    guard, rng = GUARDS[name], np.random.default_rng(0)
    norms = np.exp(0.1 * rng.normal(size=300)).astype(np.float32)
    norms[[90, 91, 150, 201]] = value
    norms[200] = 40.0
    taken: dict[Any, list[bool]] = {np.float32: [], np.float64: []}
    for dtype, decided in taken.items():
        state = map_state(lambda entry, dtype=dtype: np.asarray(entry, dtype), guard.start())
        for norm in norms:
            reading = Reading(np.bool_(True), loss=dtype(1.0), grad_norm=dtype(norm))
            decided.append(bool(guard.takes(state, reading, np.where)))
            state = guard.advance(state, reading, np.where)
    assert taken[np.float32] == taken[np.float64]
    assert not taken[np.float32][90]


@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning")
@each_guard
def test_numpy(guard: guards.Guard[Any]) -> None:
    def where(condition: Any, yes: Any, no: Any) -> Any:
        """NumPy's `where`; its operators make numbers of 0-dim arrays, so this makes arrays again."""
        chosen = np.where(condition, yes, no)
        return chosen if chosen.dtype == bool else np.asarray(chosen, "float32")

    taken, state = by_hand(guard, lambda x: np.asarray(x, "float32"), np.bool_, where)
    assert taken == on_floats(guard)[0]
    assert close(state, on_floats(guard)[1])


@each_guard
def test_torch(guard: guards.Guard[Any]) -> None:
    torch = pytest.importorskip("torch")

    taken, state = by_hand(guard, torch.tensor, torch.tensor, torch.where)
    assert taken == on_floats(guard)[0]
    assert close(state, on_floats(guard)[1])


@each_guard
def test_jax_scan(guard: guards.Guard[Any]) -> None:
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    def step(state: Any, reading: Reading) -> Any:
        taken = jnp.where(reading.finite, guard.takes(state, reading, jnp.where), False)
        return guard.advance(state, reading, jnp.where), taken

    columns = Reading(*zip(*script(), strict=True))
    readings = Reading(*[None if None in column else jnp.array(column) for column in columns])
    start = map_state(jnp.float32, guard.start())
    with jax.checking_leaks(), jax.numpy_dtype_promotion("strict"):
        state, taken = jax.jit(lambda state, readings: jax.lax.scan(step, state, readings))(start, readings)
    assert taken.tolist() == on_floats(guard)[0]
    assert close(ages_aside(state), on_floats(guard)[1])


@pytest.mark.parametrize("guard", [GUARDS["spike-quick"], GUARDS["olmo"]], ids=repr)
def test_tensorflow_function_traces_once(guard: guards.Guard[Any]) -> None:
    tf = pytest.importorskip("tensorflow")

    def both(state: Any, reading: Reading) -> Any:
        return guard.takes(state, reading, tf.where), guard.advance(state, reading, tf.where)

    step = tf.function(both)
    state, taken = map_state(lambda x: tf.constant(x, tf.float32), guard.start()), []
    for reading in script():
        finite, _, loss, norm = reading
        given = Reading(tf.constant(finite), loss=tf.constant(loss), grad_norm=tf.constant(norm))
        fits, state = step(state, given)
        taken.append(finite and bool(fits))
    assert step.experimental_get_tracing_count() == 1
    assert taken == on_floats(guard)[0]
    assert close(ages_aside(state), on_floats(guard)[1])


@each_guard
def test_a_state_that_was_saved_goes_on(guard: guards.Guard[Any]) -> None:
    readings = [reading for reading in script() if reading.finite]
    state = guard.start()
    for reading in readings[:100]:
        state = guard.advance(state, reading)
    again = guard.restore(dump_state(state))
    # NaN may be in a window, and is not equal to itself.
    assert repr(again) == repr(state)
    assert type(again) is type(state)
    for reading in readings[100:]:
        assert guard.takes(state, reading) == guard.takes(again, reading)
        state, again = guard.advance(state, reading), guard.advance(again, reading)


def test_a_window_that_a_framework_saved_goes_on_the_host() -> None:
    torch = pytest.importorskip("torch")

    guard = GUARDS["levanter"]
    readings = [reading for reading in script() if reading.finite]
    state = map_state(torch.tensor, guard.start())
    for reading in readings[:101]:
        given = Reading(torch.tensor(True), loss=torch.tensor(reading.loss), grad_norm=torch.tensor(1.0))
        state = guard.advance(state, given, torch.where)
    saved = dump_state(map_state(lambda leaf: tuple(leaf.tolist()) if leaf.ndim else leaf.item(), state))
    host_state, expected = guard.restore(saved), guard.start()
    for reading in readings[:101]:
        expected = guard.advance(expected, Reading(True, loss=reading.loss, grad_norm=1.0))
    for reading in readings[101:]:
        given = Reading(True, loss=reading.loss, grad_norm=1.0)
        assert guard.takes(host_state, given) == guard.takes(expected, given)
        host_state, expected = guard.advance(host_state, given), guard.advance(expected, given)


EXACT = st.integers(-64, 64).map(lambda n: n / 8.0)  # sums of these are exact in float32


@settings(deadline=None, max_examples=25)
@given(size=st.integers(2, 9), values=st.lists(EXACT, max_size=24))
@pytest.mark.parametrize("unbiased", [False, True])
def test_a_window_is_the_last_values(unbiased: bool, size: int, values: list[float]) -> None:
    vector = Window(*[np.asarray(part) for part in empty(size)])
    tuples, plain = empty(size), list[float]()
    for value in values:
        tuples, vector = push(tuples, value, choose), push(vector, value, np.where)
        plain = [*plain, value][-size:]
    assert tuples.known == vector.known == len(plain)
    assert host(vector)[0].tolist() == list(tuples.values)
    assert list(tuples.values) == [0.0] * (size - len(plain)) + plain
    with np.errstate(all="ignore"):
        found = [mean_and_std(tuples, choose, unbiased=unbiased)]
        found += [mean_and_std(vector, np.where, unbiased=unbiased)]
    if len(plain) >= (2 if unbiased else 1):
        expected = [np.mean(plain), np.std(plain, ddof=int(unbiased))]
        assert np.allclose(found, [expected, expected], atol=1e-12)
    else:
        assert np.isnan(found).any(axis=1).all()
