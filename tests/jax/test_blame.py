"""What `blame` predicts is what happens, in programs of every kind, and what it costs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

from preamp import casting
from preamp.errors import CastingError, PolicyError, UsageError
from preamp.jax import autocast, blame, casts

from .blamed import EXAMPLES, HIDDEN, PARAMS, Loss, X, attention, cross_entropy, perceptron
from .injections import measured_effects
from .inside import Operation, region, steps

FACTOR = 3.0
CORRELATION = 0.9


def loop(p: Any, x: Any) -> Any:
    """The loss of a recurrent network of three steps."""

    def cell(h: Any, column: Any) -> Any:
        h = jnp.tanh(h @ p["query"] + column @ p["up"])
        return h, h.mean()

    h, means = lax.scan(cell, jnp.zeros((len(x), HIDDEN)), jnp.stack([x, x[::-1], -x]), reverse=True)
    return cross_entropy(h @ p["down"]) + means[1]


def unrolled(p: Any, x: Any) -> Any:
    h, means = jnp.zeros((len(x), HIDDEN)), []
    for column in (-x, x[::-1], x):
        h = jnp.tanh(h @ p["query"] + column @ p["up"])
        means.append(h.mean())
    return cross_entropy(h @ p["down"]) + means[1]


def rows_as(found: Any) -> dict[Any, Any]:
    return {(row.module, row.operator, row.source, row.direction, row.product): row for row in found.rows}


def effects(found: Any) -> dict[Any, float]:
    """Return the effect of each operator and direction, wherever it is."""
    squares: Counter[Any] = Counter()
    for row in found.rows:
        squares[row.operator, row.direction] += row.effect**2
    return {key: float(np.sqrt(square)) for key, square in squares.items()}


@pytest.mark.parametrize(
    ("loss", "low"),
    [
        (attention, "float16"),
        pytest.param(loop, "bfloat16", marks=pytest.mark.slow),
        pytest.param(loop, "float16", marks=pytest.mark.slow),
        pytest.param(attention, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_effect_of_each_row_is_what_its_errors_alone_change(loss: Loss, low: str) -> None:
    found = blame(loss, PARAMS, X, dtype=low)
    measured = measured_effects(loss, PARAMS, X, low=low, loss_scale=found.loss_scale)
    rows = rows_as(found)
    assert rows.keys() == measured.keys()
    pairs = np.array([(rows[key].effect, measured[key]) for key in rows])
    assert (np.abs(np.log(pairs[:, 0] / pairs[:, 1])) < np.log(FACTOR)).all(), pairs
    assert np.corrcoef(np.log(pairs).T)[0, 1] > CORRELATION


@pytest.mark.parametrize("loss", [attention, loop])
def test_the_rows_predict_the_change_of_the_loss(loss: Loss) -> None:
    found = blame(loss, PARAMS, X)
    change, predicted = found.loss - found.float32_loss, found.predicted_loss - found.float32_loss
    assert change
    assert predicted == pytest.approx(change, rel=0.1)
    assert {row.loss_effect for row in found.rows if row.direction == "backward"} == {0.0}


def test_a_loop_loses_what_its_turns_lose() -> None:
    found, other = blame(loop, PARAMS, X), blame(unrolled, PARAMS, X)
    one, two = effects(found), effects(other)
    forward = [key for key in one if key[1] == "forward"]
    assert [one[key] for key in forward] == pytest.approx([two[key] for key in forward], rel=0.1)
    # What a loop carries is float32, and so is its cotangent.
    backward = [math.hypot(*(it[key] for key in it if key not in forward)) for it in (one, two)]
    assert backward[0] == pytest.approx(backward[1], rel=0.1)
    products = [row for row in found.rows if row.operator == "dot_general" and row.direction == "forward"]
    assert sorted(row.calls for row in products) == [1, 6]


def remat(p: Any, x: Any) -> Any:
    return perceptron(p, x, jax.checkpoint(jnp.tanh))


def jitted(p: Any, x: Any) -> Any:
    return jax.jit(perceptron, static_argnums=2)(p, x, jax.jit(jnp.tanh))


def branch(p: Any, x: Any) -> Any:
    return lax.cond(x.sum() < 1e9, lambda: perceptron(p, x), lambda: jnp.float32(0))


def turned(p: Any, x: Any) -> Any:
    return lax.while_loop(lambda n: n[0] < 2, lambda n: (n[0] + 1, n[1] * 2), (0, x))[1]


def waiting(p: Any, x: Any) -> Any:
    return perceptron(p, turned(p, x) / 4)


@jax.custom_vjp
def tanh(x: Any) -> Any:
    return jnp.tanh(x)


def tanh_forward(x: Any) -> Any:
    return jnp.tanh(x), jnp.tanh(x)


def tanh_backward(y: Any, gradient: Any) -> Any:
    low = gradient.astype(jnp.float16) * (1 - y * y).astype(jnp.float16)
    return (low.astype(jnp.float32),)


tanh.defvjp(tanh_forward, tanh_backward)


@pytest.mark.parametrize("loss", [remat, jitted, branch, waiting])
def test_what_holds_a_program_changes_nothing(loss: Loss) -> None:
    found, plain = blame(loss, PARAMS, X), blame(perceptron, PARAMS, X)
    one, two = effects(found), effects(plain)
    assert found.loss == pytest.approx(plain.loss, rel=1e-5)
    assert all(one[key] == pytest.approx(two[key], rel=0.5) for key in two)


def test_the_backward_pass_of_a_custom_derivative_is_backward() -> None:
    found = blame(lambda p, x: perceptron(p, x, tanh), PARAMS, X)
    (row,) = (row for row in found.rows if row.runs == "float16" and row.operator == "mul")
    assert row.direction == "backward"
    assert row.loss_effect == 0.0 < row.effect


def test_gradients_inside_of_the_loss_are_forward() -> None:
    def penalty(p: Any, x: Any) -> Any:
        return jnp.sum(jnp.square(jax.grad(perceptron, argnums=1)(p, x)))

    found = blame(penalty, PARAMS, X)
    assert found.predicted_loss - found.float32_loss == pytest.approx(
        found.loss - found.float32_loss, rel=0.3
    )
    products = {row.direction: row.calls for row in found.rows if row.operator == "dot_general"}
    assert products["forward"] == 4


def half_off(a: Any) -> Any:
    """The argument 1, as 1.5: 257.5 is 258 in bfloat16."""
    far = (a + 256.5).astype(jnp.bfloat16)
    return far.astype(jnp.float32) - 256.5


def test_a_row_names_the_parameter_that_suffers_most() -> None:
    params = {"a": jnp.float32(1), "b": jnp.float32(3), "c": jnp.float32(5)}

    def loss(p: Any) -> Any:  # the gradients are h b, h h / 2 and 1, where h is 1 or 1.5
        return 0.5 * p["b"] * half_off(p["a"]) ** 2 + p["c"]

    first = blame(loss, params).rows[0]
    assert (first.operator, first.direction) == ("convert_element_type", "forward")
    assert (first.parameter, first.parameter_error) == ("params['b']", pytest.approx(1.125 / 0.5 - 1))
    assert first.reason == "the gradient of params['b'] changes by 1.2e+00 of its norm"
    only = blame(lambda a: 1.5 * half_off(a) ** 2, params["a"]).rows[0]
    assert (only.parameter, only.parameter_error) == ("params", pytest.approx(0.5))


def test_a_row_of_the_backward_pass_names_the_parameter_whose_gradient_it_loses() -> None:
    def loss(p: Any) -> Any:
        return 1e-9 * p["lost"].astype(jnp.float16).astype(jnp.float32).sum() + p["kept"].sum()

    params = {"kept": jnp.ones(2), "lost": jnp.ones(2)}
    row = blame(loss, params, dtype="float16", loss_scale=1.0).guilty[0]
    assert (row.direction, row.lost_share) == ("backward", 1.0)
    assert (row.parameter, row.parameter_error) == (
        "params['lost']",
        pytest.approx(1.0, rel=2**-8),  # errors are kept in bfloat16
    )


def test_parameters_are_measured_in_the_branches_that_the_step_took() -> None:
    def loss(p: Any) -> Any:
        h = half_off(p["a"])
        large = lax.cond(h > 1.25, lambda h: 2 * h + 1, lambda h: h, h)
        turns = lax.while_loop(lambda n: n < h, lambda n: n + 1, jnp.float32(0))
        return 0.5 * p["b"] * large**2 * lax.stop_gradient(turns)

    row = blame(loss, {"a": jnp.float32(1), "b": jnp.float32(3)}).rows[0]
    assert (row.parameter, row.parameter_error) == ("params['b']", pytest.approx(4**2 / 3**2 - 1))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("linen", "params['params']['up']['kernel']"),
        ("nnx", "params.down.kernel"),
        ("equinox", "params.down.weight"),
    ],
)
def test_parameters_of_modules_have_the_names_that_users_write(model: str, name: str) -> None:
    loss, params = {"linen": linen_model, "nnx": nnx_model, "equinox": equinox_model}[model]()
    found = blame(lambda p, x: loss(p, x) * 2.0**40, params, X, dtype="float16", loss_scale=1.0)
    assert name in {row.parameter for row in found.rows}


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(8, name="down")(nn.relu(nn.LayerNorm()(nn.Dense(HIDDEN, name="up")(x))))


class NnxMlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(jnp.tanh(self.up(x)))


class EqxMlp(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __call__(self, x: Any) -> Any:
        return self.down(jnp.tanh(self.up(x)))


def linen_model() -> tuple[Loss, Any]:
    model = Mlp()
    return lambda p, x: cross_entropy(model.apply(p, x)), model.init(jax.random.key(0), X)


def nnx_model() -> tuple[Loss, Any]:
    return lambda model, x: cross_entropy(model(x)), NnxMlp(nnx.Rngs(0))


def equinox_model() -> tuple[Loss, Any]:
    keys = jax.random.split(jax.random.key(0))
    model = EqxMlp(eqx.nn.Linear(HIDDEN, HIDDEN, key=keys[0]), eqx.nn.Linear(HIDDEN, 8, key=keys[1]))
    return lambda model, x: cross_entropy(jax.vmap(model)(x)), model


@pytest.mark.parametrize("model", [linen_model, nnx_model])
def test_modules_and_lines_are_those_of_the_report_of_casts(model: Any) -> None:
    loss, params = model()
    before = [vars(kind)["__call__"] for kind in (Mlp, NnxMlp, EqxMlp)]
    found = blame(loss, params, X)
    assert before == [vars(kind)["__call__"] for kind in (Mlp, NnxMlp, EqxMlp)]
    assert not found.guilty
    places = {(row.module, row.operator, row.source) for row in casts(loss, params, X).rows}
    forward = {(row.module, row.operator, row.source) for row in found.rows if row.direction == "forward"}
    assert forward <= places
    assert {place for place in places if place[1] == "dot_general"} <= forward
    modules = {row.module for row in found.rows if row.direction == "backward"}
    assert any("down" in module for module in modules)


def test_edits_of_the_table_and_of_modules_hold() -> None:
    loss, params = linen_model()
    assert not blame(loss, params, X, casting=casting.DEFAULT.float32("dot_general")).rows
    rows = blame(loss, params, X, casting=casting.DEFAULT.module("up", "float32")).rows
    assert {row.module for row in rows if row.operator == "dot_general"} == {"Mlp.down"}


def test_products_are_counted_as_in_the_report_of_casts() -> None:
    loss, params = linen_model()
    table = casting.DEFAULT.module("up", "float32")
    rows = casts(loss, params, X, casting=table).rows
    found = blame(loss, params, X, casting=table)
    assert found.flops == sum(row.flops for row in rows)
    assert found.low_flops == sum(row.flops for row in rows if row.runs == "bfloat16")
    assert 0 < found.low_flops < found.flops
    assert sum(row.flops for row in found.rows if row.direction == "forward") == found.low_flops


def test_a_module_that_does_not_exist_is_a_warning_at_the_line_of_the_call() -> None:
    loss, params = linen_model()
    with pytest.warns(UserWarning, match="No module of this program is named 'upp'") as caught:
        blame(loss, params, X, casting=casting.DEFAULT.module("upp", "float32"))
    assert caught[0].filename == __file__


AT = "in float32 as well, so precision is not the cause: {} makes {} first."
NOT_FINITE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an exponential": (lambda h: jnp.exp(1000 * h), f"The loss is inf {AT.format('exp', 'inf')}"),
    "a division": (lambda h: h / jnp.zeros(HIDDEN), f"The loss is nan {AT.format('div', 'inf')}"),
    "0 / 0": (lambda h: 0 * h / jnp.zeros(HIDDEN), f"The loss is nan {AT.format('div', 'NaN')}"),
    "a mask of everything": (
        lambda h: jax.nn.softmax(jnp.where(h > jnp.inf, h, -jnp.inf)),
        f"The loss is nan {AT.format('sub', 'NaN')}",
    ),
    "a mask before an overflow": (
        lambda h: jnp.exp(jnp.where(h > 0, 1000 * h, -jnp.inf)),
        f"The loss is inf {AT.format('exp', 'inf')}",
    ),
    "an argument": (
        lambda h: h * jnp.nan,
        "The loss is nan in float32 as well, so precision is not the cause: what mul is given has NaN.",
    ),
    "a root at 0": (
        lambda h: jnp.sqrt(jnp.sum(jnp.square(0 * h), -1)),
        f"The gradient of params['up'] has NaN {AT.format('the backward pass of sqrt', 'inf')}",
    ),
    "a norm of 0, which is jitted": (
        lambda h: jnp.linalg.norm(0 * h, axis=-1),
        f"The gradient of params['up'] has NaN {AT.format('the backward pass of sqrt', 'inf')}",
    ),
    "a root behind a where": (
        lambda h: jnp.where(h > 0, jnp.sqrt(h), 0),
        f"The gradient of params['up'] has NaN {AT.format('sqrt', 'NaN')}",
    ),
}


@pytest.mark.parametrize("case", NOT_FINITE)
def test_what_is_not_finite_in_float32_as_well_is_laid_to_what_makes_it_first(case: str) -> None:
    function, says = NOT_FINITE[case]
    params = {"up": PARAMS["up"]}
    found = blame(lambda p, x: jnp.mean(function(x @ p["up"])), params, X, dtype="float16")
    assert re.sub(r" at test_blame.py:\d+", "", found.not_finite) == says
    assert found.summary().startswith(found.not_finite)
    assert not found.guilty
    assert not found.notes


SMALL = {
    "log": (jnp.log, "log"),
    "division": (lambda h: 1 / h, "div"),
    "root": (lambda h: jnp.sqrt(jnp.sum(h, -1)), "the backward pass of sqrt"),
}


@pytest.mark.parametrize("case", SMALL)
def test_what_rounds_to_zero_is_accused_of_what_breaks(case: str) -> None:
    function, breaks = SMALL[case]

    def loss(p: Any, x: Any) -> Any:
        small = (1e-9 * jnp.exp(x @ p["up"])).astype(jnp.float16)
        return jnp.mean(function(small.astype(jnp.float32)))

    found = blame(loss, {"up": PARAMS["up"]}, X, dtype="float16")
    (row,) = found.guilty
    assert (row.operator, row.lost) == ("convert_element_type", EXAMPLES * HIDDEN)
    assert row.breaks.startswith(f"{breaks} at test_blame.py")
    assert not found.not_finite


MASKS: dict[str, Callable[[Any, Any, float], Any]] = {
    "where": lambda scores, seen, huge: jnp.where(seen, scores, huge),
    "added": lambda scores, seen, huge: scores + jnp.where(seen, 0.0, huge),
    "added in float16": lambda scores, seen, huge: scores + jnp.where(seen, 0.0, huge).astype(jnp.float16),
}


@pytest.mark.parametrize(
    ("mask", "low", "huge"),
    [("where", "float16", -1e9), ("added", "bfloat16", -2.38e38), ("added in float16", "float16", -1e9)],
)
def test_a_mask_beyond_the_range_loses_what_one_within_it_does(mask: str, low: str, huge: float) -> None:
    w, x = jax.random.normal(jax.random.key(0), (2, 16, 16))
    seen = jnp.tril(jnp.ones((16, 16), bool))

    def loss(w: Any, huge: float) -> Any:
        return jnp.mean(jnp.square(jax.nn.softmax(MASKS[mask](x @ w @ x.T / 4, seen, huge)) @ x))

    within, beyond = (blame(partial(loss, huge=each), w, dtype=low) for each in (-3e4, huge))
    assert [row.operator for row in beyond.guilty] == [row.operator for row in within.guilty]
    assert not beyond.notes


@pytest.mark.parametrize(("through", "guilty"), [(lambda y: jnp.clip(y, -1, 1), False), (jnp.cos, True)])
def test_an_overflow_is_accused_if_the_loss_or_a_gradient_changes_with_it(through: Any, guilty: bool) -> None:
    w, x = jax.random.normal(jax.random.key(0), (2, 4, 4))
    found = blame(lambda w: jnp.mean(through((1e9 * (x @ w)).astype(jnp.float16))), w, dtype="float16")
    assert bool(found.guilty) is guilty


def test_every_rounding_belongs_to_an_operator() -> None:
    found = blame(attention, PARAMS, X)
    assert not {"reduce_precision", "convert_element_type"} & {row.operator for row in found.rows}
    assert {row.part for row in found.rows if row.operator == "dot_general"} == {"product"}
    runs = {(row.direction, row.runs) for row in found.rows if row.operator == "dot_general"}
    assert runs == {("forward", "bfloat16"), ("backward", "bfloat16")}


def test_a_cast_that_a_user_writes_stands_for_itself() -> None:
    def loss(p: Any, x: Any) -> Any:
        low = jnp.exp(x @ p["up"]).astype(jnp.bfloat16)
        return jnp.mean(jnp.sin(low))

    rows = blame(loss, PARAMS, X).rows
    cast, sine = (
        next(row for row in rows if row.operator == name) for name in ("convert_element_type", "sin")
    )
    assert cast.direction == "forward"
    assert int(cast.source.partition(":")[2]) + 1 == int(sine.source.partition(":")[2])


def test_a_cast_of_what_an_argument_in_float32_made_wide_is_not_charged_to_what_computed_it() -> None:
    def loss(p: Any, x: Any, far: Any) -> Any:
        h = x @ p["up"] + far
        low = h.astype(jnp.bfloat16)
        return cross_entropy((low.astype(jnp.float32) - far) @ p["down"])

    far = jnp.broadcast_to(jnp.linspace(300.0, 400.0, len(X))[:, None], X.shape)  # no bias: it differs by row
    row = blame(loss, PARAMS, X, far).guilty[0]
    assert (row.operator, row.direction) == ("convert_element_type", "forward")


def test_what_a_result_in_float32_loses_within_a_line_is_charged_to_what_computed_it() -> None:
    def loss(p: Any, x: Any) -> Any:
        low = (x @ p["up"]).astype(jnp.bfloat16)
        total = jnp.abs(jnp.exp(low.astype(jnp.float32)).astype(jnp.bfloat16)) + 100
        return jnp.square(total.astype(jnp.float32) - 100).mean()

    rows = {(row.operator, row.direction): row for row in blame(loss, PARAMS, X).rows}
    assert rows["exp", "forward"].local_error > 1e-3
    assert ("abs", "forward") not in rows


@pytest.mark.parametrize("operator", ["cumsum", "exp"])
def test_what_a_table_lowers_is_charged_for_its_own_roundings(operator: str) -> None:
    def loss(p: Any, x: Any) -> Any:
        h = jnp.cumsum(jnp.exp(jnp.tanh(x @ p["up"])), -1)
        h = h - 10.0
        total = jnp.sum(h, -1)
        return jnp.square(total).mean()

    table = casting.DEFAULT.lower(operator)
    lost = {row.operator for row in blame(loss, PARAMS, X, casting=table).rows if row.direction == "forward"}
    assert operator in lost
    assert not lost & {"convert_element_type", "sub"}


def test_nothing_is_written_to_and_nothing_depends_on_what_ran_before() -> None:
    class Normed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.norm(x)

    def loss(p: Any, model: Normed, x: Any) -> Any:
        return cross_entropy(model(x @ p["up"]) @ p["down"])

    model = Normed(nnx.Rngs(0))
    found = blame(loss, PARAMS, model, X)
    assert not model.norm.mean[...].any()
    assert found == blame(loss, PARAMS, model, X)


def test_params_may_hold_more_than_floats_and_arguments_may_be_anything() -> None:
    def loss(p: Any, count: int, *, x: Any, name: str) -> Any:
        assert name == "name"
        return (
            p["net"]["down"].sum() * p["scale"] + cross_entropy(x @ p["net"]["up"] @ p["net"]["down"]) * count
        )

    params = {"net": PARAMS, "steps": jnp.arange(3), "scale": 1e-3, "none": None}
    found = blame(loss, params, 2, x=X, name="name")
    assert {row.direction for row in found.rows} == {"forward", "backward"}


def test_it_costs_four_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: Counter[str] = Counter()

    def counting(method: Any) -> Any:
        def counted(self: Operation, *values: Any) -> Any:
            ran[self.name] += 1
            return method(self, *values)

        return counted

    for name in ("__call__", "in_float32"):
        monkeypatch.setattr(Operation, name, counting(getattr(Operation, name)))
    blame(perceptron, PARAMS, X)
    step = str(jax.make_jaxpr(jax.value_and_grad(autocast(perceptron)))(PARAMS, X)).count("dot_general")
    forward, derivatives = 2, 2
    assert step == 5  # without the gradient of the input
    assert ran["dot_general"] == step + derivatives * step + derivatives * forward + forward
    assert ran["dot_general"] <= 4.2 * step


def test_only_what_the_derivative_needs_is_kept_and_what_was_rounded_in_its_bits() -> None:
    settings = region("bfloat16", None, True)
    step = steps.traced(lambda p: jnp.mean((X @ p + 1.0) * 3.0 - 2.0), PARAMS["up"], (), {}, settings)
    tape, _, _ = steps.run(step, settings, None)
    kept = {
        (call.operation.name, str(array.dtype))
        for call in tape.calls
        for array in call.kept
        if array is not None and array.shape
    }
    assert {"dot_general", "add", "mul", "sub"} <= {call.operation.name for call in tape.calls}
    assert kept == {("dot_general", "bfloat16")}
    assert all(
        lost.delta is None or lost.delta.dtype == jnp.bfloat16 for call in tape.calls for lost in call.losses
    )


def test_float32_is_no_less_than_that_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs and TPUs compute products of float32 in less, unless they are asked for the highest precision."""
    asked: set[Any] = set()

    def seeing(method: Any) -> Any:
        def seen(self: Operation, *values: Any) -> Any:
            if self.name == "dot_general":
                text = str(jax.make_jaxpr(partial(method, self))(*values))
                asked.update(re.findall(r"(?s)dot_general\[.*?precision=(.*?)\n", text))
            return method(self, *values)

        return seen

    for name in ("__call__", "in_float32"):
        monkeypatch.setattr(Operation, name, seeing(getattr(Operation, name)))
    blame(perceptron, PARAMS, X)
    assert asked == {"(Precision.HIGHEST, Precision.HIGHEST)"}


@pytest.mark.parametrize(
    ("args", "settings", "error", "said"),
    [
        ((perceptron, PARAMS, X), {"dtype": "float32"}, CastingError, "float32.*Write dtype='float16'"),
        ((perceptron, PARAMS, X), {"casting": 3}, CastingError, "is not a table"),
        ((perceptron, PARAMS, X), {"loss_scale": 0}, PolicyError, "loss_scale=0"),
        ((3, PARAMS, X), {}, UsageError, "cannot be called as a loss"),
        ((perceptron, {"steps": jnp.arange(3)}, X), {}, UsageError, "without floating arrays"),
        ((lambda p: p["up"], PARAMS), {}, UsageError, r"shape \(16, 16\).*jnp.mean"),
        ((lambda p: 3.0, PARAMS), {}, UsageError, "the loss is 3.0, not a scalar array"),
        ((lambda p: (p["up"].sum(), 1), PARAMS), {}, UsageError, r"loss_fn\(\*args\)\[0\]"),
        ((lambda p: p["up"].argmax(), PARAMS), {}, UsageError, "int32, which has no gradient"),
        ((lambda p: 1.0 if p["up"].sum() > 0 else 2.0, PARAMS), {}, UsageError, "cannot trace.*lax.cond"),
        ((perceptron, PARAMS, jax.ShapeDtypeStruct(X.shape, X.dtype)), {}, UsageError, "has no values"),
    ],
)
def test_errors_say_what_to_write(args: Any, settings: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        blame(*args, **settings)


@pytest.mark.parametrize("transformation", [jax.jit, jax.grad])
def test_it_cannot_be_compiled_or_differentiated(transformation: Any) -> None:
    for run in (
        lambda size: blame(perceptron, PARAMS, X * size).loss,
        lambda size: blame(lambda p: perceptron(p, X) * size, PARAMS).loss,
    ):
        with pytest.raises(UsageError, match="outside of them"):
            transformation(run)(1.0)


def test_an_operation_that_float32_refuses_is_noted() -> None:
    def double(x: Any) -> Any:
        assert x.dtype == jnp.bfloat16
        return x + x

    def loss(p: Any, x: Any) -> Any:
        low = (x @ p["up"]).astype(jnp.bfloat16)
        result = jax.ShapeDtypeStruct(low.shape, low.dtype)
        twice = jax.pure_callback(double, result, lax.stop_gradient(low))
        return cross_entropy((low + twice) @ p["down"])

    found = blame(loss, PARAMS, X)
    assert "pure_callback" in found.notes[0]
    assert "pure_callback" not in {row.operator for row in found.rows}
