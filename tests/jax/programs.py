"""Small programs that autocast must keep working, one for each thing that a JAX program can hold.

A program says what it is called with and how many products it holds. Programs with programs inside are in
`structured_programs.py`, those with derivatives inside in `derivative_programs.py`, those of Equinox, Flax
and optax in `library_programs.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn, random

__all__ = ["PROGRAMS", "Program", "key", "program", "spd", "x"]

SEEDS = count(7)


def x(*shape: int) -> np.ndarray:
    """Return numbers between -1 and 1, other ones each time."""
    return np.random.default_rng(next(SEEDS)).uniform(-1, 1, shape).astype(np.float32)


def spd(size: int) -> np.ndarray:
    """Return a symmetric matrix with the eigenvalues 1, 2, 3 ..."""
    rotation, _ = np.linalg.qr(x(size, size))
    return ((rotation * np.arange(1, size + 1)) @ rotation.T).astype(np.float32)


def key() -> jax.Array:
    return random.key(next(SEEDS))


@dataclass(frozen=True)
class Program:
    """A function, what it is called with, and what it holds.

    Attributes:
        make: returns the function and its arguments; called once.
        products: the products and convolutions in it that autocast lowers.
        kept: whether products of float32 stay: those inside of solvers, of backward rules, or asked for.
        options: its keyword arguments.
        around: what is done with the function outside of autocast.
        differentiable: whether it has a gradient by its floats.
        mapped: whether `vmap` can map it.
        x64: whether it has numbers of 64 bits.
        loose: how many times more than others its results may be off: for what amplifies rounding.
    """

    make: Callable[[], tuple[Any, ...]]
    products: int
    kept: bool = False
    options: Any = None
    around: Callable[..., Any] | None = None
    differentiable: bool = True
    mapped: bool = True
    x64: bool = False
    loose: float = 1

    @cached_property
    def made(self) -> tuple[Any, ...]:
        return self.make()

    @property
    def function(self) -> Callable[..., Any]:
        return self.made[0]

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.made[1:]

    def under(self, transformation: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, transformed, inside of what is around it."""
        function = transformation(self.function)
        return self.around(function) if self.around else function


PROGRAMS: dict[str, Program] = {}


def program(*arguments: Any, products: int = 0, made: bool = False, **notes: Any) -> Callable[..., Any]:
    """Add the decorated function to `PROGRAMS`.

    Args:
        arguments: what the function is called with. Functions among them are called when it runs.
        products: as in `Program`.
        made: whether the decorated function returns the program's function and its arguments.
        notes: the rest of `Program`.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def make() -> tuple[Any, ...]:
            return function, *(value() if callable(value) else value for value in arguments)

        PROGRAMS[function.__name__] = Program(function if made else make, products, **notes)
        return function

    return add


IMAGE, FILTERS = ("NHWC", "HWIO", "NHWC"), x(3, 3, 2, 4)


@program(x(4, 8), x(8, 3), products=1)
def matmul(a: Any, b: Any) -> Any:
    return a @ b


@program(x(2, 4, 8), x(2, 8, 3), x(3, 5), products=2)
def einsum(a: Any, b: Any, c: Any) -> Any:
    return jnp.einsum("bik,bkj,jl->bil", a, b, c)


@program(x(2, 6, 6, 2), FILTERS, x(4), products=1)
def convolution(image: Any, filters: Any, bias: Any) -> Any:
    return nn.relu(lax.conv_general_dilated(image, filters, (1, 1), "SAME", dimension_numbers=IMAGE) + bias)


@program(x(2, 3, 3, 2), FILTERS, products=1)
def transposed_convolution(image: Any, filters: Any) -> Any:
    return lax.conv_transpose(image, filters, (2, 2), "SAME")


@program(x(6, 4), x(3, 4, 5), np.array([2, 1, 3], np.int32), products=1, mapped=False)
def ragged_product(a: Any, b: Any, sizes: Any) -> Any:
    return lax.ragged_dot(a, b, sizes)


@program(x(4, 8), x(8, 16), x(16), x(16, 3), x(3), products=2)
def perceptron(a: Any, w: Any, b: Any, v: Any, c: Any) -> Any:
    return nn.gelu(a @ w + b) @ v + c


@program(x(2, 4, 8), x(8, 24), x(8, 8), products=4)
def attention(a: Any, wide: Any, out: Any) -> Any:
    q, k, v = jnp.split(a @ wide, 3, axis=-1)
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / np.sqrt(8)
    causal = jnp.tril(jnp.ones((4, 4), bool))
    return a + (nn.softmax(jnp.where(causal, scores, -1e9)) @ v) @ out


@program(x(4, 8), x(8), x(8), x(8, 3), products=1)
def layer_norm(a: Any, scale: Any, bias: Any, w: Any) -> Any:
    normal = (a - a.mean(-1, keepdims=True)) * lax.rsqrt(a.var(-1, keepdims=True) + 1e-6)
    return (normal * scale + bias) @ w


@program(x(4, 8), x(8, 3), products=1)
def softmax(a: Any, w: Any) -> Any:
    return nn.softmax(a @ w), nn.logsumexp(a, axis=-1)


@program(x(4, 8), x(8, 3), np.array([0, 2, 1, 1]), products=1)
def cross_entropy(a: Any, w: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(nn.log_softmax(a @ w), labels[:, None], axis=1).mean()


@program(x(4, 8), x(8, 8), products=1)
def activations(a: Any, w: Any) -> Any:
    """Most of them are `custom_jvp` functions inside of a `jit`."""
    a = a @ w
    return [function(a) for function in (nn.elu, nn.gelu, nn.relu, nn.relu6, nn.silu, nn.softplus)]


@program(x(4, 8), x(8, 8), products=1)
def statistics(a: Any, w: Any) -> Any:
    a = a @ w
    return a.mean(1), a.std(0), jnp.linalg.norm(a, axis=1), a.max(0), a[:, :3].prod(1)


def apart(*shape: int) -> np.ndarray:
    """Return a matrix that orders its product with the identity the same way in every precision."""
    return np.random.default_rng(next(SEEDS)).permutation(np.arange(np.prod(shape))).reshape(
        shape
    ) / np.float32(8)


@program(apart(3, 5), np.eye(5, dtype=np.float32), products=1)
def sorting(a: Any, w: Any) -> Any:
    a = a @ w
    return jnp.sort(a), jnp.argsort(a), lax.top_k(a, 2), a.argmax(1), lax.sort((a, a + 1.0), num_keys=1)


@program(x(6, 4), x(4, 4), np.array([0, 2, 2, 5]), products=1)
def gather_and_scatter(a: Any, w: Any, rows: Any) -> Any:
    b = a @ w
    c = a.at[rows].add(b[rows]).at[0].set(b[1]).at[1].multiply(b[2]).at[rows, 0].max(b[rows, 1])
    return c, lax.dynamic_update_slice(a, b[:2], (rows[1], 0)), lax.dynamic_slice(b, (rows[1], 0), (2, 4))


@program(x(4, 8), x(8, 4), products=1)
def shapes(a: Any, w: Any) -> Any:
    a = a @ w
    b = jnp.concatenate([a, a.T[:, ::-1]]).reshape(2, 4, 4).transpose(2, 0, 1)
    return (
        jnp.pad(b, ((0, 0), (1, 0), (0, 1))),
        jnp.stack([a, a]),
        jnp.tile(a, 2),
        jnp.roll(a, 1),
        a[None, ..., 0],
    )


@program(x(4, 8), x(8, 8), products=1)
def elementwise(a: Any, w: Any) -> Any:
    b = a @ w
    some = jnp.exp(b), jnp.log1p(b * b), lax.erf(b), b**3, jnp.arctan2(a, 1 + b * b), jnp.sqrt(1 + jnp.abs(b))
    return (
        *some,
        jnp.clip(b, -0.5, a),
        jnp.where(a > 0, a, b),
        jnp.sign(b) * jnp.maximum(a, b),
        jnp.logaddexp(a, b),
    )


@program(x(4, 8), x(8, 8), products=1)
def stages(a: Any, w: Any) -> Any:
    """Numbers that float16 or bfloat16 have not."""
    a = a @ w
    return a / (jnp.abs(a) + 1e-12) * 0.5, jnp.where(a > 0, a, -1e9), (a * 1e6) / 1e6


@program(spd(4), x(4, 2), x(4, 4), products=1, kept=True)
def solving(matrix: Any, b: Any, w: Any) -> Any:
    return jnp.linalg.solve(matrix, w @ b)


@program(x(4, 8), x(8, 8), products=1)
def fourier(a: Any, w: Any) -> Any:
    waves = jnp.fft.rfft(a @ w)
    return jnp.abs(waves), jnp.fft.irfft(waves * (1 + 2j)), jnp.fft.fft2(a).real


@program(x(4, 8), x(8, 8), key, products=1)
def randomness(a: Any, w: Any, seed: Any) -> Any:
    first, second = random.split(seed)
    return (a + random.normal(first, (4, 8))) @ w, random.categorical(second, a), first


@program(x(4, 8), x(8, 8), products=1, differentiable=False)
def bits(a: Any, w: Any) -> Any:
    """The bits that the user sees are those of the dtype that the user traced."""
    a = a @ w
    exponent = lax.bitcast_convert_type(a * 0 + 1.5, jnp.int32) >> 23
    return (
        exponent,
        jnp.signbit(a),
        jnp.nextafter(jnp.abs(jnp.sign(a)), 2.0) - 1,
        lax.reduce_precision(w, 8, 3),
    )


@program(x(4, 8), x(8, 3), np.arange(32).reshape(4, 8), products=1)
def integers(a: Any, w: Any, n: Any) -> Any:
    return a @ w, n @ n.T, (a * 8).astype(jnp.int32), n > 3


@program(x(4, 8) + 1j * x(4, 8), x(8, 3), products=1, differentiable=False)
def complexes(z: Any, w: Any) -> Any:
    return z @ (w + 0j), jnp.abs(z) @ w, z.real


@program(x(4, 8).astype(np.float64), x(8, 3).astype(np.float64), x(4, 8), products=1, x64=True)
def float64(a: Any, w: Any, single: Any) -> Any:
    return a @ w, single @ single.T, a + single


@program(x(4, 8), lambda: jnp.ones((2, 3), jnp.float8_e4m3fn), key, products=1, differentiable=False)
def passing_through(a: Any, eighths: Any, seed: Any) -> Any:
    return a @ a.T, eighths, seed, eighths.astype(jnp.float32) * 2, eighths[0]


@program(
    x(4, 8),
    lambda: jnp.ones((8, 3), jnp.bfloat16),
    lambda: jnp.ones((8, 3), jnp.float16),
    products=3,
    kept=True,
)
def low_already(a: Any, b: Any, c: Any) -> Any:
    """Whoever asks for the product of low numbers in float32 gets it."""
    explicit = [jnp.dot(w.T, w, preferred_element_type=jnp.float32) for w in (b, c)]
    return explicit, a @ b.astype(jnp.float32), a.astype(jnp.float16) @ c


@program(x(4, 8), x(8, 3), products=0, kept=True)
def algorithms(a: Any, w: Any) -> Any:
    """Whoever asks for an algorithm or a precision gets it."""
    return lax.dot(a, w, precision=lax.DotAlgorithmPreset.F32_F32_F32), jnp.matmul(a, w, precision="highest")


@program(np.zeros((0, 8), np.float32), x(8, 3), np.float32(2), products=2)
def empty(a: Any, w: Any, number: Any) -> Any:
    return a @ w, (a @ w).sum() + number


@program({"a": x(4, 8), "more": [x(8, 3), None]}, products=1)
def trees(tree: Any) -> Any:
    return {"out": (tree["a"] @ tree["more"][0], None), "name": "a string", "in": tree, "number": 3}


@program(options={"a": x(4, 8), "w": x(8, 3), "train": True}, products=1)
def keywords_only(*, a: Any, w: Any, train: bool, scale: float = 2.0) -> Any:
    return scale * (a @ w if train else a)
