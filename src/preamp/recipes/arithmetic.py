"""The arithmetic of recipes: what a quantized array stands for, in any framework that has these functions.

Everything is float32. Scales and roundings are computed on the bits, because compilers rewrite divisions,
flush subnormal numbers and drop NaN. What is made here is written into where a framework can (`+=`), which
halves the time on a CPU. Sources: the OCP's MX specification 1.0, Transformer Engine's
`common/recipe` and `common/cast`, torchao's `float8` and `prototype/mx_formats`, DeepGEMM and qwix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from preamp.recipes.values import FORMATS, Quant

Array: TypeAlias = Any
Change: TypeAlias = Callable[[Array], Array]
Seen: TypeAlias = Callable[[Array, Array, Array], object]

BIAS, MANTISSA = 127, 23  # of float32
EXPONENTS, FRACTION = 0xFF, (1 << MANTISSA) - 1
EXPONENT = EXPONENTS << MANTISSA
HALF = 1 << (MANTISSA - 1)  # the fraction of 2**-127
HUGE = (2 - 2.0**-MANTISSA) * 2.0**BIAS
NVFP4_RANGE = FORMATS["e4m3"].largest * FORMATS["e2m1"].largest
ROTATED = 16  # the size of the Hadamard matrix
_ODD = (-2048144789, -1028477387, -1640531535, 668265263)  # from murmur and xxHash, as int32
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)  # as all owners fix them


def _hadamard(size: int) -> list[list[float]]:
    if size == 1:
        return [[1.0]]
    half = _hadamard(size // 2)
    return [[*row, *row] for row in half] + [[*row, *(-each for each in row)] for row in half]


_ROOT = math.sqrt(ROTATED)
HADAMARD = [
    [sign * each / _ROOT for each in row] for sign, row in zip(SIGNS, _hadamard(ROTATED), strict=True)
]
"""The Hadamard matrix over its root, with its rows times the fixed signs."""


class Arrays(Protocol):
    """What a framework provides, all of it on float32 and int32 and element by element, but for `amax`."""

    where: Callable[..., Array]
    clip_: Callable[..., Array]  # may write into what they are given, as all with a name like this
    floor_: Change
    copysign: Callable[..., Array]
    isnan: Change
    isfinite: Change

    def bits(self, x: Array) -> Array:
        """Return the bits of float32 as int32."""
        ...

    def floats(self, bits: Array) -> Array:
        """Return the float32 that bits are those of."""
        ...

    def divided(self, numerator: Array | float, x: Array | float) -> Array:
        """Return the quotient, rounded once; one of both is an array."""
        ...

    def amax(self, x: Array, axes: tuple[int, ...]) -> Array:
        """Return the largest magnitude over axes, which stay with size 1; NaN if one is."""
        ...

    def total(self, bits: Array) -> Array:
        """Return the sum of int32 as int32, without what overflows."""
        ...

    def known_(self, x: Array, number: float) -> Array:
        """Return finite numbers as they are, and another number for NaN."""
        ...

    def places(self, x: Array, count: int) -> Array:
        """Return a vector that counts from 0 in int32, where an array is."""
        ...

    def bytes(self, x: Array, count: int) -> Array:
        """Return the first bytes of a vector of int32, in float32."""
        ...

    def joined(self, arrays: list[Array]) -> Array:
        """Return vectors one after the other."""
        ...

    def padded(self, x: Array, rows: int, columns: int) -> Array:
        """Return a matrix with so many more rows and columns of zeros."""
        ...

    def rotated(self, x: Array, matrix: list[list[float]]) -> Array:
        """Return `x @ matrix`, rounded to bfloat16, in float32; the last axis has its size."""
        ...


def power(xp: Arrays, biased: Array) -> Array:
    """Return 2**(biased - 127), where 0 stands for 2**-127."""
    return xp.floats(xp.where(biased > 0, biased << MANTISSA, HALF))


def exponent(xp: Arrays, x: Array, up: bool = False) -> Array:
    """Return the biased exponents of what is not negative, rounded down or up; 0 up to 2**-127."""
    bits = xp.bits(x)
    biased = (bits >> MANTISSA) & EXPONENTS
    if not up:
        return biased
    return biased + ((bits & FRACTION) > (biased == 0) * HALF)


def rounded(xp: Arrays, x: Array, name: str, noise: Array | None = None) -> Array:
    """Round float32 to a format's numbers. What is beyond the largest becomes it, and NaN if there is none.

    Args:
        xp: the framework.
        x: of any shape. It may be written into.
        name: a key of `FORMATS`.
        noise: numbers in [0, 1) of the same shape; with it, x is rounded down or up at random. Without, it is
            rounded to the nearest, half to even.
    """
    form = FORMATS[name]
    x = xp.clip_(x, -form.largest, form.largest)
    if not form.has_nan:
        x = xp.known_(x, form.largest)
    step = xp.clip_(xp.floats(xp.bits(x) & EXPONENT), 2.0**form.least, math.inf)  # the power of two
    if noise is None:
        # A sum whose last bit is worth one step rounds as wanted: as float32 is rounded.
        step *= 1.5 * 2.0 ** (MANTISSA - form.mantissa)
        x += step
        x -= step
        return x
    step *= 2.0**-form.mantissa
    size = xp.copysign(x, 1.0)
    size /= step
    size += noise
    size = xp.floor_(size)
    size *= step
    return xp.copysign(size, x)


def noise(xp: Arrays, x: Array, draw: int = 0) -> Array:
    """Return random multiples of 1/256 in [0, 1), one for each element of an array; 8 bits as in hardware.

    They are a hash of the place, of all the numbers of the array and of `draw`: a step that is run again
    rounds alike, whatever else draws random numbers, and no state is kept.
    """
    shift = (draw * _ODD[1] + (1 << 31)) % (1 << 32) - (1 << 31)  # as int32
    seed = xp.total(xp.bits(x)) * _ODD[0] + shift
    count = math.prod(x.shape)
    mixed = xp.places(x, -(-count // 4))  # each has four bytes
    mixed *= _ODD[2]
    mixed += (seed ^ (seed >> 15)) * _ODD[3]
    for odd in _ODD[:2]:
        mixed ^= (mixed >> 15) & 0x1FFFF  # a shift of int32 repeats the sign
        mixed *= odd
    mixed ^= (mixed >> 16) & 0xFFFF
    numbers = xp.bytes(mixed, count).reshape(x.shape)
    numbers *= 2.0**-8
    return numbers


def scaling(xp: Arrays, quant: Quant, amax: Array, whole: Array) -> tuple[Change, Change]:
    """Return what brings the elements of blocks into a format's range, and what undoes it.

    Args:
        xp: the framework.
        quant: how they are quantized.
        amax: the largest magnitude of each block.
        whole: that of the array.
    """
    return _SCALINGS[quant.owner, quant.scale](xp, quant, amax, whole)


def _times(x: Array, by: Array) -> Array:
    x *= by
    return x


def given(xp: Arrays, scale: Array) -> tuple[Change, Change]:
    """Return the same for a scale of earlier steps."""
    inverse = xp.divided(1.0, scale)
    return lambda x: x * scale, lambda q: _times(q, inverse)


def first_state(quant: Quant | None) -> list[float]:
    """Return the state of an operand before any call: its scale, the one before that, and no magnitudes."""
    return [1.0, 1.0] + [0.0] * (quant.history if quant else 0)


def next_state(xp: Arrays, quant: Quant, state: Array, x: Array) -> Array:
    """Return the state of an operand after a call; its magnitudes are newest first.

    Args:
        xp: the framework.
        quant: how it is quantized.
        state: before the call.
        x: the operand. If the magnitude that counts is 0, inf or NaN, the scale stays as it is.
    """
    history = xp.joined([xp.amax(x, (0, 1)).reshape((1,)), state[2:-1]])
    if quant.algorithm == "max":
        amax = xp.amax(xp.where(xp.isnan(history), 0.0, history), (0,))
    else:
        amax = history[:1]
    fresh = xp.clip_(xp.divided(FORMATS[quant.format].largest * 2.0**-quant.margin, amax), 0.0, HUGE)
    scale = xp.where((amax > 0) & xp.isfinite(amax), fresh, state[:1])
    return xp.joined([scale, state[:1], history])


def quantized(
    xp: Arrays, x: Array, quant: Quant, draw: int = 0, scale: Array | None = None, seen: Sequence[Seen] = ()
) -> Array:
    """Return what a matrix stands for that is quantized; its last axis is the one that is summed over.

    Args:
        xp: the framework.
        x: a float32 matrix.
        quant: how it is quantized.
        draw: of stochastic rounding; others round independently.
        scale: of earlier steps; None computes it.
        seen: called with the matrix, after any rotation, with what is rounded, and with the result.
    """
    if quant.hadamard:
        x = xp.rotated(x.reshape(-1, ROTATED), HADAMARD).reshape(x.shape)
    free, summed = x.shape
    rows, columns = quant.block[0] or free, quant.block[1] or summed
    more = -free % rows, -summed % columns

    def in_blocks(x: Array) -> Array:
        x = xp.padded(x, *more) if any(more) else x
        return x.reshape((x.shape[0] // rows, rows, x.shape[1] // columns, columns))

    def whole(blocks: Array) -> Array:
        return blocks.reshape((free + more[0], summed + more[1]))[:free, :summed]

    blocks = in_blocks(x)
    if scale is None:
        amax = xp.amax(blocks, (1, 3))
        encode, decode = scaling(xp, quant, amax, xp.amax(amax, (0, 1, 2, 3)))
    else:
        encode, decode = given(xp, scale)
    random = in_blocks(noise(xp, x, draw)) if quant.stochastic else None
    low = whole(decode(rounded(xp, encode(blocks), quant.format, random)))
    for each in seen:
        each(x, whole(encode(blocks)), low)
    return low


def _power_below(xp: Arrays, x: Array) -> Array:
    return xp.where((x > 0) & xp.isfinite(x), power(xp, exponent(xp, x)), x)


def _te_float32(xp: Arrays, quant: Quant, amax: Array, whole: Array) -> tuple[Change, Change]:
    """No epsilon; the scale of 0, inf and NaN is 1."""
    scale = xp.clip_(xp.divided(FORMATS[quant.format].largest, amax), 0.0, HUGE)
    scale = xp.where((amax > 0) & xp.isfinite(amax), scale, 1.0)
    return given(xp, _power_below(xp, scale) if quant.exponent else scale)


def _torchao_float32(xp: Arrays, quant: Quant, amax: Array, whole: Array) -> tuple[Change, Change]:
    """No magnitude below 1e-12. Elements are divided by the scale, but in blocks of both axes' own sizes."""
    largest = FORMATS[quant.format].largest
    scale = xp.where(amax <= 1e-12, largest / 1e-12, xp.divided(largest, amax))
    scale = _power_below(xp, scale) if quant.exponent else scale
    if quant.block[1]:
        return given(xp, scale)
    return lambda x: x * scale, lambda q: xp.divided(q, scale)


def _deepgemm(xp: Arrays, quant: Quant, amax: Array, whole: Array) -> tuple[Change, Change]:
    """No magnitude below 1e-4, and a power of two above what brings the largest one into range."""
    scale = xp.divided(xp.clip_(amax, 1e-4, math.inf), FORMATS[quant.format].largest)
    if quant.scale == "e8m0":
        scale = power(xp, xp.clip_(exponent(xp, scale, up=True), 1, 2 * BIAS))
    inverse = xp.divided(1.0, scale)
    return lambda x: x * inverse, lambda q: _times(q, scale)


def _mx(xp: Arrays, quant: Quant, amax: Array, whole: Array) -> tuple[Change, Change]:
    """A power of two for each block; NaN for a block with NaN."""
    form = FORMATS[quant.format]
    if quant.exponent == "up":
        is_divided = quant.owner == "torchao"
        by = xp.divided(amax, form.largest) if is_divided else amax * (1 / form.largest)
        biased = exponent(xp, by, up=True)
    else:
        half = 1 << (MANTISSA - 1 - form.mantissa) if quant.exponent == "even" else 0
        top = math.frexp(form.largest)[1] - 1
        biased = exponent(xp, xp.floats(xp.bits(amax) + half), up=quant.exponent == "ceil") - top
    biased = xp.clip_(biased, 0, 2 * BIAS)
    up, down = (xp.where(xp.isnan(amax), math.nan, power(xp, each)) for each in (2 * BIAS - biased, biased))
    return lambda x: x * up, lambda q: _times(q, down)


def _te_nvfp4(xp: Arrays, quant: Quant, amax: Array, whole: Array) -> tuple[Change, Change]:
    """A scale in e4m3 for each block, subnormal numbers and 0 too, and one in float32 for the array."""
    top = xp.clip_(xp.divided(NVFP4_RANGE, whole), 0.0, HUGE)
    top = xp.where((whole == 0) | (top == 0), 1.0, top)
    block = rounded(xp, amax * (top * (1 / FORMATS[quant.format].largest)), "e4m3")
    up = xp.clip_(xp.divided(1.0, block * xp.divided(1.0, top)), 0.0, HUGE)
    down = block * whole * (1 / NVFP4_RANGE)
    return lambda x: x * up, lambda q: _times(q, down)


def _torchao_nvfp4(xp: Arrays, quant: Quant, amax: Array, whole: Array) -> tuple[Change, Change]:
    """No scale of a block below the smallest normal number of e4m3."""
    top = xp.divided(whole, NVFP4_RANGE)
    form = FORMATS["e4m3"]
    block = xp.divided(xp.divided(amax, FORMATS[quant.format].largest), top)
    block = xp.clip_(block, 2.0**form.least, form.largest)
    block = rounded(xp, block, "e4m3")
    up, down = xp.divided(xp.divided(1.0, top), block), top * block
    return lambda x: x * up, lambda q: _times(q, down)


def _qwix(xp: Arrays, quant: Quant, amax: Array, whole: Array) -> tuple[Change, Change]:
    """The scale of magnitudes below 1e-19 is 1."""
    scale = amax * (1 / FORMATS[quant.format].largest)
    scale = xp.where(scale < 2.0**-63, 1.0, scale)
    if quant.scale == "e8m0":
        finite = (scale > 0) & xp.isfinite(scale)
        scale = xp.where(finite, power(xp, exponent(xp, scale, up=True)), scale)
    elif quant.scale == "e4m3":
        scale = rounded(xp, scale, "e4m3")
    up = xp.where(scale == 0, 0.0, xp.divided(1.0, scale))
    return lambda x: x * up, lambda q: _times(q, scale)


_SCALINGS: dict[tuple[str, str], Callable[[Arrays, Quant, Array, Array], tuple[Change, Change]]] = {
    ("transformer_engine", "float32"): _te_float32,
    ("transformer_engine", "e8m0"): _mx,
    ("transformer_engine", "e4m3"): _te_nvfp4,
    ("torchao", "float32"): _torchao_float32,
    ("torchao", "e8m0"): _mx,
    ("torchao", "e4m3"): _torchao_nvfp4,
    ("deepgemm", "float32"): _deepgemm,
    ("deepgemm", "e8m0"): _deepgemm,
    ("qwix", "float32"): _qwix,
    ("qwix", "e8m0"): _qwix,
    ("qwix", "e4m3"): _qwix,
}
