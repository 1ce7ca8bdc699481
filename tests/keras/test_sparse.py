"""Sparse gradients of each backend's kind, and NumPy's arrays, beside the bare optimizer and Keras's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from preamp import Headroom, Static
from preamp.keras import LossScaleOptimizer

from .driving import BACKEND, INF, Stock, array, close, each_backend, same, tensor

SHAPE = (5, 3)
ROWS = np.arange(1.0, 7.0, dtype="float32").reshape(2, 3)
INNERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "momentum": lambda: keras.optimizers.SGD(0.5, momentum=0.5),
    "adam": lambda: keras.optimizers.Adam(0.125),
}


def sparse(rows: np.ndarray, places: list[int], dtype: str = "float32", *, told: bool = True) -> Any:
    """Return a gradient of shape `SHAPE` that stores some rows.

    Args:
        rows: the rows.
        places: where they belong. Those of one place add up.
        dtype: of the rows.
        told: whether the gradient says that no place comes twice, where a backend asks for that.
    """
    rows = rows.astype(dtype)
    if BACKEND == "jax":
        import jax.numpy as jnp
        from jax.experimental.sparse import BCOO

        indices = jnp.array(places, "int32").reshape(-1, 1)
        unique = told and len(set(places)) == len(places)
        return BCOO((jnp.asarray(rows), indices), shape=SHAPE, unique_indices=unique)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.IndexedSlices(tf.constant(rows), tf.constant(places, tf.int32), tf.constant(SHAPE))
    import torch

    indices = torch.tensor([places], dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, torch.tensor(rows), SHAPE, check_invariants=True)


def dense(rows: np.ndarray, places: list[int]) -> np.ndarray:
    result = np.zeros(SHAPE, "float32")
    np.add.at(result, places, rows)
    return result


def train(optimizer: Any, gradients: list[Any], *, compiled: bool = False) -> list[np.ndarray]:
    """Take steps with scaled gradients of a matrix, and with ones for a vector; return both."""
    variables = [keras.Variable(np.ones(SHAPE, "float32")), keras.Variable(np.ones(2, "float32"))]
    optimizer.build(variables)
    ones = optimizer.scale_loss(tensor(np.ones(2)))
    for gradient in gradients:
        if BACKEND == "tensorflow" and compiled:
            import tensorflow as tf

            tf.function(lambda gradient: optimizer.apply([gradient, ones], variables))(gradient)
        elif compiled or (BACKEND == "jax" and type(optimizer) is Stock):
            apply = optimizer.stateless_apply
            if BACKEND == "jax":
                import jax

                apply = jax.jit(apply)
            state, values = ([v.value for v in each] for each in (optimizer.variables, variables))
            values, state = apply(state, [gradient, ones], values)
            for variable, value in zip([*variables, *optimizer.variables], [*values, *state], strict=True):
                variable.assign(value)
        else:
            optimizer.apply([gradient, ones], variables)
    return [array(variable) for variable in variables]


pytestmark = each_backend
each_way = pytest.mark.parametrize("compiled", [False, True] if BACKEND == "torch" else [True])
each_place = pytest.mark.parametrize("places", [[0, 2], [3, 3]], ids=["rows", "one row twice"])
SCALE = 2.0**10


@pytest.mark.parametrize(
    ("inner", "places", "compiled"),
    [
        ("sgd", [0, 2], False),
        ("momentum", [3, 3], False),
        ("sgd", [3, 3], True),
        ("adam", [0, 2], True),
        ("adam", [3, 3], BACKEND != "jax"),  # Keras's own Adam cannot add up rows of one place under jit
    ],
)
def test_a_sparse_gradient_updates_as_under_the_bare_optimizer(
    inner: str, places: list[int], compiled: bool
) -> None:
    optimizer = LossScaleOptimizer(INNERS[inner](), SCALE)
    ours = train(optimizer, [sparse(ROWS * SCALE, places)] * 2, compiled=compiled)
    assert close(ours, train(INNERS[inner](), [sparse(ROWS, places)] * 2, compiled=compiled))
    if inner != "adam":  # Keras's own Adam squares the rows of one place before it adds them up
        assert close(ours, train(INNERS[inner](), [tensor(dense(ROWS, places))] * 2))
    assert optimizer.skipped_steps == 0


@each_way
@pytest.mark.parametrize("bad", [-INF, float("nan")])
def test_one_stored_number_skips_the_step(bad: float, compiled: bool) -> None:
    rows = ROWS * SCALE
    rows[1, 2] = bad
    optimizer = LossScaleOptimizer(INNERS["momentum"](), SCALE)
    after = train(optimizer, [sparse(rows, [0, 2])], compiled=compiled)
    assert same(after, [np.ones(SHAPE, "float32"), np.ones(2, "float32")])
    assert (optimizer.skipped_steps, optimizer.loss_scale) == (1, SCALE / 2)


@each_way
def test_nothing_stored_is_finite(compiled: bool) -> None:
    optimizer = LossScaleOptimizer(INNERS["sgd"]())
    matrix, vector = train(optimizer, [sparse(ROWS[:0], [])], compiled=compiled)
    assert same([matrix], [np.ones(SHAPE, "float32")])
    assert vector.tolist() == [0.5, 0.5]


@each_way
def test_rows_of_half_precision_are_unscaled_in_float32(compiled: bool) -> None:
    """1 / 2**25 is 0 in float16, and two rows of 40,000 add up to inf."""
    optimizer = LossScaleOptimizer(INNERS["sgd"](), 2.0**25)
    after = train(optimizer, [sparse(np.full((2, 3), 4e4), [3, 3], "float16")], compiled=compiled)
    assert optimizer.skipped_steps == 0
    assert after[0][3].tolist() == [1.0 - np.float32(4e4) * 2.0**-25] * 3


@each_way
def test_a_policy_is_shown_the_stored_entries(compiled: bool) -> None:
    optimizer = LossScaleOptimizer(INNERS["sgd"](), policy=Headroom(init_scale=4.0))
    train(optimizer, [sparse(-ROWS * 100, [0, 2])], compiled=compiled)
    assert optimizer.last_step.amax == 600.0


@pytest.mark.parametrize("kind", ["float64", "float16", "list", "variable"])
def test_gradients_that_are_no_tensors_are_taken_as_keras_takes_them(kind: str) -> None:
    after = []
    for make in (lambda: LossScaleOptimizer(INNERS["sgd"](), 4.0), lambda: Stock(INNERS["sgd"](), 4.0)):
        variable, optimizer = keras.Variable([1.0, 1.0]), make()
        optimizer.build([variable])
        optimizer.scale_loss(1.0)
        gradient = [4.0, -8.0] if kind in ("list", "variable") else np.array([4.0, -8.0], kind)
        if kind == "variable":
            gradient = keras.Variable(gradient)
        if BACKEND == "jax" and type(optimizer) is Stock:
            (value,), _ = optimizer.stateless_apply(
                [v.value for v in optimizer.variables], [gradient], [variable.value]
            )
        else:
            optimizer.apply([gradient], [variable])
            value = variable.value
        after.append(array(value))
    assert same(*([each] for each in after))
    assert after[0].tolist() == [0.5, 2.0]


SETTINGS: dict[str, dict[str, Any]] = {
    "clipnorm": {"clipnorm": 1.0},
    "clipvalue": {"clipvalue": 1.0},
    "global_clipnorm": {"global_clipnorm": 1.0},
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation, clipped": {"gradient_accumulation_steps": 2, "clipnorm": 1.0},
    "weight_decay": {"weight_decay": 0.25},
    "ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
}


@pytest.mark.parametrize(
    ("inner", "settings", "compiled"),
    [
        *[("Adagrad", settings, False) for settings in SETTINGS if BACKEND == "torch"],
        *[("Adam", settings, True) for settings in ("clipnorm", "accumulation, clipped", "ema")],
    ],
)
def test_a_sparse_gradient_works_with_every_setting(inner: str, settings: str, compiled: bool) -> None:
    """Bit for bit as under the bare optimizer where that takes it, else as it takes the same one dense."""
    places = [3, 3]

    def make() -> Any:
        return getattr(keras.optimizers, inner)(0.125, **SETTINGS[settings])

    optimizer = LossScaleOptimizer(make(), SCALE)
    ours = train(optimizer, [sparse(ROWS * SCALE, places)] * 2, compiled=compiled)
    try:
        theirs = train(make(), [sparse(ROWS, places)] * 2, compiled=compiled)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        assert close(ours, train(make(), [tensor(dense(ROWS, places))] * 2))
    else:
        assert same(ours, theirs)
    assert (optimizer.skipped_steps, optimizer.last_step.index) == (0, 1)


@each_way
def test_an_overflow_among_sparse_gradients_is_dropped_while_accumulating(compiled: bool) -> None:
    def after(*rows: np.ndarray) -> list[np.ndarray]:
        inner = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
        optimizer = LossScaleOptimizer(inner, policy=Static(SCALE))
        return train(optimizer, [sparse(row * SCALE, [0, 2]) for row in rows], compiled=compiled)

    assert same(after(ROWS, ROWS * INF, ROWS * 2), after(ROWS, ROWS * 2))


@each_way
def test_an_error_of_the_inner_optimizer_over_sparse_gradients_stays_its_own(compiled: bool) -> None:
    class Broken(keras.optimizers.SGD):
        def update_step(self, *arguments: Any) -> None:
            raise ValueError("broken on purpose")

        _parallel_update_step = update_step

    with pytest.raises(ValueError, match="broken on purpose"):
        train(LossScaleOptimizer(Broken(0.5)), [sparse(ROWS, [0, 2])], compiled=compiled)
