"""Measure what a machine can do, the same for every framework, and what to use then."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter

from preamp.machine import FASTER, SLOWER, Advice, PrecisionRow, Product

PRODUCTS = "matrix products, convolutions and attention"
MUCH_FASTER = 1.5  # times bfloat16's speed: float16 is worth its loss scaling
ROUNDS, FEWEST_ROUNDS, SECONDS = 7, 3, 0.3  # of a comparison
REPETITIONS = 2  # of a comparison that finds a precision a little slower than float32
ENOUGH, TOO_MUCH = 4e-3, 10e-3  # seconds: when float32, or the other precision, is timed long enough


def compared(base: Callable[[], object], other: Callable[[], object]) -> float:
    """Return how many times as fast the second function is.

    Calls alternate, and the fastest of each function counts: other programs only make calls slower.
    """
    start = perf_counter()
    seconds: tuple[list[float], list[float]] = ([], [])
    for n in range(ROUNDS):
        if n >= FEWEST_ROUNDS and perf_counter() - start > SECONDS:
            break
        for run, taken in zip((base, other), seconds, strict=True):
            taken.append(timed(run))
    return min(seconds[0]) / max(min(seconds[1]), 1e-9)


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
    return Product(_best_speed(base, other), claimed)


def _best_speed(base: Callable[[], object], other: Callable[[], object]) -> float:
    """Compare two functions, again if the second seems a little slower: another program may be why."""
    speed = compared(base, other)
    for _ in range(REPETITIONS):
        if not SLOWER / 2 < speed < SLOWER:
            break
        speed = max(speed, compared(base, other))
    return speed


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message, shortened, without a full stop."""
    lines = str(error).strip().splitlines() or [""]
    return textwrap.shorten(f"{type(error).__name__}: {lines[0]}".rstrip(" .:"), 200)


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
            f"{PRODUCTS} run {half:.2g} times as fast as in float32"
            + (f", {half / brain:.2g} times as fast as in bfloat16" if brain else "; bfloat16 does not work")
            + ". It needs loss scaling."
        )
    elif brain >= FASTER:
        precision = "bfloat16"
        reason = (
            f"{PRODUCTS} run {brain:.2g} times as fast as in float32. It has float32's range, so it needs no "
            "loss scaling."
        )
    else:
        precision = "float32"
        tried = [f"{name} {speeds[name]:.2f}x" for name in ("bfloat16", "float16") if speeds.get(name)]
        reason = "nothing in low precision works in full."
        if tried:
            reason = f"{PRODUCTS} are not faster in low precision ({', '.join(tried)})."
        if speeds.get("TF32", 0.0) >= FASTER:
            precision = "TF32"
            reason = f"{PRODUCTS} run {speeds['TF32']:.2g} times as fast as in float32; {reason}"
    return Advice(device, precision, reason, code[precision])
