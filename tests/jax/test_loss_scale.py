"""A loss scale is a tree: it moves as the core's policy does, transformed or not, and is saved whole."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from preamp import (
    Dynamic,
    Headroom,
    Policy,
    Reading,
    ScaleExhausted,
    Static,
    Tolerant,
    dialects,
)
from preamp.jax import LossScale, all_finite, scaled_value_and_grad, value_and_grad
from tests.strategies import dynamics, play, quietly, scripts, statics, tolerants

FLOATS = ("float16", "bfloat16", "float32")
# With these the compiled program rounds nothing: an inexact factor is another number in the last bit.
EXACT: dict[str, Any] = {
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "backoff_divisor": None,
    "scale_dtype": "float32",
    "factor_dtype": "float32",
}


def accepting_a_quarter(policy: Tolerant) -> Tolerant:
    return quietly(Tolerant, **{**policy.get_config(), "tolerance": 0.25})


policies: st.SearchStrategy[Policy[Any]] = (
    statics | dynamics(**EXACT) | tolerants(**EXACT).map(accepting_a_quarter)
)


def finite(script: str) -> jax.Array:
    return jnp.array([mark == "0" for mark in script], bool)


@jax.jit
def walk(scale: LossScale, finites: jax.Array) -> tuple[LossScale, Any]:
    """Return the loss scale after a walk, and the state after each step of it."""

    def advance(scale: LossScale, finite: jax.Array) -> tuple[LossScale, Any]:
        after = scale.advance(finite)
        return after, after.state

    return jax.lax.scan(advance, scale, finites)


def numbers(states: Any) -> list[list[float]]:
    """Return the states of a walk, in the order of the steps."""
    return np.stack(jax.tree.leaves(states), -1).tolist()


def by_the_core(policy: Policy[Any], script: str, state: Any = None) -> tuple[list[list[float]], Any]:
    """Return the state before each step and after the last, and why the policy gave up, if it did."""
    states = play(policy, script, state)
    error = None
    if len(states) <= len(script):
        with pytest.raises(ScaleExhausted) as caught:
            policy.step(states[-1], Reading(False))
        error = caught.value
    return [list(map(float, state)) for state in states], error


def assert_walks_as_the_core(policy: Policy[Any], script: str) -> None:
    expected, error = by_the_core(policy, script)
    if error is None:
        last, states = walk(LossScale(policy), finite(script))
        assert numbers(states) == expected[1:]
        last.check_exhausted()
        return
    last, states = walk(LossScale(policy), finite(script[: len(expected)]))
    assert numbers(states) == [*expected[1:], expected[-1]]  # it stays where it is
    with pytest.raises(ScaleExhausted) as caught:
        last.check_exhausted()
    assert str(caught.value) == str(error)
    assert (caught.value.scale, caught.value.overflows) == (error.scale, error.overflows)


@settings(max_examples=25, deadline=None)
@given(policies, scripts.filter(bool))
def test_every_policy_moves_as_on_python_floats(policy: Policy[Any], script: str) -> None:
    scales = [scale for scale, *_ in play(policy, script)]
    assume(all(2.0**-126 <= scale < float("inf") for scale in scales))  # XLA flushes smaller ones to 0
    assert_walks_as_the_core(policy, script)


@pytest.mark.parametrize("name", dialects.ALL)
def test_every_dialect_moves_as_the_core_in_an_ensemble_of_compiled_walks(name: str) -> None:
    dialect = dialects.ALL[name]
    near_growth = float(max(getattr(dialect.policy, "growth_interval", 2) - 2, 0))
    start = dialect.start()._replace(good=near_growth)
    together = ["0000110100", "1111011011", "0100001000"]
    begin = LossScale(dialect, jax.tree.map(jnp.float32, start))
    _, states = jax.jit(jax.vmap(walk, (None, 0)))(begin, jnp.stack([finite(script) for script in together]))
    for number, script in enumerate(together):
        expected, _ = by_the_core(dialect, script, start)
        mine = numbers(jax.tree.map(lambda state, number=number: state[number], states))
        assert mine[: len(expected) - 1] == expected[1:]


GIVE_UP = [
    Dynamic(init_scale=4.0, min_scale=1.0, at_floor="raise"),
    Tolerant(init_scale=4.0, min_scale=1.0, at_floor="raise", tolerance=0.5),
    dialects.DEEPSPEED(init_scale=4.0, min_scale=1.0),
]


@pytest.mark.parametrize("policy", GIVE_UP, ids=repr)
def test_a_policy_gives_up_with_the_words_of_the_core(policy: Policy[Any]) -> None:
    assert by_the_core(policy, "0" + "1" * 9)[1] is not None
    assert_walks_as_the_core(policy, "0" + "1" * 9)


def test_check_exhausted_names_the_scale_at_which_the_policy_gave_up_first() -> None:
    scale = LossScale(Dynamic(init_scale=8.0, growth_interval=1, min_scale=4.0, at_floor="raise"))
    last, _ = walk(scale, finite("110001111"))
    with pytest.raises(ScaleExhausted, match=r"overflowed at a loss scale of 4 \(2 overflows counted\)"):
        last.check_exhausted()


@pytest.mark.parametrize("policy", [Static(8.0), Headroom()], ids=repr)
def test_a_loss_scale_survives_every_way_through_a_tree_and_back(policy: Policy[Any]) -> None:
    scale = LossScale(policy).advance(Reading(False, peak=np.inf)).advance(Reading(True, peak=2.0))
    leaves, structure = jax.tree.flatten(scale)
    paths, _ = jax.tree_util.tree_flatten_with_path(scale)
    for copy in (
        jax.tree.unflatten(structure, leaves),
        jax.tree.map(lambda leaf: leaf, scale),
        jax.jit(lambda scale: scale)(scale),
        pickle.loads(pickle.dumps(scale)),
        jax.tree.unflatten(structure, [leaf for _, leaf in paths]),
    ):
        assert copy.policy == scale.policy
        assert jax.tree.leaves(copy) == leaves
        assert jax.tree.structure(copy) == structure
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    fields = [f"state.{field}" for field in policy.start()._fields]
    assert names == [f".{field}" for field in (*fields, "exhausted_scale", "exhausted_overflows")]
    assert {(leaf.dtype.name, leaf.shape, leaf.weak_type) for leaf in leaves} == {("float32", (), False)}


def test_leaves_may_be_anything_while_jax_looks_at_the_tree() -> None:
    nothing = jax.tree.map(lambda _: None, LossScale())
    assert nothing.exhausted_scale is None
    assert jax.tree.leaves(nothing) == []
    assert set(jax.tree.leaves(jax.tree.map(lambda _: "x", LossScale()))) == {"x"}


@pytest.mark.parametrize("dtype", FLOATS)
def test_scaling_is_undone_by_unscaling_and_neither_overflows(dtype: str) -> None:
    scale = LossScale(Static(2.0**20))
    tree = {"x": jnp.array([1.5, -3.0], dtype), "n": jnp.int32(3), "nothing": None}
    scaled = scale.scale(tree)
    assert scaled["x"].tolist() == [1.5 * 2**20, -3.0 * 2**20]
    unscaled = scale.unscale(scaled)
    assert unscaled["x"].dtype == jnp.float32
    assert unscaled["x"].tolist() == [1.5, -3.0]
    assert unscaled["n"] is tree["n"]


@pytest.mark.parametrize(
    ("bad", "dtype"),
    [
        (np.nan, "float16"),
        (np.inf, "float16"),
        (-np.inf, "bfloat16"),
        (np.inf, "float32"),
        (np.nan, "complex64"),
    ],
)
def test_all_finite_sees_one_entry_that_is_not(bad: float, dtype: str) -> None:
    good = {"x": jnp.ones((3, 2), dtype), "n": jnp.int32(7), "empty": jnp.zeros((0, 2), dtype), "none": None}
    assert all_finite(good)
    assert not all_finite({**good, "x": good["x"].at[2, 1].set(bad)})
    assert all_finite({})
    assert all_finite(None)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-100, 100, width=16), min_size=1, max_size=5), st.integers(-14, 32))
def test_gradients_are_those_of_jax_at_any_scale(entries: list[float], exponent: int) -> None:
    w = jnp.array(entries, jnp.float32)
    value, gradient = jax.value_and_grad(lambda w: jnp.sum(w * w * 0.5))(w)
    ours, mine, reading = value_and_grad(lambda w: jnp.sum(w * w * 0.5))(LossScale(Static(2.0**exponent)), w)
    assert ours == value
    assert mine.tolist() == gradient.tolist()
    assert reading.finite


@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [("float16", -30), ("float16", 15), ("float16", 16), ("bfloat16", 60), ("float32", 60)],
)
def test_a_loss_of_any_dtype_has_exact_gradients_at_any_scale(dtype: str, exponent: int) -> None:
    """The seed is in the dtype of the loss: what that cannot hold of the scale is multiplied later."""
    scale = LossScale(Static(2.0**exponent))
    value, gradient, reading = value_and_grad(lambda w: (w * w).sum())(scale, jnp.array([0.5, -0.25], dtype))
    assert (value.dtype, gradient.dtype) == (dtype, jnp.float32)
    assert float(value) == 0.3125
    assert reading.finite
    assert gradient.tolist() == [1.0, -0.5]
    raw, scaled = scaled_value_and_grad(lambda w: (w * w).sum())(scale, jnp.array([0.5, -0.25], dtype))
    assert scaled.gradients.tolist() == [2.0**exponent, -(2.0 ** (exponent - 1))]
    assert raw == value


def test_an_inexact_scale_rounds_gradients_of_a_short_loss_no_more_than_others() -> None:
    scale = LossScale(quietly(Static, scale=1000.3))
    _, gradient, _ = value_and_grad(lambda w: w * w)(scale, jnp.float16(1.0))
    assert float(gradient) == pytest.approx(2.0, rel=2e-7)


def test_arguments_are_those_of_jax() -> None:
    def f(a: Any, b: Any, *, c: Any) -> Any:
        return (a * b["x"] * c).sum(), {"b": b}

    a, b = jnp.arange(3.0), {"x": jnp.ones(3), "none": None}
    scale = LossScale()
    for argnums in (0, 1, -1, (0, 1), [1], (1, 0)):
        expected = jax.value_and_grad(f, argnums, has_aux=True)(a, b, c=2.0)
        (value, aux), gradients, _ = value_and_grad(f, argnums, has_aux=True)(scale, a, b, c=2.0)
        assert value == expected[0][0]
        assert jax.tree.all(jax.tree.map(jnp.array_equal, aux, expected[0][1]))
        assert jax.tree.structure(gradients) == jax.tree.structure(
            tuple(expected[1]) if isinstance(argnums, list) else expected[1]
        )
        assert jax.tree.all(
            jax.tree.map(jnp.array_equal, jax.tree.leaves(gradients), jax.tree.leaves(expected[1]))
        )


def test_integers_among_the_parameters_have_no_gradient_and_do_no_harm() -> None:
    params = {"w": jnp.ones(2), "n": jnp.int32(3), "empty": jnp.zeros((0, 3))}
    _, gradients, reading = jax.jit(value_and_grad(lambda p: p["w"].sum() * p["n"]))(LossScale(), params)
    assert gradients["w"].tolist() == [3.0, 3.0]
    assert gradients["n"].dtype == jax.dtypes.float0
    assert reading.finite


def test_complex_parameters_have_the_gradients_of_jax() -> None:
    def f(w: Any) -> Any:
        return jnp.sum(jnp.abs(w) ** 2)

    w = jnp.array([1 + 2j, -3j], jnp.complex64)
    _, gradient, reading = value_and_grad(f)(LossScale(), w)
    assert gradient.tolist() == jax.grad(f)(w).tolist()
    assert reading.finite
    _, _, reading = value_and_grad(f)(LossScale(), w.at[0].set(complex(0.0, np.inf)))
    assert not reading.finite


def test_double_precision_stays(request: pytest.FixtureRequest) -> None:
    jax.config.update("jax_enable_x64", True)
    request.addfinalizer(lambda: jax.config.update("jax_enable_x64", False))
    for dtype in (jnp.float32, jnp.float64):
        value, gradient, reading = value_and_grad(lambda w: jnp.sum(w**2))(
            LossScale(), jnp.array([1e-3], dtype)
        )
        assert value.dtype == gradient.dtype == dtype
        assert gradient.tolist() == jax.grad(lambda w: jnp.sum(w**2))(jnp.array([1e-3], dtype)).tolist()
        assert reading.finite
    assert all_finite({"a": jnp.full(3, 1e100), "b": jnp.ones(3, jnp.float32)})


@pytest.mark.parametrize("script", ["0", "1"])
def test_the_lowered_program_takes_a_loss_scale_and_can_be_compiled_ahead(script: str) -> None:
    def f(scale: LossScale, w: Any) -> Any:
        value, gradients, reading = value_and_grad(lambda w: (w * w).sum())(scale, w)
        return value, gradients, scale.advance(reading)

    scale, w = LossScale(), jnp.array([float(script) * np.inf if script == "1" else 1.0])
    compiled = jax.jit(f).lower(scale, w).compile()
    _, _, after = compiled(scale, w)
    compiled(after, w)  # of the same types
    assert float(after.loss_scale) == (2.0**16 if script == "0" else 2.0**15)
