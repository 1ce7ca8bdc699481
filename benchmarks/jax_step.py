"""What loss scaling costs in a compiled JAX training step, compared with peers and with none. On all cores.

Run: python benchmarks/jax_step.py [--model mlp] [--device cuda] [--quick]. Reports; asserts nothing.

Whole steps of AdamW with donated state take turns: forward, backward, check, clip, update. The peers and the
step without loss scaling clip with optax. Bytes are the compiler's count. In float16 all train the same
network, cast by hand; mpx also casts its arguments, as it always does. A step with a guard is compared with
ours without one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax_models as models
import jmp
import mpx
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale
from rows import Area, Options, Row, main
from timing import Work

from preamp import Dynamic, guards
from preamp.jax import autocast, loss_scaled, step, value_and_grad

INIT, RATE, MAX_NORM = 2.0**15, 1e-4, 1.0
MLP, ROWS = (784, 2048, 2048, 2048, 256, 10), 64
GPT = models.Sizes(layers=3, width=576, heads=9, words=896, length=80, batch=4)
SMALL_MLP = (64, 32, 10)
SMALL_GPT = models.Sizes(layers=1, width=32, heads=2, words=64, length=16, batch=2)
State = Any
Step = Callable[[State, Any], tuple[State, Any]]
Loss = Callable[[Any, Any], Any]
Make = Callable[["Task", Any], tuple[State, Step]]
select = jmp.select_tree


class Task(NamedTuple):
    """What a variant trains: a loss with casts by hand, the same without, and the norm to clip to."""

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


def preamp_step(
    task: Task, params: Any, loss_fn: Loss | None = None, guard: guards.Guard[Any] | None = None
) -> tuple[State, Step]:
    """Our whole step, in one conditional."""
    optimizer = loss_scaled(adamw(), Dynamic(init_scale=INIT), max_norm=task.max_norm, guard=guard)
    whole = step(loss_fn or task.hand, optimizer)

    def advance(state: State, batch: Any) -> tuple[State, Any]:
        loss, params, opt_state = whole(*state, batch)
        return (params, opt_state), loss

    return (params, optimizer.init(params)), advance


def preamp_step_autocast(task: Task, params: Any) -> tuple[State, Step]:
    """The same, with autocast instead of casts by hand."""
    return preamp_step(task, params, autocast(task.plain, jnp.float16))


def preamp_step_guarded(task: Task, params: Any) -> tuple[State, Step]:
    """The same, with a guard."""
    return preamp_step(task, params, guard=guards.SpikeGuard())


def preamp_loss_scaled(task: Task, params: Any) -> tuple[State, Step]:
    """Our transformation in a loop written for any optax transformation."""
    optimizer = loss_scaled(adamw(), Dynamic(init_scale=INIT), max_norm=task.max_norm)
    gradient = value_and_grad(task.hand)

    def advance(state: State, batch: Any) -> tuple[State, Any]:
        params, opt_state = state
        loss, gradients, opt_state = gradient(params, opt_state, batch)
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
    """The gradients and the update of mpx."""
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


STEP, TRANSFORMATION, CAST = "preamp's step", "preamp's loss_scaled", "preamp's step and autocast"
NONE = "no loss scaling"
GUARDED, UNGUARDED = "preamp's step with SpikeGuard", "preamp without a guard"
PEERS: dict[str, Make] = {
    "jmp": with_jmp,
    "flax DynamicScale": with_flax,
    "optax apply_if_finite": by_hand,
}
VARIANTS = {STEP: preamp_step, TRANSFORMATION: preamp_loss_scaled, **PEERS, NONE: unscaled}
IN_FLOAT16: dict[str, Make] = {CAST: preamp_step_autocast, "mpx": with_mpx}
WITH_CLIP: dict[str, Make] = {GUARDED: preamp_step_guarded}


class Compiled(NamedTuple):
    """A training step, and what the compiler says of it."""

    run: Work
    megabytes: float


def compiled(make: Make, task: Task, params: Any, batch: Any) -> Compiled:
    """Compile a variant's step with its state donated."""
    state, advance = make(task, params)
    state = jax.tree.map(jnp.array, state)
    program = jax.jit(advance, donate_argnums=0).lower(state, batch).compile()

    def run() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(program(state, batch))

    return Compiled(run, program.cost_analysis()["bytes accessed"] / 1e6)


def rows_of(area: Area, what: str, steps: dict[str, Compiled], options: Options) -> Iterator[Row]:
    """Yield the time and the bytes accessed of each of our ways to write a step."""
    times = options.interleaved({name: step.run for name, step in steps.items()})
    peers = [name for name in steps if name in PEERS or name == "mpx"]
    compared = {STEP: (peers, [NONE]), TRANSFORMATION: ([], [NONE])}
    if CAST in steps:
        compared[CAST] = ([STEP], [])
    for ours, (same, less) in compared.items():
        way = ours.removeprefix("preamp's ")
        yield from area.timed(f"{way}: {what}", times, ours, same, less)
        for other in (*same, *less):
            sizes = steps[ours].megabytes, steps[other].megabytes
            yield area.counted(f"{way}: {what}, bytes accessed", other, *sizes, "MB", other in same)
    if GUARDED in steps:
        named = {GUARDED: times[GUARDED], UNGUARDED: times[STEP]}
        yield from area.timed(f"step: {what}, guard", named, GUARDED, floors=[UNGUARDED])
        sizes = steps[GUARDED].megabytes, steps[STEP].megabytes
        yield area.counted(f"step: {what}, guard, bytes accessed", UNGUARDED, *sizes, "MB", peer=False)


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


def measure(options: Options) -> Iterator[Row]:
    """Yield the rows of a model, in two precisions, with and without a clip."""
    area = Area("jax step", options.device)
    params, batch, make_loss = prepare(options.model, options.quick)
    size = f"{options.model} of {models.count(params) / 1e6:.1f}M parameters"
    for low in (jnp.float16,) if options.quick else (None, jnp.float16):
        for max_norm in (MAX_NORM,) if options.quick else (None, MAX_NORM):
            task = Task(make_loss(low), make_loss(None), max_norm)
            made = {**VARIANTS, **(IN_FLOAT16 if low else {}), **(WITH_CLIP if max_norm else {})}
            steps = {name: compiled(make, task, params, batch) for name, make in made.items()}
            what = f"{size}, {'float16' if low else 'float32'}, {'clip' if max_norm else 'no clip'}"
            yield from rows_of(area, what, steps, options)
            del steps
            gc.collect()


if __name__ == "__main__":
    main(measure, __doc__, model=("gpt", "mlp"))
