"""What preamp.keras.LossScaleOptimizer costs, compared with Keras's own, on each backend. On one thread.

Run: python benchmarks/keras_optimizer.py [--backend jax] [--device cuda] [--quick]. Reports; asserts nothing.

A 784-512-512-10 network, Adam, 128 rows. Training steps take turns, compiled as Keras compiles them: Adam
alone, Keras's wrapper around it and ours, without a guard and with one. On JAX and TensorFlow the compiled
update is also measured alone, because in a whole step what a wrapper adds is lost in the noise. A process
has one backend.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from rows import Area, Options, Row, main
from timing import Times, Work

ROWS = 128
ALONE, KERAS = "Adam alone", "keras.optimizers.LossScaleOptimizer"
KINDS = ("preamp", KERAS, ALONE)
GUARDED, BY_NORM = "preamp with SpikeGuard", "preamp with SpikeGuard on the norm"
UNGUARDED = "preamp without a guard"
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def measure(options: Options) -> Iterator[Row]:
    """Yield the rows of a backend. Keras is imported here because it reads the environment on import."""
    os.environ.update(ONE_THREAD, KERAS_BACKEND=options.backend)
    import keras

    area = Area(f"keras on {options.backend}", options.device)
    for policy in ("float32",) if options.quick else ("float32", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        yield from steps(options, area, policy)
    keras.config.set_dtype_policy("float32")
    if options.backend != "torch":
        yield from updates(options, area)


def steps(options: Options, area: Area, policy: str) -> Iterator[Row]:
    """Yield the rows for whole training steps, and for what is counted in them."""
    made = {kind: prepare(kind) for kind in (*KINDS, GUARDED)}
    times = options.interleaved({kind: step for kind, (step, _) in made.items()})
    yield from area.timed(f"a training step, {policy}", times, "preamp", [KERAS], [ALONE])
    yield area.added(f"what is added to a training step, {policy}", times, ALONE, KERAS)
    yield from guarded_rows(area, f"a training step, {policy}", times, GUARDED)
    guarded, ours, theirs = (made[kind][1]() for kind in (GUARDED, "preamp", KERAS))
    for unit, figure in ours.items():
        yield area.counted(f"in a training step, {policy}", KERAS, figure, theirs[unit], unit)
    for unit, figure in guarded.items():
        what = f"in a training step, {policy}, guard"
        yield area.counted(what, UNGUARDED, figure, ours[unit], unit, peer=False)


def updates(options: Options, area: Area) -> Iterator[Row]:
    """Yield rows of the compiled update."""
    update = {"jax": update_on_jax, "tensorflow": update_on_tensorflow}[options.backend]
    times = options.interleaved({kind: update(wrapped(kind)) for kind in (*KINDS, BY_NORM)})
    yield from area.timed("the compiled update", times, "preamp", [KERAS], [ALONE])
    yield area.added("what is added to the compiled update", times, ALONE, KERAS)
    yield from guarded_rows(area, "the compiled update", times, BY_NORM)


def guarded_rows(area: Area, what: str, times: Times, guarded: str) -> Iterator[Row]:
    """Yield the row that compares with and without a guard."""
    named = {guarded: times[guarded], UNGUARDED: times["preamp"]}
    yield from area.timed(f"{what}, guard", named, guarded, floors=[UNGUARDED])


def weights_of(optimizer: Any) -> tuple[list[Any], list[Any]]:
    """Build the optimizer with the network's variables; return them and gradients for them."""
    import keras
    import numpy as np

    shapes = [(784, 512), (512,), (512, 512), (512,), (512, 10), (10,)]
    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]
    optimizer.build(variables)
    if hasattr(optimizer, "scale_loss"):
        optimizer.scale_loss(1.0)
    rng = np.random.default_rng(0)
    return variables, [keras.ops.convert_to_tensor(rng.normal(size=s), "float32") for s in shapes]


def update_on_jax(optimizer: Any) -> Work:
    import jax

    variables, gradients = weights_of(optimizer)
    update = jax.jit(optimizer.stateless_apply, donate_argnums=(0, 2))
    weights, state = [[jax.numpy.array(v.value) for v in part] for part in (variables, optimizer.variables)]

    def once() -> None:
        nonlocal weights, state
        weights, state = update(state, gradients, weights)
        weights[0].block_until_ready()

    once()
    once()
    return once


def update_on_tensorflow(optimizer: Any) -> Work:
    import tensorflow as tf

    variables, gradients = weights_of(optimizer)
    graph = tf.function(lambda: optimizer.apply(gradients, variables), autograph=False)
    graph()
    return graph  # type: ignore[no-any-return]


def wrapped(kind: str) -> Any:
    """Return Adam, bare or wrapped."""
    import keras

    from preamp.guards import SpikeGuard
    from preamp.keras import LossScaleOptimizer

    adam = keras.optimizers.Adam(1e-3)
    if kind == ALONE:
        return adam
    if kind == KERAS:
        return keras.optimizers.LossScaleOptimizer(adam)
    # The compiled update gets only gradients, so its guard cannot use the loss.
    guards = {GUARDED: SpikeGuard(), BY_NORM: SpikeGuard(watch="grad_norm")}
    return LossScaleOptimizer(adam, guard=guards.get(kind))


def prepare(kind: str) -> tuple[Work, Callable[[], dict[str, Any]]]:
    """Return a training step, and a function that counts its work."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    model = keras.Sequential(
        [
            keras.layers.Input((784,)),
            dense(512, activation="relu"),
            dense(512, activation="relu"),
            dense(10, dtype="float32"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(wrapped(kind), loss, auto_scale_loss=False)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(ROWS, 784)).astype("float32")
    labels = rng.integers(0, 10, size=ROWS)
    model.train_on_batch(rows, labels)
    return {"torch": on_torch, "jax": on_jax, "tensorflow": on_tensorflow}[keras.backend.backend()](
        model, rows, labels
    )


def on_torch(model: Any, rows: Any, labels: Any) -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    data = (torch.from_numpy(rows), torch.from_numpy(labels))
    model.make_train_function()

    class Counting(TorchDispatchMode):
        calls = reads = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            self.reads += "_local_scalar_dense" in str(func)
            return func(*args, **(kwargs or {}))

    def counts() -> dict[str, int]:
        plain, lists = torch.Tensor.tolist, 0

        def tolist(tensor: Any) -> Any:
            nonlocal lists
            lists += 1
            return plain(tensor)

        torch.Tensor.tolist = tolist  # type: ignore[method-assign]
        try:
            with Counting() as counting:
                model.train_step(data)
        finally:
            torch.Tensor.tolist = plain  # type: ignore[method-assign]
        return {"operators": counting.calls, "reads to the host": counting.reads + lists}

    return lambda: model.train_function([data]), counts


def on_jax(model: Any, rows: Any, labels: Any) -> Any:
    import jax

    data = (jax.numpy.asarray(rows), jax.numpy.asarray(labels))
    step = jax.jit(model.train_step, donate_argnums=0)
    state = model._get_jax_state(
        trainable_variables=True,
        non_trainable_variables=True,
        optimizer_variables=True,
        metrics_variables=True,
    )
    state = jax.tree.map(jax.numpy.array, state)
    compiled = step.lower(state, data).compile()
    cost, text = compiled.cost_analysis(), compiled.as_text()

    def once() -> None:
        nonlocal state
        logs, state = step(state, data)
        logs["loss"].block_until_ready()

    def counts() -> dict[str, Any]:
        return {
            "MB accessed": round(cost["bytes accessed"] / 1e6, 1),
            "conditionals": text.count(" conditional("),
            "instructions of XLA": text.count(" = "),
        }

    return once, counts


def on_tensorflow(model: Any, rows: Any, labels: Any) -> Any:
    import tensorflow as tf

    data = (tf.constant(rows), tf.constant(labels))
    step = tf.function(model.train_step, jit_compile=model.jit_compile, reduce_retracing=True)
    graph = step.get_concrete_function(data).graph

    def counts() -> dict[str, int]:
        everywhere = [node for f in graph.as_graph_def().library.function for node in f.node_def]
        nodes = [*graph.as_graph_def().node, *everywhere]
        conditionals = sum(node.op in ("If", "StatelessIf") for node in nodes)
        return {"nodes of the graph": len(nodes), "conditionals": conditionals}

    return lambda: step(data)["loss"].numpy(), counts


if __name__ == "__main__":
    main(measure, __doc__, backend=("torch", "jax", "tensorflow"))
