"""Find a small set of modules and operators to keep in float32, from what blame says of a step.

With a recipe, it is a set of modules, or of single products of linear layers, to keep in its high precision.

The framework rehearses: it runs blame on the step with a table. Everything else is here, for all of them.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from preamp.autocasting.report import OUTSIDE
from preamp.autocasting.tables import DEFAULT, Casting, Edit, is_inside
from preamp.autocasting.text_tables import WIDTH
from preamp.blaming.blame import ALLOWED_LOST, NOT_QUANTIZED, Blame, BlameRow, roundoff_in
from preamp.errors import UsageError
from preamp.recipes.exporting import export
from preamp.recipes.values import KNOWN, PRODUCTS, Product, Recipe

MOST = 20  # rehearsals
ENOUGH = 8.0  # unit roundoffs: the relative error of loss and gradients that is good enough
ENOUGH_IN_RECIPES = 2.0  # the same, of the formats of a recipe's forward pass
SMALL = 0.03  # of the target: rows with less are not worth a rule
PER_RULE = 0.002  # what a rule costs, in shares of the step's products: of two that cost the same, the fewer
PER_VALUE = 0.02  # what it costs to keep all values of the step in float32, in the same unit
WORSE = 1.1  # times the error: what a rule has to be good for where the target is missed
SAME = 1e-4  # relative: losses of two runs in float32 that differ by more are not of the same step
BETTER = 0.7  # of its severity: what is left of a row that a rule is said to help


# Edits that keep something in float32, and all rows of the step that they cover.
Option: TypeAlias = tuple[tuple[Edit, ...], list[BlameRow]]
# Edits that did not help a row, by its module, operator, line and direction.
Useless: TypeAlias = tuple[tuple[Edit, ...], tuple[str, ...]]


@dataclass(frozen=True)
class Kept:
    """What is kept in float32, or high, and why.

    Attributes:
        edits: the edits of the table.
        rows: the rows of the step before that accuse it, worst first.
        flops: the product FLOPs that it covers in the step before: of the forward pass, or, with a recipe, of
            all passes.
    """

    edits: tuple[Edit, ...]
    rows: tuple[BlameRow, ...]
    flops: int = 0

    @property
    def name(self) -> str:
        """The operator, or the path of the module."""
        return self.edits[0].name

    @property
    def reason(self) -> str:
        """Why, in a few words."""
        worst = self.rows[0]
        more = f" (and {_count(len(self.rows) - 1, 'more row')})" if len(self.rows) > 1 else ""
        what = f": {worst.reason}" if worst.reason else ""
        if not what and worst.severity >= 1:
            what = f": it loses {worst.severity:.1f} times what is expected"
        where = worst.product or f"{worst.direction} pass"
        return f"{worst.operator} {worst.place}, {where}{what}{more}"

    @property
    def how(self) -> str:
        """How it is kept: "float32", "high", or which products are high."""
        rule = self.edits[0].rule
        return f"{', '.join(_high_in(KNOWN[rule]))} high" if rule in KNOWN else rule


@dataclass(frozen=True)
class Tuning:
    """A table that keeps as little as possible in float32, or high in a recipe, and how it was found.

    Attributes:
        casting: the table, for `autocast(casting=...)`; `to_dict()` of it is for a file.
        kept: what it keeps so, in the order of the table.
        before: what the step loses with the table to begin with.
        after: what it loses with this one.
        rehearsals: how many times blame ran the step.
        target: the relative error of loss and gradients to stay below.
        notes: sentences about how the step was run.
        recipe: of the step; None without.
    """

    casting: Casting
    kept: Sequence[Kept]
    before: Blame
    after: Blame
    rehearsals: int
    target: float
    notes: Sequence[str] = ()
    recipe: Recipe | None = None

    @property
    def low_share(self) -> float:
        """The share of the product FLOPs in low precision; with a recipe, of those that it quantizes."""
        if self.recipe is not None:
            return _quantized_flops(self.after) / max(1, _quantized_flops(self.before))
        return self.after.low_flops / self.after.flops if self.after.flops else 1.0

    def export(self, target: str) -> str:
        """Return the lines to write for the same recipe and the same exceptions elsewhere.

        Args:
            target: "torchao", "torchtitan", "te" (Transformer Engine), "megatron", "maxtext" or "qwix".

        Raises:
            UsageError: without a recipe, for another target, and for what the target cannot express.
        """
        if self.recipe is None:
            raise UsageError("Only a recipe can be exported. Write tune(..., recipe=recipes.MXFP8).")
        layers = {path: shape for path, shape in self.before.layers.items() if path not in ("", OUTSIDE)}
        if not layers:
            raise UsageError(
                "The recipe quantizes no layer that is a module, so there are no paths to export."
            )
        high = {path: frozenset(_high_at(self.casting, path)) for path in layers}
        return export(target, self.recipe, layers, {path: each for path, each in high.items() if each})

    @property
    def solved(self) -> bool:
        """Whether nothing overflows or is flushed to zero, and the errors are below the target."""
        return not _missed(self.after, self.target)

    def lines(self) -> list[str]:
        """Return a line for each thing that is kept in float32, or high, with the reason."""
        total = max(1, _quantized_flops(self.before) if self.recipe else self.after.flops)
        return [
            f"{each.how}: {each.name} ({each.flops / total:.1%} of the products): {each.reason}"
            for each in self.kept
        ]

    def summary(self) -> str:
        """Return what was found, as sentences."""
        dtype, of = self.before.precision, " of linear layers" if self.recipe else ""
        if self.solved:
            rules = f"With {_count(len(self.kept), 'rule')}" if self.kept else "No rule is needed"
            verdict = (
                f"{rules}{',' if self.kept else ':'} the predicted errors of loss and gradients are below "
                f"{self.target:.1e}."
            )
        else:
            worst = self.after.rows[0]
            what = " and ".join(_too_large(self.after, self.target))
            verdict = (
                f"No table that was tried brings {what}. {worst.operator} {worst.place} still loses most, in "
                f"{worst.where}."
            )
            if not worst.product:
                verdict += " If the program itself casts there, change that line."
        share = (
            f"{self.low_share:.1%} of the product FLOPs{of} run in {dtype}."
            if self.after.flops
            else ("The step has no products.")
        )
        changes = [abs(_loss_change(each.rows)) for each in (self.before, self.after)]
        return (
            f"{verdict} {share} Predicted relative error of the gradients: {self.before.gradient_error:.1e} "
            f"before, {self.after.gradient_error:.1e} after; of the loss: {changes[0]:.1e} before, "
            f"{changes[1]:.1e} after. {_count(self.rehearsals, 'rehearsed step')}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the table, as `Casting.to_dict` does."""
        return self.casting.to_dict()

    def __str__(self) -> str:
        """Return what is kept in float32 and why, at most 80 columns wide, and the summary."""
        lines = [textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in self.lines()]
        paragraphs = [textwrap.fill(each, WIDTH) for each in (self.summary(), *self.notes)]
        return "\n".join([*lines, *([""] if lines else []), *paragraphs])


def tune(
    rehearsed: Callable[[Casting], Blame],
    casting: Casting | None,
    is_operator: Callable[[str], bool],
    *,
    with_modules: bool = True,
    recipe: Recipe | None = None,
    whole_layers: bool = False,
    target: float,
    most: int = MOST,
) -> Tuning:
    """Add rules to a table until the step is good enough, then take away what is not needed.

    1. Rehearse. Rows that overflow have to be covered by rules; then those that flush gradients to zero, and
       as many more as it takes to bring the errors of loss and gradients below the target.
    2. Cover them: by a rule for an operator, for a module with what is inside, or for a module alone,
       whichever takes most of the error away for what it costs. It costs the products that it takes out of
       low precision, and a little for all other values.
    3. Rehearse again, until nothing is left to cover, nothing helps, or the rehearsals are used up. A rule
       that did not help a row is not offered for that row again.
    4. Remove one rule after the other, the most expensive first, and rehearse: a rule that is not missed
       stays removed.

    Args:
        rehearsed: runs the step with a table, the same step each time.
        casting: the table to begin with; None for autocast's.
        is_operator: whether a table can name an operator.
        with_modules: whether a table can name the rows' modules.
        recipe: of the step: the rules then keep its layers high, or single products of them.
        whole_layers: keep all products of a layer high, or none.
        target: the relative error of loss and gradients to stay below.
        most: how often to rehearse, at least 1.
    """
    table = DEFAULT if casting is None else casting
    losses: list[float] = []

    def rehearse(table: Casting) -> Blame:
        found = rehearsed(table)
        losses.append(found.float32_loss)
        return found

    before = current = rehearse(table)
    if before.not_finite or not math.isfinite(before.float32_loss):
        what = before.not_finite or f"The loss is {before.float32_loss} in float32."
        raise UsageError(
            f"{what} No table can help. Look for what is not finite: the data, a division by 0, a logarithm "
            "of 0."
        )
    if recipe is not None and not _quantized_flops(before):
        raise UsageError(NOT_QUANTIZED)
    modules = list(dict.fromkeys(row.module for row in before.rows))
    rehearsals, kept, useless = 1, list[Kept](), set[Useless]()
    while rehearsals < most and _missed(current, target):
        if recipe is not None:
            offered = list(_options_in(recipe, current, target, whole_layers))
        else:
            offered = list(_options(current, target, is_operator, modules if with_modules else []))
        chosen = list(_cover(current, target, offered, useless))
        if not chosen:
            break
        after = rehearse(_with(table, [*kept, *chosen]))
        rehearsals += 1
        left = {_key(row): _badness(row) for row in after.rows}
        useless |= {(each.edits, _key(row)) for each in chosen for row in each.rows if not _helped(row, left)}
        helped = [each for each in chosen if any(_helped(row, left) for row in each.rows)]
        kept += helped
        if len(helped) < len(chosen):  # go on from what is kept
            if rehearsals == most:
                break
            after = rehearse(_with(table, kept))
            rehearsals += 1
        current = after
    for each in sorted(kept, key=lambda one: -one.flops):
        if rehearsals >= most:
            break
        fewer = [one for one in kept if one is not each]
        after = rehearse(_with(table, fewer)) if fewer else before
        rehearsals += bool(fewer)
        if not _missed(after, target) or (_missed(current, target) and not _is_worse(after, current)):
            kept, current = fewer, after
    # A rule that was found after others may cover what they do.
    kept = [replace(each, flops=_flops(_covered(each.edits, before.rows))) for each in _by_layer(kept)]
    notes = _of_losses(losses)
    return Tuning(_with(table, kept), kept, before, current, rehearsals, target, notes, recipe)


def _by_layer(kept: Iterable[Kept]) -> list[Kept]:
    """Return what is kept with one entry for the products of a layer."""
    found: dict[object, Kept] = {}
    for each in kept:
        edit = each.edits[0]
        key = edit.name if edit.rule in KNOWN else each.edits
        if key not in found:
            found[key] = each
            continue
        rule = _together(edit, found[key].edits[0].rule)
        edit = edit._replace(rule=rule if isinstance(rule, str) else rule.key)
        found[key] = Kept((edit,), (*found[key].rows, *each.rows))
    return list(found.values())


def enough(recipe: Recipe) -> float:
    """Return the relative error of loss and gradients that is good enough in a recipe."""
    return ENOUGH_IN_RECIPES * roundoff_in(recipe)


def _of_losses(losses: Sequence[float]) -> list[str]:
    """Return a sentence if losses in float32, which no table changes, show that the steps were different."""
    low, high = min(losses), max(losses)
    if not high - low > SAME * max(abs(low), abs(high)):
        return []
    return [
        f"The loss in float32 was between {low:.6g} and {high:.6g} in the rehearsed steps: the function does "
        "not do the same each time, so the tables were not compared on the same step. Draw the batch once, "
        "outside of the function, and random numbers from PyTorch's default generator, which is seeded."
    ]


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _missed(blame: Blame, target: float) -> bool:
    """Return whether a step is worse than it may be."""
    return bool(_too_large(blame, target))


def _too_large(blame: Blame, target: float) -> list[str]:
    """Return what is worse than it may be, as ends of a sentence."""
    if broken := _broken(blame):
        lost = any(row.overflowed or row.breaks for row in broken)
        return ["the loss and the gradients back into the range" if lost else "the gradients back from zero"]
    errors = {"gradients": blame.gradient_error, "loss": abs(_loss_change(blame.rows))}
    return [
        f"the error of the {name} below {target:.1e}" for name, error in errors.items() if not error <= target
    ]


def _is_worse(one: Blame, other: Blame) -> bool:
    """Return whether a step that is worse than it may be is clearly worse than another."""
    if len(_broken(one)) != len(_broken(other)):
        return len(_broken(one)) > len(_broken(other))
    sizes = [
        math.hypot(*(row.effect for row in each.rows if math.isfinite(row.effect))) for each in (one, other)
    ]
    changes = [abs(_loss_change(each.rows)) for each in (one, other)]
    return sizes[0] > WORSE * sizes[1] or changes[0] > WORSE * changes[1]


def _broken(blame: Blame) -> list[BlameRow]:
    """Return the rows that make inf or NaN; if none does, those that flush gradients to zero.

    After an overflow nothing else can be judged.
    """
    overflows = [row for row in blame.rows if row.overflowed or row.breaks]
    return overflows or [row for row in blame.rows if row.flushed >= ALLOWED_LOST]


def _loss_change(rows: Iterable[BlameRow]) -> float:
    return math.fsum(row.loss_effect for row in rows)


def _cover(blame: Blame, target: float, options: Sequence[Option], useless: set[Useless]) -> Iterator[Kept]:
    """Yield rules until the rows that they do not cover are good enough, each the one of the best ratio.

    What a rule is worth is the part of the error above the target that it takes away.
    """
    left = list(blame.rows)
    broken = _broken(blame)
    while left:
        found = [row for row in broken if row in left]
        error = math.hypot(*(row.effect for row in left if math.isfinite(row.effect)))
        change = _loss_change(left)
        if not found and (broken or max(error, abs(change)) <= target):
            return

        ratios: list[tuple[float, int, Kept]] = []
        for at, (edits, covered) in enumerate(options):
            rows = [row for row in left if row in covered and (edits, _key(row)) not in useless]
            flops = _flops(covered)
            total = max(1, _quantized_flops(blame) if blame.recipe else blame.flops)
            cost = PER_RULE + flops / total + PER_VALUE * _values(covered) / _values(blame.rows)
            worth = _worth(rows, found, error, change, target)
            ratios.append((worth / cost, -at, Kept(edits, tuple(rows), flops)))
        ratio, _, best = max(ratios, key=lambda one: one[:2], default=(0.0, 0, None))
        if best is None or not ratio:
            return
        left = [row for row in left if row not in best.rows]
        yield best


def _worth(
    rows: Sequence[BlameRow], broken: Sequence[BlameRow], error: float, change: float, target: float
) -> float:
    """Return how much better a step is without some rows."""
    if broken:
        return sum(row in broken for row in rows)
    squares = math.fsum(row.effect**2 for row in rows)
    better = min(squares, max(0.0, error**2 - target**2)) / target**2
    lower = abs(change) - max(target, abs(change - _loss_change(rows)))
    return better + max(0.0, lower) / target


def _options(
    blame: Blame, target: float, is_operator: Callable[[str], bool], modules: Sequence[str]
) -> Iterator[Option]:
    """Yield what could be kept in float32, each with all rows of the step that it covers."""
    wanted = _wanted(blame, target)
    for operator in dict.fromkeys(row.operator.removesuffix("_") for row in wanted):
        if is_operator(operator):
            edits = (Edit("operators", operator, "float32"),)
            yield edits, _covered(edits, blame.rows)
    for module in dict.fromkeys(row.module for row in wanted):
        if not modules or module in ("", OUTSIDE):
            continue
        edit = Edit("modules", module, "float32")
        inside = _covered((edit,), blame.rows)
        yield (edit,), inside
        known = dict.fromkeys([*modules, *(row.module for row in inside)])
        names = [each.removeprefix(f"{module}.") for each in known if each.startswith(f"{module}.")]
        children = dict.fromkeys(f"{module}.{name.partition('.')[0]}" for name in names)
        if children:
            others = tuple(Edit("modules", each, "default") for each in children)
            yield (edit, *others), _covered((edit, *others), inside)


def _wanted(blame: Blame, target: float) -> list[BlameRow]:
    """Return the rows that are worth a rule."""
    broken, small = _broken(blame), SMALL * target
    return [row for row in blame.rows if row in broken or max(row.effect, abs(row.loss_effect)) > small]


def _options_in(recipe: Recipe, blame: Blame, target: float, whole_layers: bool) -> Iterator[Option]:
    """Yield what could be kept high in a recipe: single products, layers, and what layers are in."""
    wanted = [row for row in _wanted(blame, target) if row.is_quantized]
    for row in wanted if not whole_layers else ():
        if row.product and row.module not in ("", OUTSIDE):
            edits = (Edit("modules", row.module, recipe.without(row.product).key),)
            yield edits, _covered(edits, blame.rows)
    for path in dict.fromkeys(around for row in wanted for around in _around(row.module)):
        edits = (Edit("modules", path, "high"),)
        yield edits, _covered(edits, blame.rows)


def _around(path: str) -> Iterator[str]:
    """Yield the path of a module, and of those around it but for the model."""
    while path and path != OUTSIDE:
        yield path
        path = path.rpartition(".")[0]


def _quantized_flops(blame: Blame) -> int:
    return sum(row.flops for row in blame.rows if row.is_quantized)


def _high_in(recipe: Recipe) -> list[Product]:
    return [each for each in PRODUCTS if getattr(recipe, each) is None]


def _high_at(table: Casting, path: str) -> Sequence[Product]:
    """Return which products of a layer a table keeps high."""
    scope = table.scope(path)
    if scope is None or scope.rule == "default":
        return ()
    return _high_in(KNOWN[scope.rule]) if scope.rule in KNOWN else PRODUCTS


def _covered(edits: Sequence[Edit], rows: Sequence[BlameRow]) -> list[BlameRow]:
    """Return the rows that edits keep in float32, or high."""
    name, rule = edits[0].name, edits[0].rule
    if rule in KNOWN:
        high = _high_in(KNOWN[rule])
        return [row for row in rows if row.is_quantized and row.module == name and row.product in high]
    if rule == "high":
        rows = [row for row in rows if row.is_quantized]
    if edits[0].of == "operators":
        return [row for row in rows if row.operator.removesuffix("_") == name]
    if len(edits) > 1:  # the others are for what is inside
        return [row for row in rows if row.module == name]
    return [row for row in rows if row.module != OUTSIDE and is_inside(row.module, name)]


def _flops(rows: Iterable[BlameRow]) -> int:
    """Return the FLOPs of rows in the forward pass; with a recipe, of all, as products are kept singly."""
    return sum(row.flops for row in rows if row.direction == "forward" or row.product)


def _values(rows: Iterable[BlameRow]) -> int:
    return 1 + sum(row.values for row in rows if row.direction == "forward")


def _key(row: BlameRow) -> tuple[str, ...]:
    return (row.module, row.operator, row.source, row.direction, row.product)


def _helped(row: BlameRow, left: dict[tuple[str, ...], float]) -> bool:
    return left.get(_key(row), 0.0) < min(BETTER * _badness(row), 1e30)


def _badness(row: BlameRow) -> float:
    """Return what rows of two tables are compared by: formats differ in what is expected of a product."""
    return max(row.effect, abs(row.loss_effect)) if row.product else row.severity


def _with(table: Casting, kept: Iterable[Kept]) -> Casting:
    """Return a table with more edits: of operators, then of modules, outer ones first.

    The edits for a module without its submodules reset those inside it, so edits of inner modules come after
    them. Where a module around it is kept as a whole, they are left out.
    """
    modules = sorted(
        (each for each in kept if each.edits[0].of == "modules"), key=lambda one: one.name.count(".")
    )
    whole = [each.name for each in modules if len(each.edits) == 1 and each.edits[0].rule not in KNOWN]
    for each in kept:
        if each.edits[0].of == "operators":
            table = table.float32(each.name)
    for each in modules:
        if not any(is_inside(each.name, name) for name in whole if name != each.name):
            for edit in each.edits:
                table = table.module(edit.name, _together(edit, table.modules.get(edit.name)))
    return table


def _together(edit: Edit, before: str | None) -> Any:
    """Return the rule that keeps high what an edit and a rule before it keep."""
    if edit.rule not in KNOWN:
        return edit.rule
    recipe = KNOWN[edit.rule]
    if before in KNOWN:
        recipe = recipe.without(*_high_in(KNOWN[before]))
    return recipe if any(recipe.quants) else "high"
