"""What autocast costs in JAX: tracing, memory for backward, the compiled program. On all cores.

Run: python benchmarks/jax_autocast.py [--device cuda] [--quick]. Reports; asserts nothing.

Bytes, FLOPs and casts are counted in the jaxpr or by the compiler. Tracing is measured at first, with JAX's
caches empty, and again. grampax 0.1.0 prints every array that it meets; here it is silenced.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import grampax
import jax
import jax.numpy as jnp
import jax_models as models
import jmp
import numpy as np
from grampax import _core as grampax_core
from rows import Area, Options, Row, main
from timing import Work

from preamp.jax import autocast

Function = Callable[..., Any]
FLOATS = {"float16", "bfloat16", "float32"}
FLOAT32, BY_HAND, GRAMPAX = "float32", "casts by hand", "grampax.autocast"
JMP = "all cast, as with jmp"
grampax_core.print = lambda *_: None


def everywhere(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr and of the jaxprs inside it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for value in eqn.params.values():
            for each in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(each, "jaxpr", each), "eqns"):
                    yield from everywhere(each)


def casts(f: Function, *args: Any) -> int:
    """Return how many times a traced function converts one floating-point dtype to another."""
    eqns = everywhere(jax.make_jaxpr(f)(*args))
    converts = [eqn for eqn in eqns if eqn.primitive.name == "convert_element_type"]
    dtypes = [{str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)} for eqn in converts]
    return sum(len(pair) == 2 and pair <= FLOATS for pair in dtypes)


def residual_bytes(f: Function, params: Any) -> int:
    """Return the bytes that are kept for backward besides the arguments."""
    jaxpr = jax.make_jaxpr(lambda p: jax.tree.leaves(jax.vjp(f, p)[1]))(params).jaxpr
    kept = {v for v in jaxpr.outvars if type(v).__name__ != "Literal"} - set(jaxpr.invars)
    return sum(v.aval.size * v.aval.dtype.itemsize for v in kept)


def transformer(layers: int, width: int, heads: int, batch: int, length: int) -> tuple[Any, Function]:
    """Return parameters, and a function that makes their loss for a dtype to cast to by hand."""
    rng = np.random.default_rng(0)
    sizes = models.Sizes(layers, width, heads, 512, length, batch)
    data = models.gpt_batch(rng, sizes)
    return models.gpt_params(rng, sizes), lambda low: lambda p: models.gpt_loss(p, data, heads, low)


def ways(make_loss: Function, low: Any) -> dict[str, Function]:
    """Return a loss in float32, and the same in every way to lower its precision."""
    plain, policy = make_loss(None), jmp.Policy(jnp.float32, low, jnp.float32)
    return {
        "preamp": autocast(plain, low),
        BY_HAND: make_loss(low),
        GRAMPAX: grampax.autocast(plain, low),
        JMP: lambda p: plain(policy.cast_to_compute(p)),
        FLOAT32: plain,
    }


def of_tracing(options: Options, area: Area) -> Iterator[Row]:
    """Yield the rows for the time that tracing takes, and for the casts in the traced program."""
    layers = 2 if options.quick else 12
    params, make_loss = transformer(layers, 64, 4, 2, 16)
    functions = ways(make_loss, jnp.bfloat16)
    del functions[JMP]
    for what, wrap in (("forward", lambda f: lambda p: f(p)), ("value_and_grad", jax.value_and_grad)):
        works: dict[str, Work] = {
            name: lambda f=f, wrap=wrap: jax.make_jaxpr(wrap(lambda p: f(p)))(params)
            for name, f in functions.items()
        }
        first = options.interleaved(works, before=lambda _: jax.clear_caches())
        again = options.interleaved(works, before=lambda _: gc.collect())
        for when, times in (("at first", first), ("again", again)):
            label = f"tracing {layers} layers {when}, {what}"
            yield from area.timed(label, times, "preamp", [BY_HAND, GRAMPAX], [FLOAT32])
        counts = {name: casts(wrap(f), params) for name, f in functions.items()}
        for peer in (BY_HAND, GRAMPAX):
            yield area.counted(f"{layers} layers, {what}", peer, counts["preamp"], counts[peer], "casts")


def of_memory(options: Options, area: Area) -> Iterator[Row]:
    """Yield the rows for what is kept for backward."""
    layers, width = (2, 64) if options.quick else (6, 256)
    params, make_loss = transformer(layers, width, width // 64, 8, 128)
    kept = {name: residual_bytes(f, params) / 1e6 for name, f in ways(make_loss, jnp.bfloat16).items()}
    what = f"kept for backward, {layers} layers of width {width}, bfloat16"
    for other in list(kept)[1:]:
        yield area.counted(what, other, kept["preamp"], kept[other], "MB", other != FLOAT32)


def of_programs(options: Options, area: Area) -> Iterator[Row]:
    """Yield the rows for what the compiler counts in one block."""
    rng, width = np.random.default_rng(0), 64 if options.quick else 256
    heads = width // 64
    params = models.block_params(rng, width)
    x = jnp.asarray(rng.normal(size=(8, 128, width)), jnp.float32)

    def counts(block: Function, backward: bool) -> Any:
        gradients = jax.grad(lambda p, x: (block(p, x) ** 2).sum(), (0, 1))
        return jax.jit(gradients if backward else block).lower(params, x).compile().cost_analysis()

    plain = lambda p, x: models.transformer_block(p, x, heads)  # noqa: E731
    for low in (jnp.float16, jnp.bfloat16):
        hand = lambda p, x, low=low: models.transformer_block(p, x, heads, low)  # noqa: E731
        for backward in (False, True):
            ours, theirs = counts(autocast(plain, low), backward), counts(hand, backward)
            what = "gradients" if backward else "forward"
            label = f"a compiled block of width {width}, {jnp.dtype(low).name}, {what}"
            for key, unit in (("flops", "MFLOP"), ("bytes accessed", "MB")):
                yield area.counted(f"{label}, {key}", BY_HAND, ours[key] / 1e6, theirs[key] / 1e6, unit)


def of_rehearsals(options: Options, area: Area) -> Iterator[Row]:
    """Yield the rows for the time of a training step that is rehearsed, and of one on this device."""
    width = 64 if options.quick else 256
    params, make_loss = transformer(2, width, 4, 16, 64)
    plain = make_loss(None)
    losses = {FLOAT32: plain}
    for low in ("float16", "bfloat16"):
        losses |= {f"{low}, emulate=True": autocast(plain, low, emulate=True), low: autocast(plain, low)}

    def step(loss: Function) -> Function:
        def stepped(params: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(params)
            return value, jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients)

        return jax.jit(stepped)

    steps = {name: step(loss) for name, loss in losses.items()}
    works = {name: lambda f=f: jax.block_until_ready(f(params)) for name, f in steps.items()}
    times = options.interleaved(works)
    for name in list(works)[1:]:
        what = f"a training step, 2 layers of width {width}, {name}"
        yield from area.timed(what, times, name, floors=[FLOAT32])


def measure(options: Options) -> Iterator[Row]:
    """Yield all rows."""
    area = Area("jax autocast", options.device)
    for part in (of_tracing, of_memory, of_programs, of_rehearsals):
        yield from part(options, area)


if __name__ == "__main__":
    main(measure, __doc__)
