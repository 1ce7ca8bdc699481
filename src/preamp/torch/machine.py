"""What this machine can do in each precision: products, training, the compiler and a fused optimizer."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from preamp.arrays.torch_compat import compiler_options, counters_of_compiler, scaled_mm
from preamp.arrays.torch_devices import check_device, device_types, native_precisions, synchronize
from preamp.errors import UsageError
from preamp.machine import NOT_TRIED, REFERENCE, Feature, MachineReport, PrecisionRow
from preamp.machine.measurements import advise, first_line, judged, measure_product
from preamp.torch.autocasting.region import autocast
from preamp.torch.autocasting.unscaled import watch
from preamp.torch.scaling.grad_scaler import GradScaler

DTYPES = {
    "float32": torch.float32,
    "TF32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
STEPS, BATCH, INPUTS = 40, 64, 32
MATRICES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
CHANNELS = (8, 16, 32, 64, 128, 256, 512, 1024)
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def check(devices: Iterable[str | torch.device] | str | torch.device | None = None) -> MachineReport:
    """Measure what this machine can do in each precision, in about ten seconds for each device type.

    For each device type and precision: the speed of a matrix product, a convolution and attention, as
    multiples of float32's, and whether a small model learns with `autocast` and `GradScaler`. For each device
    type: whether `torch.compile` and a fused optimizer work, and what to use. For float8,
    only matrix products are measured.

    The state of random generators, autograd and autocast and the environment variables are as before
    afterwards. `torch.compile` keeps what it compiled in its usual cache.

    Args:
        devices: a device type to check, such as "cuda", or several. None: the CPU and any accelerator.

    Returns:
        The report; `print` shows it.

    Raises:
        PolicyError: for what is not a device type.
        UsageError: for a device type that this machine does not have, and for no device at all.

    >>> report = check(["cpu"])
    >>> [row.precision for row in report.rows][:3], report.advice[0].device
    (['float32', 'bfloat16', 'float16'], 'cpu')
    """
    start, kinds = perf_counter(), _kinds(devices)
    rows: list[PrecisionRow] = []
    features: list[Feature] = []
    advice, notes = [], {}
    with (
        watch.paused(),
        _same_environment(),
        torch.random.fork_rng(devices=[]),  # of the CPU: no device's generator is used
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device("cpu"),
    ):
        for kind in kinds:
            with torch.autocast(kind, enabled=False):
                claimed = native_precisions(kind)
                found = [_reference_row(kind)]
                for precision in _precisions(kind)[1:]:
                    found.append(_row(found[0], precision, claimed.get(precision.partition("_")[0])))
                rows += found
                advice.append(advise(found, _code(kind)))
                notes[kind] = _note(kind, claimed)
                features.append(Feature(kind, "fused AdamW with GradScaler", _fused(kind)))
                compiled = torch.bfloat16 if claimed.get("bfloat16", kind == "cpu") else torch.float16
                features.append(Feature(kind, "torch.compile with autocast", _compiles(kind, compiled)))
    return MachineReport(rows, features, advice, notes, perf_counter() - start)


def _kinds(devices: Iterable[str | torch.device] | str | torch.device | None) -> list[str]:
    """Return the device types to check, each once; refuse those that are not there."""
    present = device_types()
    if devices is None:
        return present
    if isinstance(devices, str | torch.device):
        devices = [devices]
    kinds = []
    for device in devices:
        check_device(device)
        kinds.append(str(device))
        if kinds[-1] not in present:
            raise UsageError(
                f"This machine has no {kinds[-1]!r}. Write one of its devices: {', '.join(present)}."
            )
    if not kinds:
        raise UsageError(
            f"devices is empty. Leave it out to check all, or write some of {', '.join(present)}."
        )
    return list(dict.fromkeys(kinds))


def _precisions(kind: str) -> list[str]:
    has_tf32 = kind == "cuda" and not torch.version.hip and torch.cuda.get_device_capability() >= (8, 0)
    return [name for name in DTYPES if name != "TF32" or has_tf32]


def _code(kind: str) -> dict[str, str]:
    """Return the lines to write for each precision that can be recommended."""
    start = "import torch\nfrom preamp.torch import"
    forward = f'with autocast("{kind}", dtype=torch.{{}}):\n    loss = ...'
    return {
        "float32": f"{start} autocast\n\nloss = ...  # without autocast\n# or, to rehearse float16:\n"
        f'with autocast("{kind}", dtype=torch.float16, emulate=True):\n    loss = ...',
        "TF32": 'import torch\n\ntorch.set_float32_matmul_precision("high")\nloss = ...  # without autocast',
        "bfloat16": f"{start} autocast\n\n{forward.format('bfloat16')}\nloss.backward()",
        "float16": f'{start} GradScaler, autocast\n\nscaler = GradScaler("{kind}")\n'
        f"{forward.format('float16')}\nscaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
    }


def _note(kind: str, claimed: Mapping[str, bool]) -> str:
    said = [f"{name} {'yes' if has else 'no'}" for name, has in claimed.items()]
    note = f"in hardware, PyTorch {torch.__version__} says: {', '.join(said)}." if said else ""
    if kind == "cuda":
        where = (
            "float32 is as configured in PyTorch: convolutions use TF32 if torch.backends.cudnn.allow_tf32."
        )
        note = f"{torch.cuda.get_device_name()}; {note} {where}"
    return note or f"PyTorch {torch.__version__} does not say what the hardware has."


def _reference_row(kind: str) -> PrecisionRow:
    """Return the row of float32, with what it is missing."""
    products = {}
    for name, (make, sizes) in PRODUCTS.items():
        tried = measure_product(_maker(kind, make), sizes[:1], "float32", True)
        products[name] = tried if tried.problem else REFERENCE
    return PrecisionRow(kind, "float32", products, _training(kind, "float32"))


def _row(reference: PrecisionRow, precision: str, claimed: bool | None) -> PrecisionRow:
    kind = reference.device
    is_float8 = precision.startswith("float8")
    products = {}
    for name, (make, sizes) in PRODUCTS.items():
        if reference.products[name].problem or (is_float8 and name != "matmul"):
            products[name] = NOT_TRIED
        else:
            products[name] = measure_product(_maker(kind, make), sizes, precision, claimed)
    return PrecisionRow(kind, precision, products, "" if is_float8 else _training(kind, precision))


def _maker(
    kind: str, make: Callable[[int, str, torch.dtype], Callable[[], Tensor]]
) -> Callable[[int, str], Callable[[], object]]:
    """Return what makes a function that computes a product without autograd and waits for the result."""

    def at(size: int, precision: str) -> Callable[[], object]:
        product = make(size, kind, DTYPES[precision])

        def run() -> None:
            with torch.no_grad(), _tf32(precision == "TF32"):
                product()
                synchronize(kind)

        return run

    return at


@contextmanager
def _tf32(is_on: bool) -> Iterator[None]:
    if not is_on:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _numbers(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers that do not depend on the generator of a device."""
    return torch.randn(*shape, dtype=torch.float32, device="cpu").to(device, dtype)


def _matmul(size: int, device: str, dtype: torch.dtype) -> Callable[[], Tensor]:
    a = _numbers(size, size, device=device, dtype=dtype)
    if dtype.itemsize == 1:  # the second factor is e4m3: CUDA multiplies no two e5m2
        return scaled_mm(a, _numbers(size, size, device=device, dtype=torch.float8_e4m3fn).t())
    return lambda: a @ a


def _convolution(size: int, device: str, dtype: torch.dtype) -> Callable[[], Tensor]:
    x = _numbers(8, size, 32, 32, device=device, dtype=dtype)
    weight = _numbers(size, size, 3, 3, device=device, dtype=dtype)
    return lambda: F.conv2d(x, weight, padding=1)


def _attention(size: int, device: str, dtype: torch.dtype) -> Callable[[], Tensor]:
    x = _numbers(1, 4, size, 64, device=device, dtype=dtype)
    return lambda: F.scaled_dot_product_attention(x, x, x)


PRODUCTS = {
    "matmul": (_matmul, MATRICES),
    "conv": (_convolution, CHANNELS),
    "attention": (_attention, LENGTHS),
}


def _training(kind: str, precision: str) -> str:
    """Return "works" if a small model learns in a precision as in float32, else what is wrong."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            first, reference = _train(kind, "float32")
            loss = reference if precision == "float32" else _train(kind, precision)[1]
    except Exception as error:  # backends raise various classes
        return first_line(error)
    off = [str(one.message) for one in caught if "autocast" in str(one.message).lower()]
    return off[0] if off else judged(loss, reference, first)


def _train(kind: str, precision: str) -> tuple[float, float]:
    """Train a small model; return the first and the last loss."""
    torch.default_generator.manual_seed(0)
    layers = (torch.nn.Linear(INPUTS, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    model = torch.nn.Sequential(*layers).to(kind, torch.float32)
    x = _numbers(BATCH, INPUTS, device=kind)
    target = x[:, :1] * 2.0 + 1.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=False)
    scaler = GradScaler(kind, enabled=precision == "float16")
    is_low = precision in ("bfloat16", "float16")
    region = autocast(kind, DTYPES[precision] if is_low else None, enabled=is_low)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with region, _tf32(precision == "TF32"):
            loss = F.mse_loss(model(x).float(), target)
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    first, last = torch.stack([losses[0], losses[-1]]).tolist()
    return first, last


def _fused(kind: str) -> str:
    """Return why a fused optimizer takes no step with a scaler, "" if it does."""
    try:
        weight = torch.nn.Parameter(torch.ones(8, dtype=torch.float32, device=kind))
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
        scaler = GradScaler(kind, init_scale=8.0)
        torch.autograd.backward(scaler.scale((weight * 2.0).sum()))
        scaler.step(optimizer)
        scaler.update()
        moved = weight.detach().mean().item()
    except Exception as error:  # backends raise various classes
        return f"does not work: {first_line(error)}"
    return "" if math.isfinite(moved) and moved < 1.0 else f"does not work: weights of 1 became {moved:g}"


def _compiles(kind: str, dtype: torch.dtype) -> str:
    """Return why a small function under autocast cannot be compiled and differentiated, "" if it can."""
    region = autocast(kind, dtype)  # PyTorch 2.6 compiles no code that makes one
    weight = torch.full((16, 16), 0.5, dtype=torch.float32, device=kind, requires_grad=True)

    def product(x: Tensor) -> Tensor:
        with region:
            return F.relu(x @ weight).float().sum()

    try:
        with warnings.catch_warnings(action="ignore"), counters_of_compiler():
            compiled = torch.compile(product, options=compiler_options())
            loss = compiled(torch.ones(4, 16, dtype=torch.float32, device=kind))
            torch.autograd.backward(loss)
        gradient = None if weight.grad is None else weight.grad.mean().item()
    except Exception as error:  # the compiler raises various classes
        return f"does not work: {_reason(error)}"
    return "" if gradient == 4.0 else f"does not work: a gradient is {gradient}, not 4.0"


@contextmanager
def _same_environment() -> Iterator[None]:
    """Take back what the compiler does to environment variables when it is imported."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _reason(error: BaseException) -> str:
    """Return what is behind an error of the compiler, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    if "C++ compiler" in str(error) or "InvalidCxxCompiler" in type(error).__name__:
        return "there is no C++ compiler. Install one (on Debian and Ubuntu g++), or set CXX to its path"
    if "triton" in str(error).lower():
        return f"Triton is missing or does not work. {first_line(error)}"
    return first_line(error)
