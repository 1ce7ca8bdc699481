"""How these tests step an optimizer: with true gradients, whatever the backend and whoever scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest

BACKEND = keras.backend.backend()
INF = float("inf")
WAYS = ("eager", "compiled")
Stock = keras.optimizers.LossScaleOptimizer
Arrays = list[np.ndarray]

# Beside PyTorch: with those that compile steps. JAX alone where both would show the same.
each_backend = pytest.mark.also_on("jax", "tensorflow")
with_jax = pytest.mark.also_on("jax")
# Where steps are compiled, compiled ones; with PyTorch both ways: eagerly, and by `stateless_apply`.
each_way = pytest.mark.parametrize("way", WAYS if BACKEND == "torch" else WAYS[1:])


def tensor(value: Any, dtype: str = "float32") -> Any:
    return keras.ops.convert_to_tensor(np.asarray(value, dtype), dtype)


def array(value: Any) -> np.ndarray:
    """Return a copy, which later steps do not change."""
    native = value.value if isinstance(value, keras.Variable) else value
    return np.array(keras.ops.convert_to_numpy(native))


@contextmanager
def dtype_policy(name: str) -> Iterator[None]:
    """Set the global dtype policy, which is what `Model.compile` looks at."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def same(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bool:
    """Return whether arrays are equal to the last bit, but for the sign of a zero.

    TensorFlow keeps the scalars that it was given: once -0.0 was among them, a variable set to 0.0 has -0.0.
    """
    assert len(first) == len(second)
    return all(
        a.dtype == b.dtype and (a + 0).tobytes() == (b + 0).tobytes()
        for a, b in zip(first, second, strict=True)
    )


def close(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bool:
    assert len(first) == len(second)
    return all(np.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(first, second, strict=True))


def record_shardings(model: Any) -> None:
    """Have Keras 3.10 on JAX note where a model's variables lie, which its training step reads.

    `fit` does it when it begins, `evaluate` forgets it when it ends, and later releases have no such note.
    """
    record = getattr(model, "_record_training_state_sharding_spec", None)
    if record is not None:
        record()


class Run:
    """Variables and the optimizer of them.

    Args:
        optimizer: ours, stock Keras' or a bare one.
        starts: the first values of the variables.
        way: "eager" calls `apply`; "compiled" is `jax.jit`, `tf.function`, and on torch `stateless_apply`.
            Stock Keras cannot be called eagerly on JAX: there it is always compiled.
    """

    def __init__(
        self, optimizer: Any, *starts: Any, way: str = "eager", dtype: str = "float32", build: bool = True
    ) -> None:
        self.optimizer = optimizer
        self.variables = [keras.Variable(np.asarray(start, dtype), dtype=dtype) for start in starts]
        if build:
            optimizer.build(self.variables)
        if type(optimizer) is Stock and BACKEND == "jax":
            way = "compiled"
        self._apply = {"eager": self._eager, "compiled": COMPILED[BACKEND](self)}[way]

    def step(self, *gradients: Any) -> None:
        """Take a step with true gradients, one a variable; None where there is none."""
        self.apply(*[None if g is None else self.optimizer.scale_loss(tensor(g)) for g in gradients])

    def apply(self, *scaled: Any) -> None:
        """Take a step with gradients that are scaled already."""
        self._apply([None if g is None else tensor(array(g)) for g in scaled])

    def gradients(self, number: int, overflow: bool = False) -> Arrays:
        """Draw gradients: eighths, so that SGD with a learning rate of 1/4 rounds nothing."""
        draw = np.random.default_rng(number)
        drawn = [draw.integers(-16, 17, v.shape).astype("float32") / 8 for v in self.variables]
        if overflow:
            drawn[-1].flat[0] = (INF, -INF, np.nan)[number % 3]
        return drawn

    def steps(self, script: str) -> Iterator[bool]:
        """Walk a script in which "1" is an overflow; yield after every step whether it was one."""
        for number, mark in enumerate(script):
            self.step(*self.gradients(number, mark == "1"))
            yield mark == "1"

    def walk(self, script: str) -> Run:
        """Walk a script to its end."""
        for _ in self.steps(script):
            pass
        return self

    @property
    def scale(self) -> float:
        return float(array(self.optimizer.dynamic_scale))

    @property
    def counter(self) -> float:
        return float(array(self.optimizer.step_counter))

    @property
    def iterations(self) -> int:
        return int(array(self.optimizer.iterations))

    def weights(self) -> Arrays:
        return [array(v) for v in self.variables]

    def inner(self) -> Arrays:
        """Return the state of the optimizer that updates: of the inner one, if there is one."""
        return [array(v) for v in getattr(self.optimizer, "inner_optimizer", self.optimizer).variables]

    def trained(self) -> Arrays:
        """Return all that only an update may change."""
        return [*self.weights(), *self.inner()]

    def everything(self) -> Arrays:
        return [*self.weights(), *map(array, self.optimizer.variables)]

    def restore(self, values: Arrays) -> None:
        """Put back what `everything` returned."""
        for variable, value in zip([*self.variables, *self.optimizer.variables], values, strict=True):
            variable.assign(value)

    def finalized(self) -> Arrays:
        """Return the weights after the last word of the optimizer."""
        self.optimizer.finalize_variable_values(self.variables)
        return self.weights()

    def _eager(self, gradients: list[Any]) -> None:
        self.optimizer.apply(gradients, self.variables)

    def _stateless(self, call: Callable[..., Any]) -> Callable[[list[Any]], None]:
        def apply(gradients: list[Any]) -> None:
            state = [v.value for v in self.optimizer.variables]
            weights, state = call(state, gradients, [v.value for v in self.variables])
            for variable, value in zip(self.variables, weights, strict=True):
                variable.assign(value)
            for variable, value in zip(self.optimizer.variables, state, strict=True):
                variable.assign(value)

        return apply


def _jitted(run: Run) -> Callable[[list[Any]], None]:
    import jax

    return run._stateless(jax.jit(lambda *arguments: run.optimizer.stateless_apply(*arguments)))


def _function(run: Run) -> Callable[[list[Any]], None]:
    import tensorflow as tf

    return tf.function(run._eager)


def _torch(run: Run) -> Callable[[list[Any]], None]:
    return run._stateless(lambda *arguments: run.optimizer.stateless_apply(*arguments))


COMPILED = {"jax": _jitted, "tensorflow": _function, "torch": _torch}


def walk_abreast(run: Run, plain: Run, script: str) -> None:
    """Walk a script beside a bare optimizer, which is not shown the overflows; both must stay equal."""
    before = run.trained()
    for number, overflowed in enumerate(run.steps(script)):
        if overflowed:
            assert same(run.trained(), before)
        else:
            plain.step(*plain.gradients(number))
            assert close(run.trained(), plain.trained())
            assert not same(run.trained(), before)
        before = run.trained()
