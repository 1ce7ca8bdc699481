"""What a machine can do in each precision: what `preamp.torch.check` and `preamp.jax.check` return."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Literal, TypeAlias

__all__ = ["Advice", "Feature", "MachineReport", "PrecisionRow", "Product"]

Verdict: TypeAlias = Literal["native", "same", "emulated", "missing", "not tried"]

WIDTH = 80
SLOWER = 0.75  # of float32's speed: below it a precision counts as emulated, whatever the hardware claims
FASTER = 1.2  # times float32's speed: below it a precision is not worth its rounding
MUCH_FASTER = 1.5  # times bfloat16's speed: float16 is worth its loss scaling
ROUNDS, FEWEST_ROUNDS, SECONDS = 7, 3, 0.3  # of a comparison
ENOUGH, TOO_MUCH = 4e-3, 10e-3  # seconds: when float32, or the other precision, is timed long enough
LEGEND = (
    "Speeds are multiples of float32's. native: faster than float32, or about as fast and the framework "
    "says that the hardware has it. same: about as fast, and nothing is known of the hardware. emulated: "
    "slower, or the framework says that the hardware lacks it. missing: it raises."
)


@dataclass(frozen=True)
class Product:
    """A kind of product in one precision.

    Attributes:
        speed: as a multiple of float32's; 0.0 if it raises, NaN if it was not tried.
        claimed: whether the hardware has it, by what the framework says; None if it says nothing.
        problem: the first line of what it raised.
    """

    speed: float
    claimed: bool | None = None
    problem: str = ""

    @property
    def verdict(self) -> Verdict:
        """Whether the hardware computes it: by its speed, and by what the framework says."""
        if self.problem:
            return "missing"
        if math.isnan(self.speed):
            return "not tried"
        if self.speed < SLOWER or self.claimed is False:
            return "emulated"
        return "native" if self.claimed or self.speed >= FASTER else "same"

    def __str__(self) -> str:
        if self.problem:
            return "missing"
        digits = 2 if self.speed < 9.995 else 0
        return "-" if math.isnan(self.speed) else f"{self.speed:.{digits}f}x {self.verdict}"


NOT_TRIED = Product(math.nan)
REFERENCE = Product(1.0, claimed=True)


@dataclass(frozen=True)
class PrecisionRow:
    """One precision on one type of device.

    Attributes:
        device: the device type, such as "cuda".
        precision: its name, such as "bfloat16".
        products: by name: matmul, conv, attention.
        training: "works" if a small model learns as well as in float32, with autocast and, in float16, a
            scaler; otherwise what went wrong; "" if it was not tried.
    """

    device: str
    precision: str
    products: Mapping[str, Product]
    training: str = ""

    @property
    def speed(self) -> float:
        """The geometric mean of the products' speeds: 0.0 if one raises."""
        speeds = [one.speed for one in self.products.values() if not math.isnan(one.speed)]
        return math.prod(speeds) ** (1 / len(speeds)) if speeds else math.nan


@dataclass(frozen=True)
class Feature:
    """Something that works on a type of device or does not, whatever the precision.

    Attributes:
        device: the device type.
        name: what it is, such as "torch.compile".
        problem: why it does not work, in one line; "" if it works.
    """

    device: str
    name: str
    problem: str = ""


@dataclass(frozen=True)
class Advice:
    """What to use on a type of device.

    Attributes:
        device: the device type.
        precision: its name.
        reason: why.
        code: the lines to write.
    """

    device: str
    precision: str
    reason: str
    code: str


@dataclass(frozen=True)
class MachineReport:
    """What was measured on this machine. `print` shows it in 80 columns.

    Attributes:
        rows: one for each device type and precision.
        features: what works besides.
        advice: one for each device type.
        notes: what the framework says of the hardware, by device type.
        seconds: how long it took.
    """

    rows: Sequence[PrecisionRow]
    features: Sequence[Feature]
    advice: Sequence[Advice]
    notes: Mapping[str, str]
    seconds: float

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for row in self.rows for name in row.products))
        cells = [["device", "precision", *names, "training"]]
        for row in self.rows:
            told = "fails" if row.training not in ("", "works") else row.training or "-"
            cells.append(
                [row.device, row.precision, *(str(row.products.get(name, NOT_TRIED)) for name in names), told]
            )
        lines = [*aligned(cells), "", *_wrapped(LEGEND)]
        for device, note in self.notes.items():
            lines += _wrapped(f"{device}: {note}")
        for row in self.rows:
            lines += [line for problem in _problems(row) for line in _wrapped(problem)]
        for feature in self.features:
            told = feature.problem.rstrip(".") or "works"
            lines += _wrapped(f"{feature.device}: {feature.name} {told}.")
        for advice in self.advice:
            lines += ["", *_wrapped(f"Use {advice.precision} on {advice.device}: {advice.reason}")]
            lines += textwrap.indent(advice.code, "    ").splitlines()
        return "\n".join(lines)


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first two columns aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if n < 2 else f"{cell:>{width}}"
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def compared(base: Callable[[], object], other: Callable[[], object]) -> float:
    """Return how many times as fast the second function is: medians of calls that alternate."""
    start = perf_counter()
    seconds: tuple[list[float], list[float]] = ([], [])
    for n in range(ROUNDS):
        if n >= FEWEST_ROUNDS and perf_counter() - start > SECONDS:
            break
        for run, taken in zip((base, other), seconds, strict=True):
            taken.append(timed(run))
    return median(seconds[0]) / max(median(seconds[1]), 1e-9)


def timed(run: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = perf_counter()
    run()
    return perf_counter() - start


def measure_product(
    make: Callable[[int, str], Callable[[], object]],
    sizes: Iterable[int],
    precision: str,
    claimed: bool | None,
) -> Product:
    """Measure a product at the largest size that takes a few milliseconds.

    float16 can be a hundred times slower than float32, so each precision has its own size.

    Args:
        make: returns what computes the product at a size in a precision, and waits for the result.
        sizes: the sizes to try, ascending.
        precision: what is compared with float32.
        claimed: whether the hardware has it, by what the framework says; None if it says nothing.
    """
    try:
        for size in sizes:
            base, other = make(size, "float32"), make(size, precision)
            base(), other()
            # The faster of two: one call may have waited for another program.
            if min(timed(base), timed(base)) >= ENOUGH or min(timed(other), timed(other)) >= TOO_MUCH:
                break
    except Exception as error:  # frameworks and their backends raise various classes
        return Product(0.0, claimed, first_line(error))
    return Product(compared(base, other), claimed)


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message, shortened."""
    lines = str(error).strip().splitlines() or [""]
    return textwrap.shorten(f"{type(error).__name__}: {lines[0]}", 200, placeholder=" ...")


def judged(loss: float, reference: float, first: float) -> str:
    """Return "works" if a training reached about the loss that float32 reaches, else what is wrong."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if loss > first / 2 or abs(loss - reference) > 0.25 * reference:
        return f"the loss goes from {first:.3g} to {loss:.3g}, in float32 to {reference:.3g}"
    return "works"


def advise(rows: Sequence[PrecisionRow], code: Mapping[str, str]) -> Advice:
    """Return what to use on the device of some rows.

    Args:
        rows: of one device type, float32's among them.
        code: by precision, the lines to write.
    """
    usable = {row.precision: row for row in rows if row.training == "works"}
    speeds = {name: row.speed for name, row in usable.items()}
    device, brain, half = rows[0].device, speeds.get("bfloat16", 0.0), speeds.get("float16", 0.0)
    if half >= FASTER and half >= MUCH_FASTER * brain:
        precision = "float16"
        reason = (
            f"products are {half:.2g} times as fast as in float32"
            + (f", {half / brain:.2g} times as fast as in bfloat16" if brain else "; bfloat16 does not work")
            + ". It needs loss scaling."
        )
    elif brain >= FASTER:
        precision = "bfloat16"
        reason = (
            f"products are {brain:.2g} times as fast as in float32, and it has float32's range, so it needs "
            "no loss scaling."
        )
    else:
        precision = "float32"
        tried = [
            f"{speeds[name]:.2g} times in {name}" for name in ("bfloat16", "float16") if speeds.get(name)
        ]
        reason = "nothing in low precision works in full."
        if tried:
            reason = f"products are not faster in low precision ({', '.join(tried)})."
        if speeds.get("TF32", 0.0) >= FASTER:
            precision = "TF32"
            reason = f"with it products are {speeds['TF32']:.2g} times as fast as in float32; {reason}"
    return Advice(device, precision, reason, code[precision])


def _problems(row: PrecisionRow) -> list[str]:
    where = f"{row.precision} on {row.device}"
    found = [f"{where}: {name}: {one.problem}" for name, one in row.products.items() if one.problem]
    if row.training not in ("", "works"):
        found.append(f"{where}: training: {row.training}")
    return found


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False)
