"""Small programs whose parts are programs: control flow, checkpoints, devices and callbacks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, io_callback
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as Spec

from preamp.jax import autocast

from .programs import key, program, x

POLICIES = jax.checkpoint_policies


def layer(a: Any, w: Any) -> Any:
    return jnp.tanh(a @ w)


@program(x(4, 8), x(8, 8), products=2)
def nested_jit(a: Any, w: Any) -> Any:
    inner = jax.jit(lambda a, w: jax.jit(layer)(a, w) + 1)
    return inner(inner(a, w), w)


@program(x(4, 8), x(8, 8), products=2)
def jit_that_passes_on(a: Any, w: Any) -> Any:
    inner = jax.jit(lambda a, w, unused: (w, a, a @ w, 1.0))
    first = inner(a, w, 3.0)
    return first, inner(first[2], first[0], a)


@program(x(4, 8), x(8, 8), products=2)
def static_and_donated(a: Any, w: Any) -> Any:
    static = jax.jit(lambda a, w, times: a @ w * times, static_argnums=2)
    donated = jax.jit(layer, donate_argnums=0)
    return donated(static(a, w, 3), w)


@program(x(2, 8), x(8, 8), products=1)
def scan_with_a_constant(a: Any, w: Any) -> Any:
    return lax.scan(lambda h, _: (layer(h, w), h.sum()), a, length=3)


@program(x(2, 8), x(3, 8, 8), products=1)
def scan_over_weights(a: Any, w: Any) -> Any:
    return lax.scan(lambda h, w: (layer(h, w), h), a, w)


@program(x(2, 8), x(3, 8, 8), products=2)
def scan_in_scan(a: Any, w: Any) -> Any:
    def outer(h: Any, w: Any) -> Any:
        h, _ = lax.scan(lambda h, _: (layer(h, w), None), h, length=2)
        return h @ w, h

    return lax.scan(outer, a, w)


@program(x(2, 8), x(8, 8), products=1)
def scan_with_a_wide_carry(a: Any, w: Any) -> Any:
    """Of what it carries one is computed, one counts and one only passes."""

    def body(carry: Any, _: Any) -> Any:
        h, count, passing = carry
        return (layer(h, w), count + 1, passing), (passing, w[0], h)

    return lax.scan(body, (a, 0, a * 2), length=3)


@program(x(2, 8), np.zeros((0, 8, 8), np.float32), products=1)
def scan_over_nothing(a: Any, w: Any) -> Any:
    return lax.scan(lambda h, w: (layer(h, w), h), a, w)


@program(x(2, 8), x(8, 8), products=2, differentiable=False)
def while_loop(a: Any, w: Any) -> Any:
    def body(state: Any) -> Any:
        h, steps, passing = state
        return layer(h, w), steps + 1, passing

    return lax.while_loop(lambda state: (state[1] < 3) & ((state[0] @ w).sum() < 1e9), body, (a, 0, a))


@program(x(2, 8), x(8, 8), products=2)
def fori_loop(a: Any, w: Any) -> Any:
    """A scan, by the bounds."""
    return lax.fori_loop(0, 3, lambda i, h: layer(h, w) + i, a) @ w


@program(x(2, 8), x(8, 8), np.bool_(True), products=2)
def cond(a: Any, w: Any, flag: Any) -> Any:
    return lax.cond(flag, lambda a: layer(a, w), lambda a: a @ w.T, a)


@program(x(2, 8), x(8, 8), np.bool_(False), products=1)
def cond_of_numbers(a: Any, w: Any, flag: Any) -> Any:
    h = a @ w
    return lax.cond(flag, lambda: (jnp.zeros((2, 8)), 1.0), lambda: (h, h[0, 0]))


@program(x(2, 8), x(8, 8), np.int32(1), products=2)
def switch(a: Any, w: Any, index: Any) -> Any:
    """The branches' results differ in precision."""
    return lax.switch(index, [lambda a: a, lambda a: a @ w, lambda a: jnp.exp(a @ w)], a)


@program(x(5, 8), x(8, 3), products=1)
def lax_map(a: Any, w: Any) -> Any:
    return lax.map(lambda row: row @ w, a)


@program(x(5, 8), x(8, 3), products=2)
def lax_map_in_batches(a: Any, w: Any) -> Any:
    """Two batches of two and a rest of one."""
    return lax.map(lambda row: row @ w, a, batch_size=2)


@program(x(4, 3, 3), products=4)
def associative_scan(matrices: Any) -> Any:
    return lax.associative_scan(jnp.matmul, matrices)


@program(x(4, 8), x(8, 8), products=2)
def checkpoint(a: Any, w: Any) -> Any:
    return jax.checkpoint(lambda a: layer(layer(a, w), w))(a)


@program(x(4, 8), x(8, 8), products=4)
def checkpoint_with_policies(a: Any, w: Any) -> Any:
    def named(a: Any) -> Any:
        return layer(checkpoint_name(layer(a, w), "kept"), w)

    a = jax.checkpoint(named, policy=POLICIES.save_only_these_names("kept"))(a)
    return jax.checkpoint(named, policy=POLICIES.dots_saveable, prevent_cse=False)(a)


@program(x(4, 8), x(8, 8), products=1, around=jax.checkpoint)
def inside_of_checkpoint(a: Any, w: Any) -> Any:
    return layer(a, w)


def on_two_devices(function: Any, inside: Any, outside: Any) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("devices",))
    if hasattr(jax, "shard_map"):
        return jax.shard_map(function, mesh=mesh, in_specs=inside, out_specs=outside)
    from jax.experimental.shard_map import shard_map

    return shard_map(function, mesh=mesh, in_specs=inside, out_specs=outside)


def reduced(a: Any, w: Any) -> Any:
    part = a @ w
    return part, lax.psum(part, "devices"), lax.pmean(jnp.exp(part).sum(), "devices")


# JAX 0.7 to 0.9 raise a TypeError for `vmap` of a sum over devices inside `shard_map`.
SUMS_ARE_MAPPED = not (0, 7) <= jax.__version_info__ < (0, 10)


@program(x(4, 8), x(8, 3), products=1, mapped=SUMS_ARE_MAPPED)
def shard_map(a: Any, w: Any) -> Any:
    return on_two_devices(reduced, (Spec("devices"), Spec()), (Spec("devices"), Spec(), Spec()))(a, w)


@program(x(4, 8), x(8, 8), products=2)
def shard_map_with_gathers(a: Any, w: Any) -> Any:
    def gathered(a: Any, w: Any) -> Any:
        whole = lax.all_gather(w, "devices", tiled=True)
        swapped = lax.ppermute(a @ whole, "devices", [(0, 1), (1, 0)])
        return lax.psum_scatter(swapped @ whole, "devices", tiled=True)

    return on_two_devices(gathered, (Spec("devices"), Spec("devices")), Spec("devices"))(a, w)


@program(x(2, 4, 8), x(8, 3), products=1, mapped=False)
def pmap(a: Any, w: Any) -> Any:
    return jax.pmap(reduced, axis_name="devices", in_axes=(0, None))(a, w)


@program(x(4, 8), x(8, 3), products=1)
def vmap(a: Any, w: Any) -> Any:
    return jax.vmap(lambda row: jnp.tanh(row @ w))(a)


@program(x(3, 2, 8), x(8, 8), products=1, around=lambda f: lambda a, w: lax.scan(lambda w, a: f(a, w), w, a))
def inside_of_scan(a: Any, w: Any) -> Any:
    return w * 0.5, layer(a, w)


@program(
    x(4, 8),
    x(8, 3),
    products=1,
    around=lambda f: jax.vmap(f, axis_name="rows", in_axes=(0, None)),
)
def inside_of_vmap_with_an_axis(a: Any, w: Any) -> Any:
    h = a @ w
    return h - lax.pmean(h, "rows"), lax.psum(h, "rows"), lax.axis_index("rows"), lax.all_gather(h, "rows")


@program(x(4, 8), x(8, 3), products=1)
def sharding_constraints(a: Any, w: Any) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("devices",))
    rows = jax.sharding.NamedSharding(mesh, Spec("devices"))
    return lax.with_sharding_constraint(jnp.tanh(lax.with_sharding_constraint(a, rows) @ w), rows)


@program(x(4, 8), x(8, 3), products=2, differentiable=False)
def pure_callback(a: Any, w: Any) -> Any:
    shape = jax.ShapeDtypeStruct((4, 3), jnp.float32)

    def on_the_host(value: Any) -> Any:
        assert value.dtype == np.float32
        return np.sin(value)

    return jax.pure_callback(on_the_host, shape, a @ w, vmap_method="sequential").T @ a


@program(x(4, 8), x(8, 3), products=1, differentiable=False, mapped=False)
def ordered_callback(a: Any, w: Any) -> Any:
    shape = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    return io_callback(lambda value: np.sin(value), shape, a @ w, ordered=True)


@program(x(4, 8), x(8, 3), products=2)
def barriers(a: Any, w: Any) -> Any:
    a, w = lax.optimization_barrier((a, w))
    return lax.optimization_barrier(a @ w) + lax.stop_gradient(a @ w)


@program(x(4, 8), x(8, 8), products=1, differentiable=False)
def pallas(a: Any, w: Any) -> Any:
    """A kernel gets the dtypes that it was written for."""

    def kernel(source: Any, target: Any) -> None:
        target[...] = source[...] * 2

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((4, 8), jnp.float32), interpret=True)
    return call(a @ w)


@program(x(4, 8), x(8, 3), products=1, differentiable=False)
def custom_vmap(a: Any, w: Any) -> Any:
    return jax.custom_batching.sequential_vmap(layer)(a, w)


@program(key, x(3, 8), x(8, 8), products=1)
def keys_in_scan(seed: Any, a: Any, w: Any) -> Any:
    def body(state: Any, row: Any) -> Any:
        seed, h = state
        return (jax.random.fold_in(seed, 1), h + jax.random.bernoulli(seed, 0.5, (8,)) * (row @ w)), None

    return lax.scan(body, (seed, jnp.zeros(8)), a)


def checked(function: Any) -> Any:
    return lambda *arguments: checkify.checkify(function)(*arguments)[1]


@program(x(4, 8), x(8, 3), products=1, around=checked)
def inside_of_checkify(a: Any, w: Any) -> Any:
    h = a @ w
    checkify.check((h < 1e9).all(), "large")
    return h


@program(x(4, 8), x(8, 3), products=1, kept=True)
def region_that_is_off(a: Any, w: Any) -> Any:
    off = autocast(lambda a: jnp.tanh(a @ w), enabled=False)
    return off(a), a @ w
