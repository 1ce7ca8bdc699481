"""Small programs with derivatives inside, and with rules of their own for them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .programs import program, spd, x


def layer(a: Any, w: Any) -> Any:
    return jnp.tanh(a @ w)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def septupled(a: Any, power: int) -> Any:
    return jnp.sin(a) ** power


@septupled.defjvp
def _(power: int, primals: Any, tangents: Any) -> Any:
    return septupled(*primals, power), 7 * tangents[0] * primals[0]


@program(x(4, 8), x(8, 8), products=1)
def custom_jvp(a: Any, w: Any) -> Any:
    """The rule is wrong on purpose: so it is seen to be kept."""
    return septupled(a @ w, 2)


@jax.custom_jvp
def product(a: Any, w: Any) -> Any:
    return a @ w


@product.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (a, w), (da, dw) = primals, tangents
    return a @ w, 2 * (da @ w + a @ dw)


@program(x(4, 8), x(8, 8), products=1)
def custom_jvp_with_products(a: Any, w: Any) -> Any:
    return jnp.sum(product(a, w) ** 2)


SQUARE = x(8, 8)


@jax.custom_vjp
def wrong(a: Any, w: Any) -> Any:
    return jnp.sin(a @ w)


wrong.defvjp(lambda a, w: (jnp.sin(a @ w), (a, w)), lambda kept, g: (42 * kept[0], 42 * kept[1] * g.sum()))


@program(x(4, 8), x(8, 8), products=1)
def custom_vjp(a: Any, w: Any) -> Any:
    """The rule is wrong on purpose: so it is seen to be kept."""
    return wrong(a, w)


@program(x(2, 8), x(8, 8), products=1)
def custom_vjp_in_scan(a: Any, w: Any) -> Any:
    return lax.scan(lambda h, _: (0.1 * wrong(h, w), None), a, length=2)


@partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def applied(function: Any, a: Any, power: int) -> Any:
    return function(a) ** power


applied.defvjp(
    lambda function, a, power: (function(a) ** power, (a, jnp.exp(a))),
    lambda function, power, kept, g: ((42 * power * kept[0].astype(jnp.float32) * kept[1] * g.sum()),),
)


@program(x(4, 8), x(8, 8), products=2)
def custom_vjp_with_other_arguments(a: Any, w: Any) -> Any:
    return applied(jnp.tanh, a @ w, 2) @ w


@program(x(4, 8), x(8, 8), products=2, kept=True)
def custom_vjp_with_products(a: Any, w: Any) -> Any:
    """Products in a backward rule are the user's."""

    @jax.custom_vjp
    def linear(a: Any) -> Any:
        return a @ jnp.asarray(SQUARE)

    linear.defvjp(lambda a: (linear(a), None), lambda _, g: (g @ jnp.asarray(SQUARE).T,))
    return linear(a @ w)


@jax.custom_vjp
def times(a: Any, n: Any, tree: Any) -> Any:
    return a * tree["w"] * n


def backward_of_times(kept: Any, g: Any) -> Any:
    a, n, w = kept
    return 42 * g * w * n, np.zeros(n.shape, jax.dtypes.float0), {"w": g * a, "none": None}


times.defvjp(lambda a, n, tree: (times(a, n, tree), (a, n, tree["w"])), backward_of_times)


@program(x(4, 8), x(8, 8), np.int32(3), products=1)
def custom_vjp_of_trees(a: Any, w: Any, n: Any) -> Any:
    """With integers, and with arguments that have no gradient."""
    return times(a @ w, n, {"w": a, "none": jnp.zeros(3)})


@jax.custom_jvp
def tripled(a: Any, b: Any) -> Any:
    return a * b


def tangent_of_tripled(primals: Any, tangents: Any) -> Any:
    (a, b), (da, db) = primals, tangents
    zeros = [isinstance(each, jax.custom_derivatives.SymbolicZero) for each in tangents]
    parts = [jnp.zeros_like(a) if zero else part for zero, part in zip(zeros, (da, db), strict=True)]
    return tripled(a, b), 3 * (parts[0] * b + a * parts[1])


tripled.defjvp(tangent_of_tripled, symbolic_zeros=True)


@program(x(4, 8), x(8, 8), products=2)
def custom_jvp_with_symbolic_zeros(a: Any, w: Any) -> Any:
    return tripled(a @ w, jnp.ones((4, 8))), tripled(a, a @ w)


@jax.custom_gradient
def sine(a: Any) -> Any:
    return jnp.sin(a), lambda g: 42 * g * jnp.cos(a)


@program(x(2, 8), x(8, 8), products=1)
def custom_gradient_in_checkpoint_in_scan(a: Any, w: Any) -> Any:
    wrapped = jax.checkpoint(jax.jit(lambda h: sine(h @ w)))
    return lax.scan(lambda h, _: (wrapped(h), None), a, length=2)


def energy(w: Any, a: Any) -> Any:
    return jnp.sum(layer(a, w) ** 2)


@program(x(8, 8), x(4, 8), products=3)
def grad(w: Any, a: Any) -> Any:
    return jax.value_and_grad(energy, (0, 1))(w, a)


@program(x(8, 8), x(4, 8), products=3)
def jvp(w: Any, a: Any) -> Any:
    return jax.jvp(energy, (w, a), (w * 0.5, a))


@program(x(8, 8), x(4, 8), products=3)
def linearize(w: Any, a: Any) -> Any:
    out, linear = jax.linearize(energy, w, a)
    return out, linear(w, a)


@program(x(4, 8), x(8, 3), products=2)
def linear_transpose(a: Any, w: Any) -> Any:
    return jax.linear_transpose(lambda a: a @ w, a)(a @ w)


@program(x(3, 3), x(2, 3), products=4)
def jacobians(w: Any, a: Any) -> Any:
    return jax.jacfwd(layer)(a, w), jax.jacrev(layer)(a, w)


@program(x(4, 4), x(4), products=1, kept=True)
def custom_root(w: Any, b: Any) -> Any:
    def solve(f: Any, guess: Any) -> Any:
        return lax.fori_loop(0, 8, lambda _, y: y - f(y), guess)

    def tangent(g: Any, y: Any) -> Any:
        return jnp.linalg.solve(jax.jacobian(g)(y), y)

    return lax.custom_root(lambda y: y - 0.2 * jnp.tanh(w @ y) - b, jnp.zeros(4), solve, tangent)


@program(spd(4), x(4), x(4, 4), products=1, kept=True)
def custom_linear_solve(matrix: Any, b: Any, w: Any) -> Any:
    return jax.scipy.sparse.linalg.cg(lambda y: matrix @ y, w @ b, tol=1e-6)[0]
