"""What autocast casts, where, and what it costs: the counting behind `casts`.

Nothing is computed: the function is traced and rewritten, and its equations are counted. The body of a
`scan` counts as often as it runs. The body of a `while_loop` and each branch of a `cond` count once.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from preamp.autocasting.report import OUTSIDE, REPEATED, CastReport, CastRow, Tally, place, repeated, stayed
from preamp.autocasting.tables import DEFAULT, EXPLICIT_PRECISION, Casting
from preamp.jax.autocasting.flax_objects import attribute_name, pure
from preamp.jax.autocasting.module_scopes import module_scopes, scoped_method
from preamp.jax.autocasting.settings import Settings
from preamp.jax.autocasting.transform import OFF, region, rewritten
from preamp.jax.jaxprs import (
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    alive,
    bodies,
    current_path,
    inner,
    is_array,
    is_literal,
    is_traced,
    keeps_numbers,
    module_path,
    numbers_of,
    region_name,
    scan_layout,
    source_line,
)

# Primitives that at most move numbers, and cost nothing once compiled: they are skipped.
LAYOUT = frozenset(
    ["broadcast_in_dim", "copy", "expand_dims", "reshape", "rev", "squeeze", "stop_gradient", "transpose"]
)
SUMS = frozenset(["cumprod", "cumsum", "psum", "reduce_prod", "reduce_sum", "reduce_window_sum"])
LOW = frozenset(["float16", "bfloat16"])
EXPLICIT = "explicit"
UNSURE = {
    "while": "The loop at {} is counted once: how often it runs is known only when it runs.",
    "cond": "Each branch at {} is counted once, though one of them runs.",
}
IN_A_LOOP = "a loop casts it; cast it before the loop"
IN_PROGRAMS = "it is cast in programs that are traced apart; cast it before them"


def casts(
    fn: Callable[..., object],
    *args: Any,
    dtype: Any = jnp.bfloat16,
    casting: Casting | None = None,
    emulate: bool = False,
    **kwargs: Any,
) -> CastReport:
    """Report what `autocast(fn, ...)` casts in a call with these arguments. Nothing is computed.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    >>> report = casts(lambda x: jnp.tanh(x @ x.T), x)
    >>> [(row.operator, row.inputs, row.runs, row.flops) for row in report.rows]
    [('dot_general', 'float32', 'bfloat16', 8192), ('tanh', 'bfloat16', 'bfloat16', 0)]

    Args:
        fn: any function that `autocast` takes.
        args: its arguments; a `jax.ShapeDtypeStruct` may take the place of an array.
        dtype: the low precision.
        casting: an edited table.
        emulate: as in `autocast`. A rehearsal has the same casts.
        kwargs: its keyword arguments; those with the names above need a `functools.partial`.

    Returns:
        One row for each primitive, module, line and set of precisions, costliest first, and notes on casts
        that waste time or lose accuracy. Modules have the paths that `Casting.module` takes. The printed
        report fits 80 columns. The body of a `scan` counts as often as it runs; the body of a `while_loop`
        and each branch of a `cond` count once.

    Raises:
        CastingError: as `autocast` does.
    """
    settings = region(dtype, casting or DEFAULT, emulate)
    with module_scopes() as calls, pure(scoped_method(fn), args, kwargs) as program:
        names = _names(program.fn, program.args, program.kwargs)
        return _Counter(settings).report(rewritten(program, settings, calls).jaxpr, names)


def _names(fn: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Return the names of a call's arrays, such as "params['w']", in the order in which they are traced."""
    own = _positional(fn)[: len(args)]
    others = [f"args[{place}]" for place in range(len(own), len(args))]
    roots = [*zip([*own, *others], args, strict=True), *sorted(kwargs.items())]
    return [
        attribute_name(root + jax.tree_util.keystr(path))
        for root, value in roots
        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]
        if is_traced(leaf)
    ]


def _positional(fn: Callable[..., object]) -> list[str]:
    """Return the names of a function's positional parameters, as far as they can be known."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]


class _Place(NamedTuple):
    """Where equations are, and how often they run."""

    module: str = OUTSIDE
    source: str = OUTSIDE
    times: int = 1
    loops: int = 0
    is_off: bool = False


@dataclass(eq=False)
class _Origin:
    """A value before casts and changes of layout, and what was done with it."""

    what: str
    born: _Place
    bytes: int = 0
    times: dict[str, int] = field(default_factory=dict)
    places: dict[str, None] = field(default_factory=dict)
    is_cast_in_loop: bool = False


class _Row(NamedTuple):
    """What the calls of one row have in common."""

    operator: str
    module: str
    rule: str
    inputs: str
    runs: str
    source: str


@dataclass(eq=False)
class _Cast:
    """A cast, which is charged to the first operator that uses its result, or else to itself."""

    before: str
    times: int
    bytes: int
    row: _Row
    is_charged: bool = False

    def charge(self) -> int:
        """Return the bytes to charge: all at first, then none."""
        due, self.is_charged = 0 if self.is_charged else self.bytes, True
        return due


class _Value(NamedTuple):
    """What is known of a variable.

    Attributes:
        origin: where it comes from.
        cast: what it went through on that way.
    """

    origin: _Origin
    cast: _Cast | None = None


class _Counter:
    """Counts the equations of a program that was rewritten with these settings."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tallies: dict[_Row, Tally] = {}
        self._origins: dict[_Origin, None] = {}
        self._casts: list[_Cast] = []
        self._notes: dict[str, None] = {}

    def report(self, program: ClosedJaxpr, names: Sequence[str]) -> CastReport:
        """Return the counts of a closed jaxpr whose arguments have these names."""
        start = _Place(current_path() or OUTSIDE)
        self._walk(program.jaxpr, [_Value(_Origin(name, start)) for name in names], start)
        for cast in self._casts:
            if not cast.is_charged:
                self._add(cast.row, calls=cast.times, bytes_cast=cast.charge())
        rows = [CastRow(**row._asdict(), **vars(tally)) for row, tally in self._tallies.items()]
        rows.sort(key=lambda row: (row.flops, row.bytes_moved), reverse=True)
        return CastReport(rows, [*_lossy(rows), *self._repeats(), *self._notes, *stayed(rows)])

    def _walk(self, jaxpr: Jaxpr, arguments: Sequence[_Value], at: _Place) -> list[_Value]:
        """Count a program that is called with these values; return those of its results."""
        known = dict(zip(jaxpr.invars, arguments, strict=True))
        for equation in alive(jaxpr.eqns, jaxpr.outvars):
            operands = [_value(atom, known, at) for atom in equation.invars]
            results = self._visit(equation, operands, _place_of(equation, at))
            known.update(zip(equation.outvars, results, strict=False))
        return [_value(atom, known, at) for atom in jaxpr.outvars]

    def _visit(self, equation: Equation, operands: list[_Value], at: _Place) -> Sequence[_Value]:
        """Count an equation; return what is known of its results, where anything is."""
        programs = _programs(equation)
        if programs:
            return self._enter(equation, programs, operands, at)
        if _is_cast(equation):
            return [self._count_cast(equation, operands[0], at)]
        if equation.primitive.name in LAYOUT or keeps_numbers(equation):
            return operands[:1]
        if equation.primitive.name == "slice":  # another value each time, of which the cast may be one
            return [operands[0]._replace(origin=_Origin(_what(equation.outvars[0]), at))]
        return self._count(equation, operands, at)

    def _enter(
        self, equation: Equation, programs: list[tuple[Any, list[int]]], operands: list[_Value], at: _Place
    ) -> list[_Value]:
        """Count the programs that an equation holds; return what is known of the last one's results."""
        at, changing = _inside(equation, at)
        calls, results = self._calls(), list[_Value]()
        for program, places in programs:
            atoms = inner(program).invars
            arguments = [
                operands[i]._replace(origin=_Origin(_what(atom), at)) if i in changing else operands[i]
                for atom, i in zip(atoms, places, strict=True)
            ]
            results = self._walk(inner(program), arguments, at)
        if equation.primitive.name in UNSURE and self._calls() > calls:
            self._notes[UNSURE[equation.primitive.name].format(at.source)] = None
        return results

    def _count_cast(self, equation: Equation, operand: _Value, at: _Place) -> _Value:
        """Record a cast until something uses its result."""
        (source,), (result,) = equation.invars[:1], equation.outvars
        before, after = _dtype(source), _dtype(result)
        where = place(at.module, at.source)
        if operand.cast and operand.cast.before == after and after in LOW:
            self._notes[f"A value goes from {after} to {before} and straight back {where}."] = None
        self._remember(operand.origin, source, after, at)
        row = _Row(equation.primitive.name, at.module, self._rule(equation, at), before, after, at.source)
        cast = _Cast(before, at.times, _bytes(source) * at.times, row)
        self._casts.append(cast)
        return _Value(operand.origin, cast)

    def _remember(self, origin: _Origin, source: Atom, after: str, at: _Place) -> None:
        """Note that a value is cast, unless it is cast upwards outside a loop, which costs nothing."""
        in_loop = at.loops > origin.born.loops
        if after in LOW or in_loop:
            origin.bytes = origin.bytes or _bytes(source)
            times = at.times // max(1, origin.born.times)
            origin.times[after] = origin.times.get(after, 0) + times
            origin.places[place(at.module, at.source)] = None
            origin.is_cast_in_loop |= in_loop
            self._origins[origin] = None

    def _count(self, equation: Equation, operands: list[_Value], at: _Place) -> list[_Value]:
        """Add an equation to its row, and what was cast for it; return what is known of its results."""
        given = [
            (atom, value)
            for atom, value in zip(numbers_of(equation), operands, strict=False)
            if _is_float(atom) and not (is_literal(atom) and not _shape(atom))
        ]
        if not given:
            return []
        rule = self._rule(equation, at)
        inputs = {value.cast.before if value.cast else _dtype(atom) for atom, value in given}
        floats = [*filter(_is_float, equation.outvars), *(atom for atom, _ in given)]
        runs = _dtype(_first(equation.outvars, floats))
        self._add(
            _Row(equation.primitive.name, at.module, rule, _listed(inputs), runs, at.source),
            calls=at.times,
            bytes_cast=sum(value.cast.charge() for _, value in given if value.cast),
            bytes_moved=at.times * sum(map(_bytes, floats)),
            flops=at.times * flops_of(equation),
        )
        return [_Value(_Origin(_what(atom), at)) for atom in equation.outvars]

    def _rule(self, equation: Equation, at: _Place) -> str:
        if at.is_off:
            return "off"
        settings = self._settings.inside("" if at.module == OUTSIDE else at.module)
        name = settings.name_in_table(equation)
        rule: str = settings.rules.get(name, "unlisted")
        return EXPLICIT if name == EXPLICIT_PRECISION and rule == "untouched" else rule

    def _add(self, row: _Row, **counts: int) -> None:
        self._tallies.setdefault(row, Tally()).add(**counts)

    def _calls(self) -> int:
        return sum(tally.calls for tally in self._tallies.values())

    def _repeats(self) -> Iterator[str]:
        """Yield what is cast more than once, costliest first."""
        costs = {origin: origin.bytes * max(origin.times.values()) for origin in self._origins}
        for origin in sorted(costs, key=lambda origin: costs[origin], reverse=True):
            times = max(origin.times.values())
            if times >= REPEATED:
                why = IN_A_LOOP if origin.is_cast_in_loop else IN_PROGRAMS
                yield repeated(origin.what, f"{times:,} times", origin.bytes, origin.places, why)
            elif origin.is_cast_in_loop:
                yield repeated(origin.what, "in every turn", origin.bytes, origin.places, IN_A_LOOP)


def _value(atom: Atom, known: dict[Atom, _Value], at: _Place) -> _Value:
    """Return what is known of an operand; a variable that is new becomes known."""
    new = _Value(_Origin(_what(atom), at))
    return new if is_literal(atom) else known.setdefault(atom, new)


def _programs(equation: Equation) -> list[tuple[Any, list[int]]]:
    """Return the programs that an equation holds, each with the places of its operands."""
    name, params, every = equation.primitive.name, equation.params, range(len(equation.invars))
    held = [(body, list(every[first:])) for body, first in bodies(equation)]
    if name == "while":
        ours, bodys = params["cond_nconsts"], params["body_nconsts"]
        held.insert(0, (params["cond_jaxpr"], [*every[:ours], *every[ours + bodys :]]))
    if name.startswith("custom_vjp_call") and not held:
        held.append((params.get("call_jaxpr") or params["fun_jaxpr"], list(every)))
    elif name == "custom_vmap_call":
        held.append((params["call"], list(every)))
    return held


def _inside(equation: Equation, at: _Place) -> tuple[_Place, range]:
    """Return the place inside of an equation, and which operands change from one turn to the next."""
    name, params, count = equation.primitive.name, equation.params, len(equation.invars)
    if name == "scan":
        at = at._replace(times=at.times * params["length"], loops=at.loops + 1)
        return at, range(scan_layout(params)[0], count)
    if name == "while":
        return at._replace(loops=at.loops + 1), range(params["cond_nconsts"] + params["body_nconsts"], count)
    return at, range(0)


def _lossy(rows: Iterable[CastRow]) -> Iterator[str]:
    for row in rows:
        if row.operator in SUMS and row.runs in LOW:
            yield (
                f"{row.operator} {row.place} adds up in {row.runs}, which loses small terms. "
                f"Write casting.DEFAULT.float32({row.operator!r})."
            )


def _first(results: Sequence[Atom], floats: Sequence[Atom]) -> Any:
    """Return what an equation's precision is read from: a result with one, or else an operand."""
    return next((atom for atom in results if _is_float(atom) or _is_complex(atom)), floats[0])


def _is_cast(equation: Equation) -> bool:
    atoms = [*equation.invars[:1], *equation.outvars]
    return equation.primitive.name == "convert_element_type" and all(map(_is_float, atoms))


def _is_float(atom: Atom) -> bool:
    return is_array(atom.aval) and bool(jnp.issubdtype(atom.aval.dtype, jnp.floating))


def _is_complex(atom: Atom) -> bool:
    return is_array(atom.aval) and bool(jnp.issubdtype(atom.aval.dtype, jnp.complexfloating))


def _listed(dtypes: Iterable[str]) -> str:
    """Return dtypes as one text, widest first."""
    return ", ".join(sorted(dtypes, key=lambda name: (-jnp.dtype(name).itemsize, name)))


def _dtype(atom: Atom) -> str:
    return str(atom.aval.dtype)


def _shape(atom: Atom) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


def _bytes(atom: Atom) -> int:
    return math.prod(_shape(atom)) * int(atom.aval.dtype.itemsize)


def _what(atom: Atom) -> str:
    """Name a value that has no name."""
    return f"A {_dtype(atom)} array of shape {_shape(atom)}" if is_array(atom.aval) else ""


def flops_of(equation: Equation) -> int:
    """Return the operations of a product or convolution; 0 of others."""
    name, params = equation.primitive.name, equation.params
    if name not in ("dot_general", "conv_general_dilated", "ragged_dot_general"):
        return 0
    left, right, result = (_shape(atom) for atom in (*equation.invars[:2], *equation.outvars))
    if name == "ragged_dot_general":
        return 2 * math.prod(left) * result[-1]
    if name == "conv_general_dilated":
        kernel = math.prod(right)
        terms = kernel // right[int(params["dimension_numbers"].rhs_spec[0])]
    else:
        (contracted, _), _ = params["dimension_numbers"]
        terms = math.prod(left[axis] for axis in contracted)
    return 2 * math.prod(result) * terms


def _place_of(equation: Equation, within: _Place) -> _Place:
    """Return where an equation is: the path of its module, and its line.

    What JAX traced for itself has no line of the user's; then it is the line of what holds it.
    """
    module = module_path(equation, "" if within.module == OUTSIDE else within.module)
    source = PurePath(str(source_line(equation)).rpartition(" (")[0]).name
    region = region_name(equation)
    return within._replace(
        module=module or OUTSIDE,
        source=source or within.source,
        is_off=within.is_off if region is None else region == OFF,
    )
