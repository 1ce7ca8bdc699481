"""What this machine can do in each precision: products, and training with autocast and loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from time import perf_counter
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from preamp.checks import shown
from preamp.errors import UsageError
from preamp.jax.autocasting.transform import autocast
from preamp.jax.scaling.train_step import step
from preamp.jax.scaling.transformation import loss_scaled
from preamp.machine import REFERENCE, MachineReport, PrecisionRow
from preamp.machine.measurements import advise, first_line, judged, measure_product
from preamp.policy import Dynamic, Static

PRECISIONS = ("float32", "bfloat16", "float16")
Maker: TypeAlias = Callable[[int, str], Callable[[], object]]
STEPS, BATCH, INPUTS = 40, 64, 32
IMPORT = "import jax\nfrom preamp.jax import autocast"
CODE = {
    "float32": f"{IMPORT}\n\nrun = jax.jit(jax.value_and_grad(loss))\n# or, to rehearse float16:\n"
    'run = jax.jit(jax.value_and_grad(autocast(loss, "float16", emulate=True)))',
    "bfloat16": f'{IMPORT}\n\nrun = jax.jit(jax.value_and_grad(autocast(loss, "bfloat16")))',
    "float16": f"{IMPORT}, loss_scaled, step\n\noptimizer = loss_scaled(optimizer)\n"
    'run = jax.jit(step(autocast(loss, "float16"), optimizer))',
}


def check(devices: Iterable[str] | str | None = None) -> MachineReport:
    """Measure what this machine can do in each precision of JAX, in about ten seconds.

    For each device type and precision: the speed of a matrix product, a convolution and attention, compiled,
    as multiples of float32's, and whether a small model learns in a compiled step with `autocast` and
    `loss_scaled`. The report recommends a precision for each device type.

    Args:
        devices: a device type to check, such as "gpu", or several. None: the CPU and the default device.

    Returns:
        The report; `print` shows it.

    Raises:
        UsageError: for a device type that JAX does not have here, and if `devices` is empty.
    """
    start, kinds = perf_counter(), _kinds(devices)
    rows: list[PrecisionRow] = []
    advice, notes = [], {}
    for kind in kinds:
        device = _device(kind)
        with jax.default_device(device):
            makers = {name: _maker(make) for name, make in PRODUCTS.items()}
            found = [_row(kind, precision, makers) for precision in PRECISIONS]
        rows += found
        advice.append(advise(found, CODE))
        notes[kind] = _note(kind, device.device_kind)
    return MachineReport(rows, [], advice, notes, perf_counter() - start)


def _kinds(devices: Iterable[str] | str | None) -> list[str]:
    if devices is None:
        devices = ["cpu", jax.default_backend()]
    kinds = list(dict.fromkeys([devices] if isinstance(devices, str) else devices))
    if not kinds:
        raise UsageError(
            f"devices is empty. Leave it out to check all, or write the type of one: {jax.default_backend()}."
        )
    return kinds


def _note(kind: str, model: str) -> str:
    note = (
        f"JAX {jax.__version__} does not say what the hardware supports. float32 is as "
        "jax_default_matmul_precision is set; on GPUs and TPUs its products are less precise by default."
    )
    return note if model == kind else f"{model}; {note}"


def _device(kind: str) -> jax.Device:
    try:
        return jax.devices(kind)[0]
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"JAX has no device type {shown(kind)} here. Write one that it has: {jax.default_backend()}."
        ) from error


def _row(kind: str, precision: str, makers: Mapping[str, Maker]) -> PrecisionRow:
    products = dict.fromkeys(makers, REFERENCE)
    if precision != "float32":
        for name, make in makers.items():
            products[name] = measure_product(make, SIZES[name], precision, None)
    return PrecisionRow(kind, precision, products, _training(precision))


def _maker(make: Callable[[int, str], Callable[[], Array]]) -> Maker:
    """Return a maker of functions that compute a product and wait for the result."""

    @lru_cache  # each is compiled
    def at(size: int, precision: str) -> Callable[[], object]:
        product = make(size, precision)
        return lambda: product().block_until_ready()

    return at


def _numbers(precision: str, *shape: int) -> Array:
    """Return normal numbers, from NumPy: JAX would compile a generator for each shape, for a second."""
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32), precision)


def _matmul(size: int, precision: str) -> Callable[[], Array]:
    a = _numbers(precision, size, size)
    multiply = jax.jit(lambda a: a @ a)
    return lambda: multiply(a)


def _convolution(size: int, precision: str) -> Callable[[], Array]:
    x, weight = _numbers(precision, 8, 32, 32, size), _numbers(precision, 3, 3, size, size)
    layout = ("NHWC", "HWIO", "NHWC")
    convolve = jax.jit(lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout))
    return lambda: convolve(x, weight)


def _attention(size: int, precision: str) -> Callable[[], Array]:
    x = _numbers(precision, 1, size, 4, 64)
    attend = jax.jit(lambda x: jax.nn.dot_product_attention(x, x, x))
    return lambda: attend(x)


PRODUCTS = {"matmul": _matmul, "conv": _convolution, "attention": _attention}
SIZES = {
    "matmul": (256, 512, 1024, 2048, 4096),
    "conv": (16, 32, 64, 128, 256, 512),
    "attention": (128, 256, 512, 1024, 2048),
}


def _training(precision: str) -> str:
    """Return "works" if a small model learns in a precision as in float32, else what is wrong."""
    try:
        first, reference = _train("float32")
        return judged(_train(precision)[1], reference, first)
    except Exception as error:  # XLA raises various classes
        return first_line(error)


def _train(precision: str) -> tuple[float, float]:
    """Train a small model; return the first and the last loss."""
    x = _numbers("float32", BATCH, INPUTS)
    target = x[:, :1] * 2.0 + 1.0
    params = [
        (_numbers("float32", a, b) / a**0.5, jnp.zeros(b, jnp.float32)) for a, b in ((INPUTS, 64), (64, 1))
    ]

    def loss(params: list[tuple[Array, Array]], x: Array, target: Array) -> Array:
        hidden = jax.nn.gelu(x @ params[0][0] + params[0][1])
        out = hidden @ params[1][0] + params[1][1]
        return jnp.mean((out.astype(jnp.float32) - target) ** 2)

    low = loss if precision == "float32" else autocast(loss, precision)
    policy = Dynamic() if precision == "float16" else Static(1.0)
    optimizer = loss_scaled(optax.adam(1e-2), policy)
    run, state = jax.jit(step(low, optimizer)), optimizer.init(params)
    losses = []
    for _ in range(STEPS):
        value, params, state = run(params, state, x, target)
        losses.append(value)
    return float(losses[0]), float(losses[-1])
