"""What a training recipe quantizes, and how: values that know no framework."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from preamp.errors import CastingError

FormatName = Literal["e4m3", "e5m2", "e2m1", "e3m2", "e2m3"]
Stored = Literal["float32", "e8m0", "e4m3"]
Rounding = Literal["", "down", "up", "floor", "ceil", "even"]
Owner = Literal["transformer_engine", "torchao", "deepgemm", "qwix"]
Algorithm = Literal["max", "most_recent"]


class Format(NamedTuple):
    """A floating-point format.

    Attributes:
        mantissa: the bits of the mantissa that are stored.
        least: the exponent of the smallest normal number.
        largest: the largest number.
        has_nan: whether it has NaN, too; in others, NaN becomes the largest number, as in hardware.
    """

    mantissa: int
    least: int
    largest: float
    has_nan: bool = False


FORMATS: dict[str, Format] = {
    "e4m3": Format(3, -6, 448.0, has_nan=True),
    "e5m2": Format(2, -14, 57344.0, has_nan=True),
    "e2m1": Format(1, 0, 6.0),
    "e3m2": Format(2, -2, 28.0),
    "e2m3": Format(3, 0, 7.5),
}

# The scales that exist: how they are stored, to what power of two they are rounded, and by whom.
SCALES: dict[Owner, frozenset[tuple[Stored, Rounding]]] = {
    "transformer_engine": frozenset([("float32", ""), ("float32", "down"), ("e8m0", "up"), ("e4m3", "")]),
    "torchao": frozenset(
        [
            *(("float32", ""), ("float32", "down"), ("e4m3", "")),
            *(("e8m0", "up"), ("e8m0", "floor"), ("e8m0", "ceil"), ("e8m0", "even")),
        ]
    ),
    "deepgemm": frozenset([("float32", ""), ("e8m0", "up")]),
    "qwix": frozenset([("float32", ""), ("e8m0", "up"), ("e4m3", "")]),
}


@dataclass(frozen=True)
class Quant:
    """How one operand of a product is quantized.

    Attributes:
        format: of its elements: "e4m3", "e5m2", "e2m1", and the six-bit "e3m2" and "e2m3".
        block: how many elements share a scale, along the axis that stays and along the one that is summed
            over; 0 is the whole axis. `(0, 0)` is a scale per tensor, `(1, 32)` one of each 32 in a row.
        scale: how scales are stored: "float32"; "e8m0", a power of two; "e4m3", with a float32 scale of the
            tensor on top, but in qwix.
        exponent: which power of two a scale becomes: "" none in particular; "down" and "up" the next one to
            the scale; of the largest magnitude, "floor", "ceil" and "even", as in the OCP's MX specification.
        owner: whose arithmetic is followed, bit for bit: "transformer_engine", "torchao", "deepgemm" or
            "qwix". They differ in what they multiply or divide by, in the scales of 0, inf and NaN, and in
            the smallest scale.
        stochastic: whether elements are rounded up or down at random, so that they are right on average.
        hadamard: whether each 16 elements in a row are first multiplied by a 16 x 16 Hadamard matrix with
            fixed signs, in bfloat16.
        history: of how many earlier calls the scale is computed; 0 is the scale of this one.
        algorithm: of their magnitudes, whether the largest or the most recent one counts.
        margin: by how many powers of two a scale of earlier calls is made smaller.

    Raises:
        CastingError: for a value that does not exist, and for values that do not go together.
    """

    format: FormatName = "e4m3"
    block: tuple[int, int] = (0, 0)
    scale: Stored = "float32"
    exponent: Rounding = ""
    owner: Owner = "transformer_engine"
    stochastic: bool = False
    hadamard: bool = False
    history: int = 0
    algorithm: Algorithm = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        for name, known in (
            ("format", tuple(FORMATS)),
            ("owner", get_args(Owner)),
            ("algorithm", get_args(Algorithm)),
        ):
            if (value := getattr(self, name)) not in known:
                raise CastingError(
                    f"{name}={value!r} does not exist. Write one of {', '.join(map(repr, known))}."
                )
        if (self.scale, self.exponent) not in SCALES[self.owner]:
            scales = ", ".join(
                f"scale={stored!r}, exponent={power!r}" for stored, power in sorted(SCALES[self.owner])
            )
            raise CastingError(
                f"{self.owner} has no scale={self.scale!r} with exponent={self.exponent!r}. It has {scales}."
            )
        is_pair = isinstance(self.block, tuple) and len(self.block) == 2
        if not is_pair or not all(type(size) is int and size >= 0 for size in self.block):
            raise CastingError(f"block={self.block!r} is not two numbers of elements. Write block=(1, 32).")
        if self.history and self.block != (0, 0):
            raise CastingError(
                f"history={self.history} is of a whole tensor, and block={self.block}. Write block=(0, 0)."
            )
        if self.history < 0:
            raise CastingError(f"history={self.history} is negative. Write history=1024, or 0 for none.")


class Once(NamedTuple):
    """Which arrays of a layer are quantized once, because both of their products take the same numbers."""

    x: bool
    w: bool
    g: bool


Operands = tuple[Quant, Quant] | None
Product = Literal["fprop", "dgrad", "wgrad"]
Operand = Literal["input", "weight", "gradient"]
PRODUCTS: tuple[Product, ...] = get_args(Product)
CONSTANTS: dict[str, Recipe] = {}
"""The recipes of this module, by their names."""
KNOWN: dict[str, Recipe] = {}
"""The recipes that have been made, by their keys, which compilers and tables hand on as strings."""


@dataclass(frozen=True)
class Recipe:
    """How the three products of a linear layer are quantized: `y = x @ w.T` and those of its gradients.

    Attributes:
        fprop: how the input and the weight are in `x @ w.T`; None if the product stays high.
        dgrad: the gradient and the weight in `g @ w`.
        wgrad: the gradient and the input in `g.T @ x`.
        high: the dtype of operands before they are quantized, of results, and of everything that stays high:
            "bfloat16" or "float16".
        multiple: what each size of a weight and the number of rows must be a multiple of, as the recipe's
            owner asks; other products stay high.
        quants: how the operands of fprop, dgrad and wgrad are quantized, in this order; None stays high.
    """

    fprop: Operands = None
    dgrad: Operands = None
    wgrad: Operands = None
    high: Literal["bfloat16", "float16"] = "bfloat16"
    multiple: int = 1
    quants: tuple[Quant | None, ...] = field(init=False, repr=False, compare=False)
    key: str = field(init=False, repr=False, compare=False)
    once: Once = field(init=False, repr=False, compare=False)
    delayed: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for product in PRODUCTS:
            pair = getattr(self, product)
            is_pair = isinstance(pair, tuple) and len(pair) == 2
            if pair is not None and not (is_pair and all(isinstance(each, Quant) for each in pair)):
                raise CastingError(
                    f"{product}={pair!r} is not the quantization of two operands. Write {product}=(Quant(), "
                    f"Quant()), or {product}=None to keep it high."
                )
        if self.high not in ("bfloat16", "float16"):
            raise CastingError(f"high={self.high!r} is not a dtype of recipes. Write high='bfloat16'.")
        if type(self.multiple) is not int or self.multiple < 1:
            raise CastingError(f"multiple={self.multiple!r} is not a positive integer. Write multiple=16.")
        # A field, as are the others below, because the compiler does not always trace a property.
        pairs = (self.fprop, self.dgrad, self.wgrad)
        object.__setattr__(self, "quants", tuple(each for pair in pairs for each in pair or (None, None)))
        object.__setattr__(self, "key", self.name or repr(self))
        x, w, g, of_w, of_g, of_x = self.quants
        once = Once(_transposes(x, of_x), _transposes(w, of_w), _transposes(g, of_g))
        object.__setattr__(self, "once", once)
        object.__setattr__(self, "delayed", any(each and each.history for each in self.quants))
        KNOWN[self.key] = self

    @property
    def name(self) -> str:
        """The name of the constant that it is, or is but for products that stay high; "" of others.

        Such as "MXFP8" and "MXFP8 without wgrad".
        """
        if not any(self.quants):
            return ""
        for name, constant in CONSTANTS.items():
            high = [each for each in PRODUCTS if getattr(self, each) is None and getattr(constant, each)]
            alike = (getattr(self, each) == getattr(constant, each) for each in PRODUCTS if each not in high)
            if all(alike) and (self.high, self.multiple) == (constant.high, constant.multiple):
                return f"{name} without {', '.join(high)}" if high else name
        return ""

    def without(self, *products: Product) -> Recipe:
        """Return the recipe in which more products stay high.

        Raises:
            CastingError: for another name than "fprop", "dgrad" and "wgrad".
        """
        for each in products:
            if each not in PRODUCTS:
                raise CastingError(f"{each!r} is not a product. Write 'fprop', 'dgrad' or 'wgrad'.")
        return replace(self, **dict.fromkeys(products))  # type: ignore[arg-type]

    @property
    def current(self) -> Recipe:
        """The recipe that takes the scale of each call, where this one takes those of earlier ones."""
        return changed(self, history=0)


def _transposes(one: Quant | None, other: Quant | None) -> bool:
    """Return whether quantizing an array as one is quantizing its transpose as the other, but transposed."""
    if one is None or one != other:
        return one is other
    return one.block[0] == one.block[1] and not one.stochastic and not one.hadamard


def changed(recipe: Recipe, **fields: Any) -> Recipe:
    """Return a recipe with fields of all its operands changed."""
    pairs: dict[str, Any] = {
        each: (replace(pair[0], **fields), replace(pair[1], **fields))
        for each in PRODUCTS
        if (pair := getattr(recipe, each))
    }
    return replace(recipe, **pairs)


def named(name: str) -> Recipe:
    """Return the recipe that has a name, such as "MXFP8" or "MXFP8 without wgrad", in any case.

    Raises:
        CastingError: if there is none.
    """
    base, _, products = name.partition(" without ")
    found = CONSTANTS.get(base.upper().replace("-", "_"))
    high = [each.strip() for each in products.split(",")] if products else []
    if found is None or not set(high) <= set(PRODUCTS):
        raise CastingError(
            f"{name!r} is not a recipe. Write one of {', '.join(CONSTANTS)}, or one of them "
            f"without products: {'MXFP8 without wgrad'!r}."
        )
    return replace(found, **dict.fromkeys(high))  # type: ignore[arg-type]


def _of(x: Quant, w: Quant, g: Quant, multiple: int = 1) -> Recipe:
    """Return the recipe in which an array is quantized alike in both of its products."""
    return Recipe((x, w), (g, w), (g, x), multiple=multiple)


_DELAYED = Quant(history=1024)
_CURRENT = Quant()
_BLOCK = Quant(block=(1, 128), exponent="down")
_TENSORWISE = Quant(owner="torchao")
_ROWWISE = Quant(block=(1, 0), exponent="down", owner="torchao")
_DEEPSEEK = Quant(block=(1, 128), owner="deepgemm")
_MX = Quant(block=(1, 32), scale="e8m0", exponent="up")
_NV = Quant("e2m1", (1, 16), "e4m3")
_NV_WEIGHT = replace(_NV, block=(16, 16))
_NV_ROTATED = replace(_NV, hadamard=True)

FLOAT8_DELAYED = _of(_DELAYED, _DELAYED, replace(_DELAYED, format="e5m2"), 16)
FLOAT8_CURRENT = _of(_CURRENT, _CURRENT, replace(_CURRENT, format="e5m2"), 16)
FLOAT8_BLOCK = _of(_BLOCK, replace(_BLOCK, block=(128, 128)), _BLOCK, 128)
FLOAT8_TENSORWISE = _of(_TENSORWISE, _TENSORWISE, replace(_TENSORWISE, format="e5m2"), 16)
FLOAT8_ROWWISE = _of(_ROWWISE, _ROWWISE, _ROWWISE, 16)
FLOAT8_ROWWISE_GW_HP = replace(FLOAT8_ROWWISE, dgrad=(_ROWWISE, replace(_ROWWISE, block=(0, 0))), wgrad=None)
FLOAT8_DEEPSEEK = _of(_DEEPSEEK, replace(_DEEPSEEK, block=(128, 128)), _DEEPSEEK, 128)
MXFP8 = _of(_MX, _MX, _MX, 32)
MXFP8_QWIX = changed(MXFP8, owner="qwix")
MXFP8_E5M2_GRADIENTS = _of(_MX, _MX, replace(_MX, format="e5m2"), 32)
NVFP4 = Recipe(
    (_NV, _NV_WEIGHT),
    (replace(_NV, stochastic=True), _NV_WEIGHT),
    (replace(_NV_ROTATED, stochastic=True), _NV_ROTATED),
    multiple=16,
)
NVFP4_TORCHAO = replace(changed(NVFP4, owner="torchao"), multiple=128)
NVFP4_PLAIN = _of(_NV, _NV_WEIGHT, _NV, 16)

for _name, _value in list(globals().items()):
    if isinstance(_value, Recipe):
        CONSTANTS[_name] = KNOWN[_name] = _value
        object.__setattr__(_value, "key", _name)
