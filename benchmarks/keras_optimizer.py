"""What the Keras optimizer costs a training step, beside Keras's own. Reports; asserts nothing.

Run: python benchmarks/keras_optimizer.py [--rounds 41] [--backend torch]

A 784-512-512-10 network, Adam, 128 rows. One process per backend; in it three training steps, compiled as
Keras compiles them, take turns: bare (Adam alone), stock (Keras's LossScaleOptimizer around it) and ours.
Times are medians over the rounds; what a wrapper adds is the median of the paired differences.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

BACKENDS = ("torch", "jax", "tensorflow")
ROWS, STEPS = 128, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument("--policy", default="float32", help="a Keras dtype policy, such as mixed_float16")
    parser.add_argument("--jit", action="store_true", help="XLA on tensorflow, torch.compile on torch")
    arguments = parser.parse_args()
    if arguments.backend is None:
        for backend in BACKENDS:
            environment = {
                **os.environ,
                "KERAS_BACKEND": backend,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "OMP_NUM_THREADS": "1",
                "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
                "TF_NUM_INTRAOP_THREADS": "1",
                "TF_NUM_INTEROP_THREADS": "1",
            }
            words = [sys.executable, __file__, *sys.argv[1:], "--backend", backend]
            done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
            print(done.stdout or done.stderr[-3000:], end="", flush=True)
        return
    report(arguments)


def report(arguments: argparse.Namespace) -> None:
    """Time and count one backend's steps."""
    import keras

    keras.config.set_dtype_policy(arguments.policy)
    steps = {kind: prepare(kind, arguments.jit) for kind in ("bare", "stock", "ours")}
    for step, _ in steps.values():
        for _ in range(3):
            step()
    walls, times = interleaved({kind: step for kind, (step, _) in steps.items()}, arguments.rounds)
    print(f"{arguments.backend}, Adam, {arguments.policy}{', jit' if arguments.jit else ''}")
    print_added("CPU", times)
    print_added("wall", walls)
    if arguments.backend != "torch":
        report_alone(arguments.backend, arguments.rounds)
    for kind, (_, counts) in steps.items():
        print(f"  {kind:5} " + ", ".join(f"{value} {name}" for name, value in counts().items()))


def print_added(name: str, seconds: dict[str, list[float]]) -> None:
    """Print what each wrapper adds to the bare optimizer."""
    bare = statistics.median(seconds["bare"])
    added = {
        kind: statistics.median(a - b for a, b in zip(seconds[kind], seconds["bare"], strict=True))
        for kind in ("stock", "ours")
    }
    print(
        f"  {name:5} bare {1e3 * bare:6.2f} ms, stock +{1e3 * added['stock']:5.2f} ms, "
        f"ours +{1e3 * added['ours']:5.2f} ms: {added['ours'] / added['stock']:.2f} of stock's"
    )


def report_alone(backend: str, rounds: int) -> None:
    """Time the compiled update alone: what the wrappers add to it drowns in a whole step's noise."""
    update = {"jax": update_on_jax, "tensorflow": update_on_tensorflow}[backend]
    _, times = interleaved({kind: update(wrapped(kind)) for kind in ("bare", "stock", "ours")}, 5 * rounds)
    print_added("alone", times)


def weights_of(optimizer: Any) -> tuple[list[Any], list[Any]]:
    """Return the network's variables, which the optimizer is built with, and gradients of them."""
    import keras
    import numpy as np

    shapes = [(784, 512), (512,), (512, 512), (512,), (512, 10), (10,)]
    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]
    optimizer.build(variables)
    if hasattr(optimizer, "scale_loss"):
        optimizer.scale_loss(1.0)
    rng = np.random.default_rng(0)
    return variables, [keras.ops.convert_to_tensor(rng.normal(size=s), "float32") for s in shapes]


def update_on_jax(optimizer: Any) -> Callable[[], None]:
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


def update_on_tensorflow(optimizer: Any) -> Callable[[], None]:
    import tensorflow as tf

    variables, gradients = weights_of(optimizer)
    graph = tf.function(lambda: optimizer.apply(gradients, variables), autograph=False)
    graph()
    return graph  # type: ignore[no-any-return]


def wrapped(kind: str) -> Any:
    """Return Adam, bare or wrapped."""
    import keras

    from preamp.keras import LossScaleOptimizer

    wrap = {"stock": keras.optimizers.LossScaleOptimizer, "ours": LossScaleOptimizer}
    adam = keras.optimizers.Adam(1e-3)
    return adam if kind == "bare" else wrap[kind](adam)


def interleaved(
    steps: dict[str, Callable[[], None]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return wall and CPU seconds per step, in an order that changes every round."""
    walls: dict[str, list[float]] = {kind: [] for kind in steps}
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    kinds = list(steps)
    for number in range(rounds):
        for kind in kinds[number % 3 :] + kinds[: number % 3]:
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                steps[kind]()
            walls[kind].append((time.perf_counter() - wall) / STEPS)
            times[kind].append((time.process_time() - cpu) / STEPS)
    return walls, times


def prepare(kind: str, jit: bool) -> tuple[Callable[[], None], Callable[[], dict[str, Any]]]:
    """Return a training step, and what counts its work."""
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
    model.compile(wrapped(kind), loss, auto_scale_loss=False, jit_compile=jit or "auto")
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
        return {"operators": counting.calls, "host reads": counting.reads + lists}

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
            "instructions": text.count(" = "),
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
        return {"nodes": len(nodes), "conds": sum(node.op in ("If", "StatelessIf") for node in nodes)}

    return lambda: step(data)["loss"].numpy(), counts


if __name__ == "__main__":
    main()
