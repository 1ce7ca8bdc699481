"""Format scales, counts and shares for people to read."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import median

from preamp.record.trace import Trace

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
BLOCKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 8
BELOW_FLOAT32, ABOVE_FLOAT32 = -150.0, 128.0


def exponent(scale: float) -> float:
    """Return a scale's power of two; just outside float32's range for 0 and inf."""
    if scale <= 0.0:
        return BELOW_FLOAT32
    return math.log2(scale) if scale < math.inf else ABOVE_FLOAT32


def power(scale: float | None) -> str:
    """Return a scale as a power of two where it is one.

    >>> power(65536.0), power(0.5), power(65504.0)
    ('2¹⁶', '2⁻¹', '65504')
    """
    if scale is None:
        return "-"
    if 0.0 < scale < math.inf and math.frexp(scale)[0] == 0.5:
        return two_to(math.frexp(scale)[1] - 1)
    return f"{scale:.5g}" if 1.0 < scale < 1e5 else f"{scale:.3g}"


def two_to(exponent: int) -> str:
    """Return a power of two, also one that no float can hold.

    >>> two_to(16), two_to(-2000)
    ('2¹⁶', '2⁻²⁰⁰⁰')
    """
    return "2" + str(exponent).translate(SUPERSCRIPT)


def powers(count: int) -> str:
    """Return a number of powers of two, in words.

    >>> powers(1), powers(8)
    ('1 power of two', '8 powers of two')
    """
    return f"{count} power{'' if count == 1 else 's'} of two"


def kebab(name: str) -> str:
    """Return the name of a class in the form of a command-line flag.

    >>> kebab("SpikeGuard")
    'spike-guard'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()


def of_steps(count: int, steps: int) -> str:
    """Return a count and the share of all steps that it is.

    >>> of_steps(20, 1000)
    '20 of 1,000 steps (2.0 %)'
    """
    return f"{count:,} of {steps:,} steps ({percent(count / max(steps, 1))})"


def percent(share: float) -> str:
    """Return a share in percent, to two digits.

    >>> percent(0.5), percent(0.0234), percent(0.0), percent(2e-6)
    ('50 %', '2.3 %', '0 %', 'below 0.01 %')
    """
    hundred = 100.0 * share
    if 0.0 < hundred < 0.01:
        return "below 0.01 %"
    digits = 0 if hundred >= 9.95 or not hundred else 1 if hundred >= 0.995 else 2
    return f"{hundred:.{digits}f} %"


def spread(values: Sequence[float]) -> str:
    """Return the only value, or the median and the range of several."""
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def sparkline(trace: Trace) -> str:
    """Return the scale's powers of two over time as a row of blocks, lowest to highest."""
    scales = [scale for scale in trace.column("scale") if scale == scale]
    low, high = exponent(min(scales, default=1.0)), exponent(max(scales, default=1.0))
    picked = [exponent(scales[n * len(scales) // SPARKLINE_WIDTH]) for n in range(SPARKLINE_WIDTH) if scales]
    return "".join(BLOCKS[round((e - low) / (high - low or 1.0) * (len(BLOCKS) - 1))] for e in picked)
