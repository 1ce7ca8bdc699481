"""Which operation loses the accuracy of a low-precision step: the rows, their order, and who is accused."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from preamp.autocasting.report import place
from preamp.autocasting.text_tables import WIDTH, text_table
from preamp.recipes.values import FORMATS, Product, Recipe

Direction = Literal["forward", "backward"]
Part = Literal["product", "sensitive", "other"]
ProductOf = Product | Literal[""]

ALLOWED: Mapping[Part, float] = {"product": 5.0, "sensitive": 2.0, "other": 3.0}
"""The effect that is expected of an operator, in unit roundoffs of the step's low precision."""
ALLOWED_QUANTIZED = 3.0
"""The same of a product by a recipe, in unit roundoffs of its coarsest format."""
ALLOWED_LOCAL = 0.5
"""The own error of such a product, from which on an effect of half a unit roundoff is enough."""
ALLOWED_LOSS = 2.0
"""The change of the loss that is expected of an operator, in the same unit."""
ALLOWED_LOST = 0.3
"""The share of a gradient that may be flushed to zero, of its norm or of its values."""
MEASURED = 3  # rows whose parameters are measured
SHOWN = 15  # rows in a terminal
CUT = ("source", "operator", "module")
RIGHT = ("effect", "local", "ratio")
MODEL = "the model"  # the module whose path is empty
FIRST_SCALES = "No step has run in this recipe, so the scales are those of this step."
SMALL = 2.0**-10  # of a gradient in float16, whose normal numbers end at 2**-14
ITSELF = "it"  # as what breaks of a row
FAILED = "could not be compared"  # in the note of an operator
ONLY_PRODUCTS = (
    "Only products are accused. Their rounding is amplified by what comes after them, such as large "
    "attention logits; or the gradients nearly cancel, as they do at a minimum. If the model is trained, "
    "blame an earlier step, too."
)
NOT_QUANTIZED = (
    "No layer is quantized: the recipe needs linear layers whose sizes, and number of rows, are multiples of "
    "`recipe.multiple`."
)
UNEXPLAINED = 8.0  # unit roundoffs: a change of the loss that the rows do not predict
ROUNDOFFS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
ROUNDOFFS |= {name: 2.0 ** -(form.mantissa + 1) for name, form in FORMATS.items()}
SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class BlameRow:
    """The calls of one operator at one line of one module, in one direction; with a recipe, of one product.

    Attributes:
        index: the place of the first call among the calls of the forward pass.
        module: the path of the module that called it; "-" outside of modules.
        operator: the framework's name of it.
        direction: "forward" for its results, "backward" for the gradients of its inputs.
        source: the line that called it, such as "train.py:41"; "-" if it is not known.
        inputs: the floating-point dtypes of its inputs, such as "float32, bfloat16".
        runs: the dtype that its results, or the gradients of its inputs, are rounded to; of a product by a
            recipe, the formats of its two operands, such as "e4m3, e5m2".
        part: "product" for operators that low precision exists for, "sensitive" for those that autocast's
            tables keep in float32, else "other".
        calls: the number of calls.
        local_error: the relative error, in the 2-norm, of its results (or gradients) against what float32
            gives for the very same inputs; the largest of the calls.
        effect: the predicted relative error of the step's gradients through this row alone, in the 2-norm
            over all parameters; a parameter's gradient counts times the root mean square of the parameter;
            in JAX, what became zero of it counts by itself if that is much. inf if the row overflowed or
            `breaks` something; NaN if the gradients are not finite.
        loss_effect: the predicted change of the loss through this row alone, relative to the loss (or, where
            that is larger, to the weighted norm of the gradients); 0 in the backward direction.
        values: the number of values that it returned.
        lost: the number of values that are zero, but not in float32.
        lost_share: the part of the 2-norm that those values have; the largest of the calls.
        overflowed: the number of values that are not finite, but are for the very same inputs in float32.
            In the forward direction they count only if they change the loss or a gradient, as the -inf of a
            mask does not.
        amax: the largest magnitude, in float32, times the loss scale for gradients.
        limit: the largest number of `runs`.
        flops: floating-point operations of its products in the forward pass, twice that in the backward pass.
        parameter: the parameter whose gradient suffers most; empty where that was not measured.
        parameter_error: the relative error of that parameter's gradient through this row alone.
        breaks: the operator that makes inf or NaN of what this row lost to zero; "it" if the row itself makes
            them of what was rounded before; empty if there are none.
        product: which product of a linear layer it is, in a step with a recipe: "fprop", "dgrad" (the
            gradient of its input) or "wgrad" (of its weight); else empty.
        high_effect: its effect in the recipe's high precision alone; 0 without a recipe.
        severity: how many times more the row loses than is expected of such an operator.
    """

    index: int
    module: str
    operator: str
    direction: Direction
    source: str
    inputs: str
    runs: str
    part: Part
    calls: int
    local_error: float
    effect: float
    loss_effect: float
    values: int
    lost: int
    lost_share: float
    overflowed: int
    amax: float
    limit: float
    flops: int = 0
    parameter: str = ""
    parameter_error: float = 0.0
    breaks: str = ""
    product: ProductOf = ""
    high_effect: float = 0.0
    severity: float = 0.0

    @property
    def guilty(self) -> bool:
        """Whether the row is accused: it loses more than is expected of such an operator."""
        return self.severity >= 1.0

    @property
    def place(self) -> str:
        """Where it ran, in words."""
        return place(self.module or MODEL, self.source)

    @property
    def where(self) -> str:
        """In which pass, or product, in words."""
        return self.product or f"the {self.direction} pass"

    @property
    def is_quantized(self) -> bool:
        """Whether it is a product whose operands a recipe quantizes."""
        return bool(self.product) and self.runs.split(", ")[0] in FORMATS

    @property
    def flushed(self) -> float:
        """The share of the gradients that was flushed to zero, of their norm or number; 0 for results.

        The number counts where gradients of weights come from, each of which an optimizer may need; of
        formats of four and eight bits, in which many become zero in a sound step, it does not.
        """
        if self.direction == "forward":
            return 0.0
        counts = self.part == "product" and not self.is_quantized
        return max(self.lost_share, self.lost / self.values if counts else 0.0)

    @property
    def reason(self) -> str:
        """What it lost, in a few words."""
        if self.overflowed:
            return f"{self.overflowed:,} of {self.values:,} values overflowed"
        if self.breaks:
            if self.breaks == ITSELF:
                return "it makes inf or NaN of values that were rounded before"
            return (
                f"{self.lost:,} of {self.values:,} values became zero: {self.breaks} makes inf or NaN of them"
            )
        if self.flushed >= ALLOWED_LOST:
            return f"{self.flushed:.0%} of the gradient became zero"
        if self.direction == "backward" and self.runs.startswith("float16") and 0 < self.amax < SMALL:
            return f"the scaled gradient is at most {self.amax:.0e}, too small for float16"
        if self.parameter:
            return f"the gradient of {self.parameter} changes by {self.parameter_error:.1e} of its norm"
        return ""

    def cells(self) -> dict[str, str]:
        """Return the row as text, heading to cell."""
        return {
            "": "*" if self.guilty else "",
            "operator": self.operator,
            "pass": self.product or {"forward": "fwd", "backward": "bwd"}[self.direction],
            "module": self.module or MODEL,
            "source": self.source,
            "in": _short(self.runs),
            "local": f"{self.local_error:.0e}",
            "effect": self._shown_effect(),
            "ratio": _ratio(self.severity),
        }

    def _shown_effect(self) -> str:
        if self.overflowed:
            return "overflow"
        if self.breaks:
            return "inf, NaN"
        if math.isnan(self.effect):
            return "unknown"
        if self.flushed >= ALLOWED_LOST:
            return f"{self.flushed:.0%} zero"
        return f"{max(self.effect, abs(self.loss_effect)):.1e}"


@dataclass(frozen=True)
class Blame:
    """What a step in low precision loses against float32, by operator call.

    Attributes:
        rows: worst first.
        dtype: the low precision of the step.
        loss: the loss in low precision.
        float32_loss: the loss in float32.
        predicted_loss: what the rows' effects on the loss add up to, added to `float32_loss`: a first-order
            prediction of `loss`. Where the two differ much, so may the other effects.
        loss_scale: the loss scale with which the gradients were computed.
        notes: sentences about how the step was run.
        flops: the floating-point operations of all products in the forward pass.
        low_flops: those in low precision.
        not_finite: what is inf or NaN in float32 as well, and which operator makes it first, as a sentence;
            empty if loss and gradients are finite.
        recipe: the name of the step's recipe; empty without.
        layers: with a recipe, the paths of linear layers and the shapes of their weights: (out, in).
    """

    rows: Sequence[BlameRow]
    dtype: str
    loss: float
    float32_loss: float
    predicted_loss: float
    loss_scale: float
    notes: Sequence[str] = ()
    flops: int = 0
    low_flops: int = 0
    not_finite: str = ""
    recipe: str = ""
    layers: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def roundoff(self) -> float:
        """The largest unit roundoff of the step's formats."""
        high = ROUNDOFFS[self.dtype]
        return max((roundoff_of(row, high) for row in self.rows), default=high)

    @property
    def precision(self) -> str:
        """The recipe, or the low precision of a step without one."""
        return self.recipe or self.dtype

    @property
    def guilty(self) -> list[BlameRow]:
        """The rows that lose more than is expected of such operators in this precision, worst first."""
        return [row for row in self.rows if row.guilty]

    @property
    def gradient_error(self) -> float:
        """The predicted relative error of the step's gradients through all rows; inf after an overflow."""
        return math.hypot(*(row.effect for row in self.rows))

    def by_module(self) -> Blame:
        """Return the same with one row for each module and direction, under its worst operator's name."""
        folded: dict[tuple[str, str], list[BlameRow]] = {}
        for row in self.rows:
            folded.setdefault((row.module, row.direction), []).append(row)
        return replace(self, rows=_in_order([_together(rows) for rows in folded.values()]))

    def summary(self) -> str:
        """Return what was found, as sentences."""
        size = max(abs(self.float32_loss), 1e-30)
        change = (self.loss - self.float32_loss) / size
        found = self.guilty
        if self.not_finite:
            verdict = self.not_finite
        elif not math.isfinite(self.float32_loss):
            verdict = f"The loss is {self.float32_loss} in float32 as well, so precision is not the cause."
        elif self.recipe and not any(row.is_quantized for row in self.rows):
            verdict = NOT_QUANTIZED
        elif found:
            first = found[0]
            reason = f": {first.reason}" if first.reason else ""
            verdict = f"{first.operator} {first.place} loses most, in {first.where}{reason}."
            if all(row.part == "product" and math.isfinite(row.severity) for row in found):
                verdict = f"{verdict} {ONLY_PRODUCTS}"
        elif self.is_unexplained:
            verdict = (
                "The loss changes by much more than the rows predict, so the cause was not found: it may "
                "be in what is not compared, such as the order of sums, or an effect beyond first order."
            )
        else:
            compared = "that could be compared " if any(FAILED in note for note in self.notes) else ""
            verdict = f"No operator {compared}loses more than is expected in {self.precision}."
        scale = "" if self.loss_scale == 1 else f" with the loss scale {self.loss_scale:g}"
        predicted, error = (self.predicted_loss - self.float32_loss) / size, self.gradient_error
        return (
            f"{verdict} Loss: {self.loss:.6g} in {self.precision}{scale}, {self.float32_loss:.6g} in float32"
            + ("" if math.isnan(change) else f"; relative difference {change:+.1e}")
            + ("" if math.isnan(change + predicted) else f", predicted {predicted:+.1e}")
            + ("." if math.isnan(error) else f". Predicted relative error of the gradients: {error:.1e}.")
        )

    @property
    def is_unexplained(self) -> bool:
        """Whether the loss changes by much more than the rows predict."""
        change, rest = self.loss - self.float32_loss, self.loss - self.predicted_loss
        allowed = UNEXPLAINED * self.roundoff * abs(self.float32_loss)
        return not abs(rest) <= max(0.5 * abs(change), allowed)  # also where it is NaN in low precision alone

    def table(self) -> list[dict[str, str]]:
        """Return the rows as text, heading to cell."""
        if not self.recipe:
            return [row.cells() for row in self.rows]
        high = f"in {_short(self.dtype)}"
        rows = [row.cells() | {high: f"{row.high_effect:.1e}"} for row in self.rows]
        return [{name: cell for name, cell in row.items() if name not in ("local", "ratio")} for row in rows]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as a dictionary of numbers, strings and lists, for JSON.

        Numbers that are not finite are strings, because JSON has none: "inf", "nan".
        """
        values = {**asdict(self), "rows": [asdict(row) | {"guilty": row.guilty} for row in self.rows]}
        return {key: for_json(value) for key, value in values.items()}

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def __str__(self) -> str:
        """Return the worst rows, at most 80 columns wide, and the summary.

        A star marks those accused. The ratio is the severity, by which the rows are ordered.
        """
        paragraphs = [textwrap.fill(each, WIDTH) for each in (self.summary(), *self.notes)]
        if not self.rows:
            return "\n".join(["No operator differed from float32.", "", *paragraphs])
        table = self.table()[:SHOWN]
        more = len(self.rows) - len(table)
        rest = [f"... and {more} more rows in .rows"] if more else []
        return "\n".join([*text_table(table, CUT, RIGHT), *rest, "", *paragraphs])


def ranked(rows: Iterable[BlameRow], roundoff: float) -> list[BlameRow]:
    """Return rows with their severity, worst first.

    A row's severity is the largest of three ratios to what is expected: its effect on the gradients, its
    effect on the loss, and the share of a gradient that it flushed to zero. An overflow is worse than
    everything else, and the first one is the worst: what comes after it may be its consequence. In a step
    with a recipe, formats differ in what is expected of them, and what has the largest effect comes first.

    Args:
        rows: in any order.
        roundoff: the unit roundoff of the step's low precision, half its epsilon, or of its recipe; rows of a
            product by a recipe have that of their formats.
    """
    return _in_order([replace(row, severity=_severity(row, roundoff_of(row, roundoff))) for row in rows])


def _in_order(rows: Sequence[BlameRow]) -> list[BlameRow]:
    """Return rows worst first; with a recipe by effect, as its formats differ in what is expected of them."""
    if not any(row.product for row in rows):
        return _sorted(rows)
    return sorted(_sorted(rows), key=lambda row: -max(row.effect, abs(row.loss_effect)))


def beside(found: Blame, high: Blame) -> Blame:
    """Return a step with a recipe, with what its rows do in the recipe's high precision alone."""
    effects = {_identity(row): row.effect for row in high.rows}
    rows = [replace(row, high_effect=effects.get(_identity(row), 0.0)) for row in found.rows]
    return replace(found, rows=rows)


def _identity(row: BlameRow) -> tuple[str, ...]:
    return row.module, row.operator, row.source, row.direction, row.product


def roundoff_of(row: BlameRow, otherwise: float) -> float:
    """Return the unit roundoff of a product's formats, which are those of a recipe; otherwise another one."""
    return max(ROUNDOFFS[name] for name in row.runs.split(", ")) if row.is_quantized else otherwise


def with_parameters(found: Blame, differences: Callable[[BlameRow], Iterable[tuple[float, str]]]) -> Blame:
    """Return the same with the parameter that suffers most in each of the first three rows that are accused.

    Args:
        found: rows, worst first.
        differences: returns for a row how much it alone changes each parameter's gradient, relative to that
            gradient, and the name of the parameter.
    """
    rows = list(found.rows)
    for at, row in enumerate(rows[:MEASURED]):
        measured = differences(row) if row.guilty else ()
        error, name = max((each for each in measured if math.isfinite(each[0])), default=(0.0, ""))
        if error:
            rows[at] = replace(row, parameter=name, parameter_error=error)
    return replace(found, rows=rows)


def _severity(row: BlameRow, roundoff: float) -> float:
    if row.overflowed or row.breaks:
        return math.inf
    ratios = (
        row.effect / ((ALLOWED_QUANTIZED if row.is_quantized else ALLOWED[row.part]) * roundoff),
        min(row.local_error / ALLOWED_LOCAL, 2 * row.effect / roundoff) if row.is_quantized else 0.0,
        abs(row.loss_effect) / (ALLOWED_LOSS * roundoff),
        row.flushed / ALLOWED_LOST,
    )
    return max(0.0, *(ratio for ratio in ratios if not math.isnan(ratio)))


def roundoff_in(recipe: Recipe) -> float:
    """Return the largest unit roundoff of the formats of a recipe's forward pass."""
    pair = recipe.fprop or recipe.dgrad or recipe.wgrad or ()
    return max((ROUNDOFFS[each.format] for each in pair), default=ROUNDOFFS[recipe.high])


def _sorted(rows: Iterable[BlameRow]) -> list[BlameRow]:
    """Return rows worst first: overflows in the order in which they happen, few zeros after many."""
    return sorted(
        rows,
        key=lambda row: (
            -row.severity,
            row.direction == "backward",
            bool(row.breaks) and not row.overflowed and row.lost_share < ALLOWED_LOST,
            row.index if row.direction == "forward" else -row.index,
        ),
    )


def _together(rows: Sequence[BlameRow]) -> BlameRow:
    """Return one row for several, worst first, of one module and direction."""
    worst = rows[0]
    return replace(
        worst,
        operator=worst.operator if len(rows) == 1 else f"{worst.operator} +{len(rows) - 1}",
        index=min(row.index for row in rows),
        calls=sum(row.calls for row in rows),
        local_error=max(row.local_error for row in rows),
        effect=math.hypot(*(row.effect for row in rows)),
        loss_effect=sum(row.loss_effect for row in rows),
        values=sum(row.values for row in rows),
        lost=sum(row.lost for row in rows),
        lost_share=max(row.lost_share for row in rows),
        overflowed=sum(row.overflowed for row in rows),
        breaks=next((row.breaks for row in rows if row.breaks), ""),
        amax=max(row.amax for row in rows),
        flops=sum(row.flops for row in rows),
    )


def _ratio(severity: float) -> str:
    if severity >= 9999:
        return ">9999"
    return (
        f"{severity:.0f}" if severity >= 100 else f"{severity:.1f}" if severity >= 10 else f"{severity:.2f}"
    )


def _short(dtypes: str) -> str:
    """Return dtypes or formats in a few letters; one of two that are the same."""
    names = dict.fromkeys(dtypes.partition(" (")[0].split(", "))
    return " ".join(SHORT.get(name, name) for name in names)


def for_json(value: Any) -> Any:
    """Return a value that strict JSON can hold: inf and NaN become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: for_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(each) for each in value]
    return value
