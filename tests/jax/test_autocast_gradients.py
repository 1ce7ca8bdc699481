"""The gradient of what was cast is added up in float32, however often and wherever it is used."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from preamp.jax import autocast, blame, casts, last_step, loss_scaled, step

STEPS = 2048
w = jax.random.normal(jax.random.key(0), (8, 16))
xs = abs(jax.random.normal(jax.random.key(1), (STEPS, 4, 8)))
places = jnp.arange(8 * STEPS) % 8
right = jnp.ones((16, 4))


def residual(x: Any, w: Any) -> Any:
    return jnp.mean((x @ w - 1) ** 2)


def scanned(w: Any) -> Any:
    return lax.scan(lambda s, x: (s + residual(x, w), None), 0.0, xs)[0] / STEPS


def scanned_through(inner: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda w: lax.scan(lambda s, x: (s + inner(x, w), None), 0.0, xs)[0] / STEPS


def mapped(w: Any) -> Any:
    return jnp.mean(lax.map(lambda x: residual(x, w), xs))


def repeated(w: Any) -> Any:
    return sum(residual(x, w) for x in xs[:128]) / 128


def repeated_jit(w: Any) -> Any:
    return sum(map(jax.jit(lambda x: residual(x, w)), xs[:64])) / 64


def gathered(w: Any) -> Any:
    return jnp.mean((w[places] @ right - 3) ** 2)


def moved(w: Any) -> Any:
    return scanned(w[::-1].T.reshape(16, 8).T) + jnp.mean((jnp.concatenate([w, w])[places] @ right - 3) ** 2)


def biased(w: Any) -> Any:
    return jnp.mean((xs.reshape(-1, 8) @ lax.stop_gradient(w) + w[0] - 1) ** 2)


def in_loops(w: Any) -> Any:
    def outer(s: Any, x: Any) -> Any:
        return lax.scan(lambda s, x: (s + jax.checkpoint(residual)(x, w), None), s, x)[0], None

    return lax.scan(outer, 0.0, xs.reshape(16, -1, 4, 8))[0] / STEPS


def activations(w: Any) -> Any:
    h = jnp.exp(-jnp.square(w))
    return scanned(h) + jnp.mean((h[places] @ right - 3) ** 2)


PROGRAMS = {
    "scan": scanned,
    "scan_of_jit": scanned_through(jax.jit(residual)),
    "scan_of_checkpoint": scanned_through(jax.checkpoint(residual)),
    "scan_of_cond": scanned_through(lambda x, w: lax.cond(x[0, 0] > 1, residual, residual, x, w)),
    "scan_of_vmap": scanned_through(lambda x, w: jnp.mean(jax.vmap(residual, (0, None))(x, w))),
    "map": mapped,
    "repeated": repeated,
    "repeated_jit": repeated_jit,
    "gather": gathered,
    "moved": moved,
    "bias": biased,
    "loops_in_loops": in_loops,
    "activations": activations,
}


def error(found: Any, exact: Any) -> float:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "emulate"), [*((name, False) for name in PROGRAMS), ("scan", True), ("gather", True)]
)
def test_every_use_adds_in_float32(name: str, emulate: bool) -> None:
    program = PROGRAMS[name]
    gradient = jax.jit(jax.grad(autocast(program, emulate=emulate)))(w)
    assert gradient.dtype == jnp.float32
    assert error(gradient, jax.jit(jax.grad(program))(w)) < 0.01


def test_every_way_to_differentiate() -> None:
    low = autocast(scanned)
    exact, tangent = jax.grad(scanned)(w), jnp.ones_like(w)
    ways = {
        "eager": jax.grad(low)(w),
        "grad of jit": jax.grad(jax.jit(low))(w),
        "region around": autocast(jax.grad(low))(w),
        "region in a region": jax.grad(autocast(lambda w: autocast(scanned)(w)))(w),
        "vmap": jax.grad(lambda w: jnp.mean(jax.vmap(low)(jnp.stack([w, w]))))(w),
        "vmap of grad": jax.vmap(jax.grad(low))(w[None])[0],
    }
    assert {name: error(each, exact) < 0.01 for name, each in ways.items()} == dict.fromkeys(ways, True)
    forward, linear = jax.jvp(low, (w,), (tangent,))[1], jax.linearize(low, w)[1](tangent)
    assert forward == pytest.approx(float(jnp.vdot(exact, tangent)), rel=0.01)
    assert linear == pytest.approx(float(forward), rel=1e-3)


def convolved(kernel: Any) -> Any:
    images = xs[:64].reshape(8, 16, 16, 1)
    names = ("NHWC", "HWIO", "NHWC")
    return jnp.mean(lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=names) ** 2)


@pytest.mark.parametrize(("loss", "at"), [(scanned, w), (convolved, w.reshape(4, 4, 1, 8))])
def test_second_derivatives(loss: Callable[[Any], Any], at: Any) -> None:
    direction = jnp.cos(jnp.arange(at.size)).reshape(at.shape)

    def products(f: Callable[[Any], Any]) -> Any:
        slope = lambda p: jnp.vdot(jax.grad(f)(p), direction)  # noqa: E731
        return jax.grad(slope)(at), jax.jvp(jax.grad(f), (at,), (direction,))[1]

    assert error(products(autocast(loss)), products(loss)) < 0.01


def test_gradients_inside_of_a_region_are_added_up_in_float32() -> None:
    found, exact = jax.jit(autocast(jax.grad(repeated)))(w), jax.jit(jax.grad(repeated))(w)
    assert error(found, exact) < 0.01


def test_second_derivatives_of_each_example() -> None:
    def after_a_step(w: Any, x: Any) -> Any:
        return residual(x, w - 0.1 * jax.grad(residual, 1)(x, w))

    def loss(w: Any) -> Any:
        return jnp.mean(jax.vmap(partial(after_a_step, w))(xs[:4]))

    assert error(jax.jit(jax.grad(autocast(loss)))(w), jax.grad(loss)(w)) < 0.05


def test_the_numbers_are_cast_once_outside_of_loops() -> None:
    text = str(jax.make_jaxpr(autocast(scanned_through(jax.jit(residual))))(w))
    assert len(re.findall(r"bf16\[8,16\] = convert_element_type", text)) == 1
    assert not [it for it in casts(scanned_through(jax.jit(residual)), w).warnings if "is cast" in it]


def test_a_step_and_blame_see_the_same_sum() -> None:
    optimizer = loss_scaled(optax.sgd(1.0))
    _, params, state = jax.jit(step(autocast(scanned), optimizer))(w, optimizer.init(w))
    exact = jax.grad(scanned)(w)
    assert error(w - params, exact) < 0.01
    assert last_step(state).grad_norm == pytest.approx(float(jnp.linalg.norm(exact)), rel=0.01)
    short = lambda w: lax.scan(lambda s, x: (s + residual(x, w), None), 0.0, xs[:16])[0]  # noqa: E731
    rows = blame(short, w).rows
    assert not [row for row in rows if row.operator == "add_any" and row.effect > 1e-3]


def test_gradients_of_a_batch_on_two_devices_are_reduced_in_float32() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def put(tree: Any, spec: P) -> Any:
        return jax.device_put(tree, NamedSharding(mesh, spec))

    def loss(p: Any, images: Any) -> Any:
        names = ("NHWC", "HWIO", "NHWC")
        h = lax.conv_general_dilated(images, p["kernel"], (1, 1), "SAME", dimension_numbers=names)
        h = jax.nn.relu(h + p["bias"]).reshape(len(images), -1)
        return jnp.mean((h @ p["w"] + p["last"]) ** 2)

    shapes = {"kernel": (3, 3, 2, 4), "bias": (4,), "w": (64, 8), "last": (8,)}
    params = put({name: jnp.ones(shape) / 8 for name, shape in shapes.items()}, P())
    images = put(jnp.ones((8, 4, 4, 2)), P("data"))

    def mapped(p: Any, x: Any) -> Any:
        return lax.pmean(loss(p, x), "data")

    losses = (loss, jax.shard_map(mapped, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    for f in (autocast(losses[0], "float16"), autocast(losses[1], "float16")):
        text = jax.jit(jax.grad(f)).lower(params, images).compile().as_text()
        reduced = re.findall(r"= (.*?) all-reduce\(", text)
        assert reduced
        assert "f16[" not in str(reduced), reduced


SUMS = {
    "logsumexp": (jax.nn.logsumexp, jnp.zeros(65_536)),
    "log_softmax": (jax.nn.log_softmax, jnp.zeros(65_536)),
    "sum": (jnp.sum, jnp.full(512, 300.0)),
    "mean": (lambda x: jnp.mean(x) * x.size, jnp.full(512, 300.0)),
    "var": (jnp.var, jnp.where(jnp.arange(512) % 2, 300.0, -300.0)),
    "std": (jnp.std, jnp.where(jnp.arange(512) % 2, 300.0, -300.0)),
    "standardize": (jax.nn.standardize, jnp.where(jnp.arange(512) % 2, 300.0, -200.0)),
    "norm": (jnp.linalg.norm, jnp.full(512, 300.0)),
    "prod": (jnp.prod, jnp.full(4, 30.0)),
    "average": (lambda x: jnp.average(x, weights=x), jnp.full(512, 300.0)),
    "where": (lambda x: jnp.var(x, where=x > 0), jnp.linspace(1.0, 1000.0, 512)),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_of_float16_inputs_stays_float32_within_its_operator(name: str) -> None:
    function, x = SUMS[name]
    found = autocast(function, "float16")(x.astype(jnp.float16))
    np.testing.assert_allclose(found, function(x.astype(jnp.float16).astype(jnp.float32)), rtol=2e-3)


def test_a_cast_that_is_no_part_of_a_sum_stays() -> None:
    def cast(x: Any) -> Any:
        return jnp.sum(x).astype(jnp.float16), (jnp.exp(x.astype(jnp.float32)) + 1).astype(jnp.float16)

    for x in (jnp.ones(4), jnp.ones(4, jnp.float16)):
        assert [each.dtype for each in autocast(lambda x: cast(x)[1:], "float16")(x)] == [jnp.float16]
    assert autocast(cast, "float16")(jnp.ones(4))[0].dtype == jnp.float16
