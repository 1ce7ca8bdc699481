"""Every adapter, in a process for each of Keras's backends: Keras has one for life.

    python conformance_worker.py FILE NUMBER...

drives the adapters of some `ROWS` through `SCRIPT` under every policy and through `EXHAUSTING` under one that
gives up twice, and writes to FILE what each step came to. Gradients are the framework's own: the loss is a
sum of weights times factors, one of which is not finite where the script says so.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from preamp import (
    Dynamic,
    Headroom,
    ScaleExhausted,
    Static,
    Step,
    Tolerant,
    dialects,
)

SCRIPT = "0010000110000000001" + "11111" + "0100010100" + "000"
POLICIES: dict[str, Any] = {
    "keras": dialects.KERAS(initial_scale=2.0**10, dynamic_growth_steps=3),
    "torch": dialects.TORCH(init_scale=2.0**16, growth_interval=2, backoff_factor=0.25),
    "tf_keras, at its floor": dialects.TF_KERAS(initial_scale=4.0, dynamic_growth_steps=2),
    "tolerant": Tolerant(init_scale=2.0**10, growth_interval=3, tolerance=0.34),
    "hysteresis": dialects.DEEPSPEED(init_scale=2.0**10, scale_window=3, raise_error_at_min_scale=False),
    "fixed": Static(2.0**7),
    "gives up": Dynamic(init_scale=2.0**10, growth_interval=3, min_scale=2.0**8, at_floor="raise"),
    "sees the peak": Headroom(init_scale=4.0, memory=4, patience=4),
}
# Gives up at the third overflow, and after some clean steps, at which the training should have ended, again.
EXHAUSTING, GIVES_UP_TWICE = (
    "1110000011000000",
    Dynamic(init_scale=32.0, growth_interval=3, min_scale=8.0, at_floor="raise"),
)
playing = SimpleNamespace(script=SCRIPT)
STARTS = [np.array([1.0, -2.0, 3.0], "float32"), np.array([[0.5], [4.0]], "float32")]
RATE = 0.25
BACKEND = os.environ.get("KERAS_BACKEND")


class Peer(NamedTuple):
    """An optimizer, a way to take a step with it, and what only an update may change."""

    optimizer: Any
    step: Callable[[list[np.ndarray]], None]
    weights: Callable[[], list[Any]]
    state: Callable[[], list[Any]]


def factors(number: int, mark: str) -> list[np.ndarray]:
    """Return what the weights are multiplied by in a step: eighths, none of them zero; "1" overflows."""
    drawn = [
        np.random.default_rng(number).integers(1, 9, start.shape).astype("float32") / 8 for start in STARTS
    ]
    if mark == "1":
        drawn[number % 2].flat[number % 2] = (np.inf, -np.inf, np.nan)[number % 3]
    return drawn


def weighted_sum(weights: list[Any], factors: list[Any], total: Callable[[Any], Any]) -> Any:
    return sum(total(weight * factor) for weight, factor in zip(weights, factors, strict=True))


# PyTorch


def torch_peer(policy: Any, *, fused: bool = False) -> Peer:
    import torch

    from preamp.torch import GradScaler

    weights = [torch.nn.Parameter(torch.from_numpy(start.copy())) for start in STARTS]
    inner = torch.optim.Adam(weights, lr=RATE, fused=fused)
    scaler = GradScaler("cpu", policy=policy)

    def step(factors: list[np.ndarray]) -> None:
        inner.zero_grad()
        loss = weighted_sum(weights, [torch.from_numpy(factor) for factor in factors], torch.sum)
        scaler.scale(loss).backward()
        scaler.step(inner, max_norm=math.inf)  # which measures it
        scaler.update()

    return Peer(scaler, step, *torch_photos(weights, inner))


def torch_photos(weights: list[Any], inner: Any) -> tuple[Callable[[], list[Any]], Callable[[], list[Any]]]:
    """Return what shows the weights, and what shows the optimizer's state."""

    def state() -> list[Any]:
        return [tensor.numpy() for slots in inner.state.values() for tensor in slots.values()]

    return lambda: [weight.detach().numpy() for weight in weights], state


# PyTorch, as DeepSpeed has it


def deepspeed_scaler_peer(policy: Any) -> Peer:
    import torch

    from preamp.deepspeed import DynamicLossScaler

    scaler = DynamicLossScaler(
        init_scale=policy.init_scale,
        scale_window=policy.growth_interval,
        min_scale=policy.min_scale,
        delayed_shift=policy.hysteresis,
        consecutive_hysteresis=policy.hysteresis_reset == "clean",
        raise_error_at_min_scale=policy.at_floor == "raise",
    )
    weights = [torch.nn.Parameter(torch.from_numpy(start.copy())) for start in STARTS]
    inner = torch.optim.Adam(weights, lr=RATE)
    now = SimpleNamespace()

    def step(factors: list[np.ndarray]) -> None:
        inner.zero_grad()
        scaler.backward(weighted_sum(weights, [torch.from_numpy(factor) for factor in factors], torch.sum))
        scale, overflow = scaler.loss_scale, scaler.has_overflow(weights)
        if not overflow:
            for weight in weights:
                weight.grad /= scale
            inner.step()
        scaler.update_scale(overflow)
        now.last_step = Step(0, scale, not overflow, overflow, scaler.loss_scale)

    return Peer(now, step, *torch_photos(weights, inner))


def deepspeed_engine_peer(policy: Any) -> Peer:
    import torch

    from preamp.deepspeed import initialize
    from preamp.systems.deepspeed_config import Settings

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(torch.from_numpy(start.copy()) for start in STARTS)

        def forward(self, factors: list[np.ndarray]) -> Any:
            return weighted_sum(self.weights, [torch.from_numpy(factor) for factor in factors], torch.sum)

    model = Model()
    inner = torch.optim.Adam(model.parameters(), lr=RATE)
    settings = Settings(precision="float16", autocast=True, policy=policy)
    engine, *_ = initialize(model=model, optimizer=inner, config=settings)

    def step(factors: list[np.ndarray]) -> None:
        engine.backward(engine(factors))
        engine.step()

    return Peer(engine, step, *torch_photos(list(model.weights), inner))


# JAX: every way to take a step is a function of (state, weights, factors) to the next (state, weights).


def jax_peer(policy: Any, make_update: Any) -> Peer:
    import jax
    import optax

    from preamp.jax import check_exhausted, last_step, loss_scaled

    optimizer = loss_scaled(optax.adam(RATE), policy)
    update = make_update(optimizer)
    now = SimpleNamespace(state=optimizer.init(STARTS), weights=STARTS)
    now.check_exhausted = lambda: check_exhausted(now.state, policy)

    def step(factors: list[np.ndarray]) -> None:
        now.state, now.weights = update(now.state, now.weights, factors)
        now.last_step = last_step(now.state)

    return Peer(now, step, lambda: now.weights, lambda: jax.tree.leaves(now.state.inner_state))


def jax_loss(weights: list[Any], factors: list[Any]) -> Any:
    import jax.numpy as jnp

    return weighted_sum(weights, factors, jnp.sum)


def whole_step(optimizer: Any) -> Any:
    import jax

    from preamp.jax import step

    train = step(jax_loss, optimizer)

    def update(state: Any, weights: Any, factors: Any) -> Any:
        _, weights, state = train(weights, state, factors)
        return state, weights

    return jax.jit(update)


def applied_gradients(optimizer: Any) -> Any:
    import jax

    from preamp.jax import apply_gradients, value_and_grad

    def update(state: Any, weights: Any, factors: Any) -> Any:
        _, gradients, state = value_and_grad(jax_loss)(weights, state, factors)
        weights, state = apply_gradients(optimizer, gradients, state, weights)
        return state, weights

    return jax.jit(update)


def optax_idiom(optimizer: Any) -> Any:
    import optax

    from preamp.jax import value_and_grad

    def update(state: Any, weights: Any, factors: Any) -> Any:
        _, gradients, state = value_and_grad(jax_loss)(weights, state, factors)
        updates, state = optimizer.update(gradients, state, weights)
        return state, optax.apply_updates(weights, updates)

    return update


def whole_script(optimizer: Any) -> Any:
    """Take all steps in one program, when the first is asked for; then tell of one after the other."""
    import jax

    update = whole_step(optimizer)
    script = [factors(*step) for step in enumerate(playing.script)]
    stacked = [np.stack(parts) for parts in zip(*script, strict=True)]
    moments: list[Any] = []

    def one(carry: Any, factors: Any) -> Any:
        after = update(*carry, factors)
        return after, after

    def told(state: Any, weights: Any, _: Any) -> Any:
        if not moments:
            _, after = jax.jit(jax.lax.scan, static_argnums=0)(one, (state, weights), stacked)
            moments.extend(jax.tree.map(lambda x, n=n: x[n], after) for n in reversed(range(len(script))))
        return moments.pop()

    return told


# Keras on each backend


def keras_peer(policy: Any, *, compiled: bool) -> Peer:
    import keras

    from preamp.keras import LossScaleOptimizer

    variables = [keras.Variable(start) for start in STARTS]
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(RATE), policy=policy)
    optimizer.build(variables)
    make_step = {"jax": jax_step, "torch": keras_torch_step, "tensorflow": keras_tensorflow_step}[BACKEND]
    step = make_step(optimizer, variables, compiled)

    def arrays(variables: list[Any]) -> list[Any]:
        return [keras.ops.convert_to_numpy(variable.value) for variable in variables]

    inner = optimizer.inner_optimizer
    return Peer(optimizer, step, lambda: arrays(variables), lambda: arrays(inner.variables))


def jax_step(optimizer: Any, variables: list[Any], compiled: bool) -> Any:
    import jax

    def eager(factors: list[np.ndarray]) -> None:
        def scaled(values: list[Any]) -> Any:
            return optimizer.scale_loss(weighted_sum(values, factors, jax.numpy.sum))

        optimizer.apply(jax.grad(scaled)([variable.value for variable in variables]), variables)

    @jax.jit
    def update(values: list[Any], state: list[Any], factors: list[Any]) -> Any:
        def scaled(values: list[Any]) -> Any:
            return optimizer.stateless_scale_loss(state, weighted_sum(values, factors, jax.numpy.sum))

        return optimizer.stateless_apply(state, jax.grad(scaled)(values), values)

    def stateless(factors: list[np.ndarray]) -> None:
        parts = variables, optimizer.variables
        after = update(*[[variable.value for variable in part] for part in parts], factors)
        for part, values in zip(parts, after, strict=True):
            for variable, value in zip(part, values, strict=True):
                variable.assign(value)

    return stateless if compiled else eager


def keras_torch_step(optimizer: Any, variables: list[Any], compiled: bool) -> Any:
    import torch

    def step(factors: list[np.ndarray]) -> None:
        values = [variable.value for variable in variables]
        loss = weighted_sum(values, [torch.from_numpy(factor) for factor in factors], torch.sum)
        for value in values:
            value.grad = None
        optimizer.scale_loss(loss).backward()
        optimizer.apply([value.grad for value in values], variables)

    return step


def keras_tensorflow_step(optimizer: Any, variables: list[Any], compiled: bool) -> Any:
    import tensorflow as tf

    def step(factors: list[Any]) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(weighted_sum([v.value for v in variables], factors, tf.reduce_sum))
        optimizer.apply(tape.gradient(loss, [variable.value for variable in variables]), variables)

    return in_graph(step) if compiled else on_tensors(step)


# TensorFlow, over each kind of optimizer


def tensorflow_peer(policy: Any, *, kind: str, compiled: bool) -> Peer:
    import keras
    import tensorflow as tf
    import tf_keras

    from preamp.tensorflow import LossScaleOptimizer

    modules = {
        "legacy": tf_keras.optimizers.legacy,
        "tf_keras": tf_keras.optimizers,
        "keras": keras.optimizers,
    }
    variables = [tf.Variable(start) for start in STARTS]
    optimizer = LossScaleOptimizer(modules[kind].Adam(RATE), policy=policy)
    inner = optimizer.inner_optimizer
    if kind != "legacy":
        inner.build(variables) if kind == "tf_keras" else optimizer.build(variables)

    def step(factors: list[Any]) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(weighted_sum(variables, factors, tf.reduce_sum))
        gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, variables))
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def state() -> list[Any]:
        """Return all but the steps of tf_keras's optimizers, which by its document count skipped ones."""
        if kind == "keras":
            return [variable.numpy() for variable in inner.variables]
        return [variable.numpy() for variable in inner.variables() if variable is not inner.iterations]

    return Peer(
        optimizer,
        in_graph(step) if compiled else on_tensors(step),
        lambda: [variable.numpy() for variable in variables],
        state,
    )


def on_tensors(step: Any) -> Any:
    import tensorflow as tf

    return lambda factors: step([tf.constant(factor) for factor in factors])


def in_graph(step: Any) -> Any:
    import tensorflow as tf

    return on_tensors(tf.function(step, autograph=False))


class Row(NamedTuple):
    """One adapter: in which framework, on which backend of Keras, and what makes a peer for a policy.

    Attributes:
        only: the policies that the adapter has words for; None for all.
        without: the policies that a row beside it has, since programs are compiled anew for each.
        is_repeated: whether another row does the same: in a graph, which is quicker, or for newer optimizers.
        raises: whether the step at which a policy gives up raises.
        takes_norm: whether the record has the norm of the gradients.
    """

    framework: str
    backend: str
    adapter: str
    make: Callable[[Any], Peer]
    only: frozenset[str] | None = None
    without: frozenset[str] = frozenset()
    is_repeated: bool = False
    raises: bool = True
    takes_norm: bool = True

    def policies(self) -> dict[str, Any]:
        """Return the policies that the adapter has words for, but for those that another row has."""
        names = POLICIES.keys() if self.only is None else self.only
        return {name: rule for name, rule in POLICIES.items() if name in names - self.without}


HALVES = (
    frozenset({"keras", "hysteresis", "fixed"}),
    frozenset({"torch", "tf_keras, at its floor", "sees the amax", "tolerant"}),
)


def in_halves(rows: list[Row]) -> list[Row]:
    """Have half of the policies of each compiled row wait for `make test-slow`: by turns, these or those."""
    quick = [row._replace(without=HALVES[number % 2]) for number, row in enumerate(rows)]
    others = [
        row._replace(adapter=f"{row.adapter}, other policies", only=row.without, is_repeated=True)
        for row in quick
    ]
    return [*quick, *(row._replace(without=frozenset()) for row in others)]


ROWS = [
    Row("torch", "torch", "GradScaler", torch_peer),
    Row("torch", "torch", "GradScaler, fused", lambda policy: torch_peer(policy, fused=True)),
    Row(
        "torch",
        "torch",
        "DeepSpeed's scaler",
        deepspeed_scaler_peer,
        only=frozenset({"hysteresis"}),
        takes_norm=False,
    ),
    Row("torch", "torch", "DeepSpeed's engine", deepspeed_engine_peer),
    *in_halves(
        [
            Row("jax", "jax", "step, compiled", lambda policy: jax_peer(policy, whole_step), raises=False),
            Row(
                "jax",
                "jax",
                "apply_gradients, compiled",
                lambda policy: jax_peer(policy, applied_gradients),
                raises=False,
            ),
            Row("jax", "jax", "update, eager", lambda policy: jax_peer(policy, optax_idiom), raises=False),
            Row(
                "jax", "jax", "step, in one scan", lambda policy: jax_peer(policy, whole_script), raises=False
            ),
            *[
                Row("keras", backend, "compiled", partial(keras_peer, compiled=True), raises=False)
                for backend in ("jax", "tensorflow")  # nothing compiles it on PyTorch
            ],
        ]
    ),
    *[
        Row("keras", backend, "eager", partial(keras_peer, compiled=False), is_repeated=backend != "torch")
        for backend in ("jax", "torch", "tensorflow")
    ],
    *in_halves(
        [
            *[
                Row(
                    "tensorflow",
                    "tensorflow",
                    f"{kind}, {'compiled' if compiled else 'eager'}",
                    partial(tensorflow_peer, kind=kind, compiled=compiled),
                    is_repeated=not compiled or kind == "legacy",
                    raises=not compiled,
                )
                for compiled in (False, True)
                for kind in ("legacy", "tf_keras", "keras")
            ],
        ]
    ),
]


def walk(peer: Peer, script: str = SCRIPT) -> list[dict[str, Any]]:
    """Return what each step of a script came to, and whether it changed a bit of weights and state."""
    steps = []
    for number, mark in enumerate(script):
        before = photograph(peer)
        gave_up = False
        try:
            peer.step(factors(number, mark))
            if hasattr(peer.optimizer, "check_exhausted"):
                peer.optimizer.check_exhausted()
        except ScaleExhausted:
            gave_up = True
        weights, state = (now != then for now, then in zip(photograph(peer), before, strict=True))
        step = peer.optimizer.last_step
        steps.append(
            {
                "trace": None if gave_up else [step.scale, step.finite, step.skipped, step.new_scale],
                "norm": None if gave_up else step.grad_norm,
                "moved": {"weights": weights, "state": state},
            }
        )
        if gave_up:
            break
    return steps


def exhaust(peer: Peer) -> dict[str, Any]:
    """Go on after a policy has given up; return when and where it gave up, and what is said at the end."""
    raised, said = [], None
    for number, mark in enumerate(EXHAUSTING):
        try:
            peer.step(factors(number, mark))
        except ScaleExhausted as error:
            raised.append([number, error.scale, error.overflows])
    try:
        if hasattr(peer.optimizer, "check_exhausted"):
            peer.optimizer.check_exhausted()
    except ScaleExhausted as error:
        said = [error.scale, error.overflows]
    return {"raised": raised, "said": said, "can say": hasattr(peer.optimizer, "check_exhausted")}


def photograph(peer: Peer) -> list[list[bytes]]:
    return [[np.asarray(array).tobytes() for array in part()] for part in (peer.weights, peer.state)]


if __name__ == "__main__":
    file, *numbers = sys.argv[1:]
    rows = [ROWS[int(number)] for number in numbers]
    found = [{name: walk(row.make(policy)) for name, policy in row.policies().items()} for row in rows]
    playing.script = EXHAUSTING
    exhausted = [None if row.only else exhaust(row.make(GIVES_UP_TWICE)) for row in rows]
    Path(file).write_text(json.dumps(list(zip(found, exhausted, strict=True))))
