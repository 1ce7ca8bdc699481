"""What loss scaling costs a compiled training step, beside its peers. Reports; asserts nothing.

Run: python benchmarks/jax_step.py [--rounds 15] [--model gpt] [--compute float16] [--counts] [--quick]

Whole steps of AdamW with donated state: forward, backward, check, clip, update. Those of one table take turns
in one process. A number is relative to the step without loss scaling, with optax's own clip where there is
one: of times the median of the rounds' ratios, of the rest the compiler's own count. With `--compute float16`
every variant trains the same network, cast by hand; mpx casts its arguments besides, as it always does.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax_models as models
import jmp
import mpx
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale

from preamp import Dynamic
from preamp.jax import autocast, loss_scaled, scaled_value_and_grad, step

INIT, RATE, MAX_NORM = 2.0**15, 1e-4, 1.0
MLP, ROWS = (784, 2048, 2048, 2048, 256, 10), 64
GPT = models.Sizes(layers=5, width=448, heads=7, words=896, length=80, batch=4)
SMALL_MLP = (64, 32, 10)
SMALL_GPT = models.Sizes(layers=1, width=32, heads=2, words=64, length=16, batch=2)
LIBRARIES = ("jax", "optax", "jmp", "flax", "mixed_precision_for_JAX")
State = Any
Step = Callable[[State, Any], tuple[State, Any]]
Times = dict[str, list[tuple[float, float]]]
Loss = Callable[[Any, Any], Any]
Make = Callable[["Task", Any], tuple[State, Step]]
select = jmp.select_tree


class Task(NamedTuple):
    """What a variant is to train: a loss, cast by hand and not, and the norm to clip by."""

    hand: Loss
    plain: Loss
    max_norm: float | None

    def optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer, with optax's own clip."""
        clip = [] if self.max_norm is None else [optax.clip_by_global_norm(self.max_norm)]
        return optax.chain(*clip, adamw())


def adamw() -> optax.GradientTransformation:
    return optax.adamw(RATE)


def unscaled(task: Task, params: Any) -> tuple[State, Step]:
    """No loss scaling at all: what the others are compared with."""
    optimizer = task.optimizer()

    def advance(state: State, batch: Any) -> tuple[State, Any]:
        params, opt_state = state
        loss, gradients = jax.value_and_grad(task.hand)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return (params, optimizer.init(params)), advance


def preamp_step(task: Task, params: Any, loss_fn: Loss | None = None) -> tuple[State, Step]:
    """Our whole step, in one conditional."""
    optimizer = loss_scaled(adamw(), Dynamic(init_scale=INIT), max_norm=task.max_norm)
    whole = step(loss_fn or task.hand, optimizer)

    def advance(state: State, batch: Any) -> tuple[State, Any]:
        loss, params, opt_state = whole(*state, batch)
        return (params, opt_state), loss

    return (params, optimizer.init(params)), advance


def preamp_step_autocast(task: Task, params: Any) -> tuple[State, Step]:
    """The same, of a network that autocast casts instead of a hand."""
    return preamp_step(task, params, autocast(task.plain, jnp.float16))


def preamp_loss_scaled(task: Task, params: Any) -> tuple[State, Step]:
    """Our transformation in a loop written for any other of optax."""
    optimizer = loss_scaled(adamw(), Dynamic(init_scale=INIT), max_norm=task.max_norm)
    gradient = scaled_value_and_grad(task.hand)

    def advance(state: State, batch: Any) -> tuple[State, Any]:
        params, opt_state = state
        loss, gradients = gradient(opt_state, params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return (params, optimizer.init(params)), advance


def with_jmp(task: Task, params: Any) -> tuple[State, Step]:
    """DynamicLossScale, as the README has it. It cannot be an argument of `jit(f).lower`: rebuilt inside."""
    optimizer = task.optimizer()

    def advance(state: State, batch: Any) -> tuple[State, Any]:
        params, opt_state, numbers = state
        scale = jmp.DynamicLossScale(*numbers)
        scaled = lambda params: scale.scale(task.hand(params, batch))  # noqa: E731
        loss, gradients = jax.value_and_grad(scaled)(params)
        gradients = scale.unscale(gradients)
        finite = jmp.all_finite(gradients)
        updates, new_opt_state = optimizer.update(gradients, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        params, opt_state = select(finite, (new_params, new_opt_state), (params, opt_state))
        after = scale.adjust(finite)
        return (params, opt_state, (after.loss_scale, after.counter)), scale.unscale(loss)

    return (params, optimizer.init(params), (jnp.float32(INIT), jnp.int32(0))), advance


def with_flax(task: Task, params: Any) -> tuple[State, Step]:
    """DynamicScale, as flax's examples have it."""
    optimizer = task.optimizer()

    def advance(state: State, batch: Any) -> tuple[State, Any]:
        params, opt_state, scale = state
        scale, finite, loss, gradients = scale.value_and_grad(task.hand)(params, batch)
        updates, new_opt_state = optimizer.update(gradients, opt_state, params)
        new = (optax.apply_updates(params, updates), new_opt_state)
        params, opt_state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, opt_state))
        return (params, opt_state, scale), loss

    scale = DynamicScale(scale=jnp.float32(INIT), fin_steps=jnp.int32(0))
    return (params, optimizer.init(params), scale), advance


def with_mpx(task: Task, params: Any) -> tuple[State, Step]:
    """The gradients and the update that mpx offers."""
    optimizer = task.optimizer()

    def advance(state: State, batch: Any) -> tuple[State, Any]:
        params, opt_state, scale = state
        gradient = mpx.filter_value_and_grad(task.hand, scale)
        loss, scale, finite, gradients = gradient(params, batch)
        params, opt_state = mpx.optimizer_update(params, optimizer, opt_state, gradients, finite)
        return (params, opt_state, scale), loss

    scale = mpx.DynamicLossScaling(jnp.float32(INIT), jnp.float32(1.0))
    return (params, optimizer.init(params), scale), advance


def by_hand(task: Task, params: Any) -> tuple[State, Step]:
    """A fixed scale, and optax's apply_if_finite."""
    optimizer = optax.apply_if_finite(task.optimizer(), max_consecutive_errors=100)

    def advance(state: State, batch: Any) -> tuple[State, Any]:
        params, opt_state, scale = state
        scaled = lambda params: task.hand(params, batch) * scale  # noqa: E731
        loss, gradients = jax.value_and_grad(scaled)(params)
        gradients = jax.tree.map(lambda g: g * (1 / scale), gradients)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, scale), loss / scale

    return (params, optimizer.init(params), jnp.float32(INIT)), advance


VARIANTS: dict[str, Make] = {
    "no loss scaling": unscaled,
    "preamp step": preamp_step,
    "preamp loss_scaled": preamp_loss_scaled,
    "jmp": with_jmp,
    "flax DynamicScale": with_flax,
    "apply_if_finite": by_hand,
}
IN_FLOAT16 = {"preamp step + autocast": preamp_step_autocast, "mpx": with_mpx}


class Compiled(NamedTuple):
    """A training step, and what the compiler says of it."""

    run: Callable[[], None]
    megabytes: float
    gigaflops: float
    temporary: float
    conditionals: int
    seconds: float


def compiled(
    make: Callable[[Task, Any], tuple[State, Step]], task: Task, params: Any, batch: Any
) -> Compiled:
    """Compile a variant's step with its state donated."""
    state, advance = make(task, params)
    state = jax.tree.map(jnp.array, state)
    began = time.perf_counter()
    program = jax.jit(advance, donate_argnums=0).lower(state, batch).compile()
    seconds = time.perf_counter() - began
    cost, memory = program.cost_analysis(), program.memory_analysis()

    def run() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(program(state, batch))

    return Compiled(
        run,
        cost["bytes accessed"] / 1e6,
        cost["flops"] / 1e9,
        memory.temp_size_in_bytes / 1e6,
        program.as_text().count(" conditional("),
        seconds,
    )


def interleaved(steps: dict[str, Compiled], rounds: int) -> Times:
    """Return wall and CPU seconds of a step, a pair a round, in an order that changes every round."""
    times: Times = {name: [] for name in steps}
    names = list(steps)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            wall, cpu = time.perf_counter(), time.process_time()
            steps[name].run()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def ratios(times: Times, name: str) -> list[str]:
    """Return wall and CPU time over those of the first variant."""
    pairs = list(zip(times[name], next(iter(times.values())), strict=True))
    return [f"{statistics.median(a[clock] / b[clock] for a, b in pairs):.3f}" for clock in (0, 1)]


def report(title: str, steps: dict[str, Compiled], rounds: int) -> None:
    """Print one table."""
    base = next(iter(steps.values()))
    times: Times = {}
    took = ""
    if rounds:
        interleaved(steps, 2)
        times = interleaved(steps, rounds)
        took = f"{1e3 * statistics.median(wall for wall, _ in next(iter(times.values()))):.0f} ms, "
    print(f"\n{title}; without loss scaling {took}{base.megabytes:.0f} MB, {base.gigaflops:.1f} GFLOP")
    print(f"{'':24}{'wall':>7}{'CPU':>7}{'bytes':>8}{'FLOPs':>8}{'temp MB':>9}{'conds':>7}{'compile s':>10}")
    for name, one in steps.items():
        wall, cpu = ratios(times, name) if times else ("-", "-")
        relative = f"{one.megabytes / base.megabytes:8.3f}{one.gigaflops / base.gigaflops:8.3f}"
        rest = f"{one.temporary:9.1f}{one.conditionals:7}{one.seconds:10.1f}"
        print(f"{name:24}{wall:>7}{cpu:>7}{relative}{rest}", flush=True)


def prepare(model: str, quick: bool) -> tuple[Any, Any, Callable[[Any], Loss]]:
    """Return parameters, a batch, and what makes the loss for a dtype."""
    rng = np.random.default_rng(0)
    if model == "mlp":
        widths = SMALL_MLP if quick else MLP
        batch = models.mlp_batch(rng, widths, ROWS)
        return models.mlp_params(rng, widths), batch, lambda low: lambda p, b: models.mlp_loss(p, b, low)
    sizes = SMALL_GPT if quick else GPT
    batch = models.gpt_batch(rng, sizes)
    make_loss = lambda low: lambda p, b: models.gpt_loss(p, b, sizes.heads, low)  # noqa: E731
    return models.gpt_params(rng, sizes), batch, make_loss


def main() -> None:
    """Print a table for each model, dtype and clip."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", choices=("gpt", "mlp"))
    parser.add_argument("--compute", choices=("float32", "float16"))
    parser.add_argument("--counts", action="store_true", help="compile only: what needs no quiet machine")
    parser.add_argument("--quick", action="store_true", help="tiny models and two rounds")
    options = parser.parse_args()
    rounds = 0 if options.counts else 2 if options.quick else options.rounds
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    print(f"{versions}; {jax.default_backend()}, {rounds} rounds")
    for model in (options.model,) if options.model else ("gpt", "mlp"):
        params, batch, make_loss = prepare(model, options.quick)
        for compute in (options.compute,) if options.compute else ("float32", "float16"):
            for max_norm in (None, MAX_NORM):
                low = None if compute == "float32" else jnp.float16
                task = Task(make_loss(low), make_loss(None), max_norm)
                made = {**VARIANTS, **(IN_FLOAT16 if low else {})}
                steps = {name: compiled(make, task, params, batch) for name, make in made.items()}
                clip = "" if max_norm is None else f", clip at {max_norm:g}"
                report(f"{model} {models.count(params) / 1e6:.1f}M {compute}{clip}", steps, rounds)
                del steps
                gc.collect()


if __name__ == "__main__":
    main()
