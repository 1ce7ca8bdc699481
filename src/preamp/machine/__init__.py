"""What a machine can do in each precision: what `preamp.torch.check` and `preamp.jax.check` return."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Advice", "Feature", "MachineReport", "PrecisionRow", "Product"]

Verdict: TypeAlias = Literal["native", "same", "slower", "emulated", "missing", "not tried"]

WIDTH = 80
SLOWER = 0.75  # of float32's speed: above it a precision counts as about as fast
FASTER = 1.2  # times float32's speed: below it a precision is not worth its rounding
LEGEND = (
    "Speeds are multiples of float32's. native: faster than float32, or about as fast and the framework "
    "says that the hardware has it. same: about as fast, and the framework says nothing. slower: below "
    "0.75x. emulated: the framework says that the hardware lacks it, whatever the speed. missing: it raises."
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
        """Whether the hardware has it and is fast at it: by what the framework says, and by its speed."""
        if self.problem:
            return "missing"
        if math.isnan(self.speed):
            return "not tried"
        if self.claimed is False:
            return "emulated"
        if self.speed < SLOWER:
            return "slower"
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
        lines = [*_aligned(cells), "", *_wrapped(LEGEND)]
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


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first two columns aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if n < 2 else f"{cell:>{width}}"
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _problems(row: PrecisionRow) -> list[str]:
    where = f"{row.precision} on {row.device}"
    found = [f"{where}: {name}: {one.problem}" for name, one in row.products.items() if one.problem]
    if row.training not in ("", "works"):
        found.append(f"{where}: training: {row.training}")
    return found


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False)
