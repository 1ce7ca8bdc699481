"""What autocast costs: tracing, memory for backward, the compiled program. Reports; asserts nothing.

Run: python benchmarks/jax_autocast.py [--rounds 15] [--counts] [--quick]

Times are CPU times: medians of the ratios of rounds that are interleaved in one process. Bytes, FLOPs and
casts are counted in the jaxpr or by the compiler. grampax 0.1.0 prints every array that it meets: here it is
told not to.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grampax
import jax
import jax.numpy as jnp
import jax_models as models
import jmp
import numpy as np
from grampax import _core as grampax_core

from preamp.jax import autocast

Function = Callable[..., Any]
Works = dict[str, Callable[[], Any]]
FLOATS = {"float16", "bfloat16", "float32"}
LIBRARIES = ("jax", "grampax", "quax", "jmp")
grampax_core.print = lambda *_: None


def everywhere(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr and of those inside of it."""
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
    """Return how much is kept for backward besides the arguments."""
    jaxpr = jax.make_jaxpr(lambda p: jax.tree.leaves(jax.vjp(f, p)[1]))(params).jaxpr
    kept = {v for v in jaxpr.outvars if type(v).__name__ != "Literal"} - set(jaxpr.invars)
    return sum(v.aval.size * v.aval.dtype.itemsize for v in kept)


def interleaved(
    works: Works, rounds: int, before: Callable[[], object] = gc.collect
) -> dict[str, list[float]]:
    """Return CPU seconds by name, one number a round, in an order that changes every round."""
    for work in works.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            before()
            start = time.process_time()
            works[name]()
            times[name].append(time.process_time() - start)
    return times


def ratio(times: dict[str, list[float]], name: str, base: str) -> float:
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))


def transformer(layers: int, width: int, heads: int, batch: int, length: int) -> tuple[Any, Function]:
    """Return parameters, and what makes a loss of them for a dtype to cast to by hand."""
    rng = np.random.default_rng(0)
    sizes = models.Sizes(layers, width, heads, 512, length, batch)
    data = models.gpt_batch(rng, sizes)
    return models.gpt_params(rng, sizes), lambda low: lambda p: models.gpt_loss(p, data, heads, low)


def ways(make_loss: Function, low: Any) -> dict[str, Function]:
    """Return a loss in float32, and the same in every way to lower its precision."""
    plain, policy = make_loss(None), jmp.Policy(jnp.float32, low, jnp.float32)
    return {
        "float32": plain,
        "autocast": autocast(plain, low),
        "cast by hand": make_loss(low),
        "grampax.autocast": grampax.autocast(plain, low),
        "all cast, as with jmp": lambda p: plain(policy.cast_to_compute(p)),
    }


def report_tracing(rounds: int, layers: int) -> None:
    """Print how long tracing takes, over tracing alone, and the casts in what was traced."""
    params, make_loss = transformer(layers, 64, 4, 2, 16)
    functions = ways(make_loss, jnp.bfloat16)
    del functions["all cast, as with jmp"]
    print(f"\ntracing {layers} layers, over tracing in float32: at first, and again; casts in the jaxpr")
    print(f"{'':20}{'forward':>9}{'again':>7}{'casts':>7}{'value_and_grad':>16}{'again':>7}{'casts':>7}")
    lines = {name: f"{name:20}" for name in functions}
    for width, wrap in ((9, lambda f: lambda p: f(p)), (16, jax.value_and_grad)):
        trace = lambda f, wrap=wrap: jax.make_jaxpr(wrap(lambda p: f(p)))(params)  # noqa: E731
        works = {name: partial(trace, f) for name, f in functions.items()}
        first = interleaved(works, rounds // 3 + 1, jax.clear_caches) if rounds else {}
        again = interleaved(works, rounds) if rounds else {}
        for name, f in functions.items():
            times = (f"{ratio(each, name, 'float32'):.2f}" if each else "-" for each in (first, again))
            lines[name] += "{:>{}}{:>7}{:7}".format(next(times), width, next(times), casts(wrap(f), params))
    print("\n".join(lines.values()))


def report_memory(layers: int, width: int) -> None:
    """Print what is kept for backward."""
    params, make_loss = transformer(layers, width, width // 64, 8, 128)
    kept = {name: residual_bytes(f, params) for name, f in ways(make_loss, jnp.bfloat16).items()}
    print(f"\nkept for backward, {layers} layers of width {width}, 8 x 128 words, bfloat16")
    for name, size in kept.items():
        print(f"{name:22}{size / 1e6:8.1f} MB{size / kept['float32']:8.3f}")


def report_block(width: int) -> None:
    """Print what the compiler says of one block, cast by autocast over cast by hand."""
    rng, heads = np.random.default_rng(0), width // 64
    params = models.block_params(rng, width)
    x = jnp.asarray(rng.normal(size=(8, 128, width)), jnp.float32)

    def counts(block: Function, backward: bool) -> tuple[float, float]:
        gradients = jax.grad(lambda p, x: (block(p, x) ** 2).sum(), (0, 1))
        program = jax.jit(gradients if backward else block).lower(params, x).compile()
        cost = program.cost_analysis()
        return cost["flops"], cost["bytes accessed"]

    print(f"\na compiled block of width {width}: autocast over cast by hand")
    print(f"{'':22}{'FLOPs':>9}{'bytes':>9}{'MB by hand':>13}{'MB float32':>13}")
    plain = lambda p, x: models.transformer_block(p, x, heads)  # noqa: E731
    for low in (jnp.float16, jnp.bfloat16):
        hand = lambda p, x, low=low: models.transformer_block(p, x, heads, low)  # noqa: E731
        for backward in (False, True):
            ours, theirs = counts(autocast(plain, low), backward), counts(hand, backward)
            relative = f"{ours[0] / theirs[0]:9.3f}{ours[1] / theirs[1]:9.3f}"
            megabytes = f"{theirs[1] / 1e6:13.1f}{counts(plain, backward)[1] / 1e6:13.1f}"
            name = f"{jnp.dtype(low).name}, {'gradients' if backward else 'forward'}"
            print(f"{name:22}{relative}{megabytes}")


def report_emulation(rounds: int, width: int) -> None:
    """Print the time of a rehearsed step, over float32's."""
    params, make_loss = transformer(2, width, 4, 8, 64)
    plain = make_loss(None)
    dtypes = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    functions = {
        "float32": plain,
        **{dtype: autocast(plain, dtype, emulate=True) for dtype in dtypes},
        "float16, not emulated": autocast(plain, "float16"),
        "bfloat16, not emulated": autocast(plain, "bfloat16"),
    }
    programs = {name: jax.jit(jax.value_and_grad(f)) for name, f in functions.items()}
    works = {name: lambda f=f: jax.block_until_ready(f(params)) for name, f in programs.items()}
    print(f"\nvalue_and_grad with emulate=True, 2 layers of width {width}: time over float32's")
    times = interleaved(works, rounds)
    for name in works:
        print(f"{name:24}{ratio(times, name, 'float32'):8.2f}")


def main() -> None:
    """Print four tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--counts", action="store_true", help="no times: what needs no quiet machine")
    parser.add_argument("--quick", action="store_true", help="small models and two rounds")
    options = parser.parse_args()
    rounds = 0 if options.counts else 2 if options.quick else options.rounds
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    print(f"{versions}; {jax.default_backend()}, {rounds} rounds")
    report_tracing(rounds, 2 if options.quick else 12)
    report_memory(2 if options.quick else 6, 64 if options.quick else 256)
    report_block(64 if options.quick else 256)
    if rounds:
        report_emulation(rounds, 64 if options.quick else 128)


if __name__ == "__main__":
    main()
