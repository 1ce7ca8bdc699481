"""The rows of a report: what each call lost, charged to an operator at a line of a module.

Autocast writes casts and roundings into a program that its user has not written, so they are charged to the
operator that they belong to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from preamp.autocasting.blame import BlameRow, Direction, Part
from preamp.autocasting.report import OUTSIDE
from preamp.autocasting.tables import JAX, Rule
from preamp.jax import jaxprs
from preamp.jax.autocasting.counting import LAYOUT, flops_of
from preamp.jax.autocasting.lookahead import EXACT, MOVES
from preamp.jax.blaming.effects import Measured
from preamp.jax.blaming.operations import Operation
from preamp.jax.blaming.tape import Call, Variable, made_by

_PARTS: Mapping[Rule | None, Part] = {"lower": "product", "float32": "sensitive"}
CAST = "convert_element_type"


class _Key(NamedTuple):
    module: str
    operator: str
    source: str
    direction: Direction


@dataclass
class _Sums:
    """What a row adds up.

    Attributes:
        first: a call of the operator that the row is about.
        calls: of that operator.
        emulated: the low precision that its results are rounded to; empty if they are not.
    """

    first: Call
    calls: set[Call] = field(default_factory=set)
    emulated: str = ""
    local_error: float = 0.0
    square: float = 0.0
    loss_effect: float = 0.0
    values: int = 0
    lost: int = 0
    lost_share: float = 0.0
    overflowed: int = 0
    peak: float = 0.0

    def add(self, call: Call, results: Sequence[Measured], loss: float) -> None:
        size, lost_size = (
            math.hypot(*column) for column in ([r.size for r in results], [r.lost_size for r in results])
        )
        error = math.hypot(*(each.error for each in results))
        self.local_error = max(self.local_error, error / size if size else 0.0)
        self.square += sum(float(each.effect) ** 2 for each in results)
        self.loss_effect += sum(float(each.loss_effect) for each in results) / loss
        self.values += _size(call)
        self.lost += sum(int(each.lost) for each in results)
        self.lost_share = max(self.lost_share, lost_size / size if size else 0.0)
        self.overflowed += call.overflowed
        self.peak = max(self.peak, *(float(each.peak) for each in results))


def rows_of(
    calls: Sequence[Call], measured: Mapping[Call, Sequence[Measured]], loss: float
) -> list[BlameRow]:
    """Return a row for each operator that lost something, in no order.

    Args:
        calls: what ran, in order.
        measured: what each of them lost.
        loss: the absolute value of the loss.
    """
    charged = charged_to(calls)
    fetched: Any = jax.device_get(list(measured.values()))
    losses = dict(zip(measured, fetched, strict=True))
    found: dict[_Key, _Sums] = {}
    for call in calls:  # in this order, so that the first call of a row is the first one that ran
        if call in losses:
            owner, operation = charged.get(call, call), _operation(call)
            sums = found.setdefault(key_of(owner), _Sums(owner))
            sums.calls.add(owner)
            if operation.rounds and owner in (call, made_by(call.operands[0])):
                sums.emulated = str(operation.low)
            sums.add(call, losses[call], loss)
    lossy = ((key, sums) for key, sums in found.items() if sums.local_error or sums.overflowed)
    return [_row(key, sums, len(calls)) for key, sums in lossy]


def low_flops(calls: Sequence[Call]) -> int:
    """Return the floating-point operations of the forward pass's products in low precision."""
    rounded = {owner for cast, owner in charged_to(calls).items() if owner is made_by(cast.operands[0])}
    lows = (
        call.operation
        for call in calls
        if isinstance(call.operation, Operation) and not call.is_backward
        if call.operation.low is not None or call in rounded
    )
    return sum(flops_of(operation.equation) for operation in lows)


def _row(key: _Key, sums: _Sums, count: int) -> BlameRow:
    call, operation = sums.first, _operation(sums.first)
    results = [atom.aval.dtype for atom in operation.equation.outvars]
    stored = next((dtype for dtype in results if jnp.issubdtype(dtype, jnp.inexact)), results[0])
    runs = f"{sums.emulated} emulated" if sums.emulated else str(stored)
    return BlameRow(
        index=call.index if key.direction == "forward" else count - call.index,
        module=key.module,
        operator=key.operator,
        direction=key.direction,
        source=key.source,
        inputs=", ".join(_inputs(call)),
        runs=runs,
        part=_PARTS.get(JAX.rules.get(operation.name), "other"),
        calls=len(sums.calls),
        local_error=sums.local_error,
        effect=math.inf if sums.overflowed else math.sqrt(sums.square),
        loss_effect=sums.loss_effect if key.direction == "forward" else 0.0,
        values=sums.values,
        lost=sums.lost,
        lost_share=sums.lost_share,
        overflowed=sums.overflowed,
        peak=sums.peak,
        limit=float(jnp.finfo(sums.emulated or stored).max),
        flops=sum(flops_of(_operation(each).equation) for each in sums.calls),
    )


def _operation(call: Call) -> Operation:
    assert isinstance(call.operation, Operation)  # what only takes arrays apart loses nothing
    return call.operation


def key_of(call: Call) -> _Key:
    operation = _operation(call)
    name = CAST if operation.rounds else operation.name
    direction: Direction = "backward" if call.is_backward else "forward"
    return _Key(operation.module or OUTSIDE, name, operation.source, direction)


def _inputs(call: Call) -> list[str]:
    """Return the floating dtypes of a call's operands before they were cast for it, widest first."""
    dtypes = set()
    for invar, operand in zip(_operation(call).equation.invars, call.operands, strict=True):
        if _is_float(invar) and not (jaxprs.is_literal(invar) and not invar.aval.shape):
            atom, maker = invar, made_by(operand)
            before = None if maker is None else maker.operation
            if isinstance(before, Operation) and before.is_cast:
                atom = before.equation.invars[0]
            dtypes.add(str(atom.aval.dtype))
    return sorted(dtypes, key=lambda name: (-jnp.dtype(name).itemsize, name))


def charged_to(calls: Iterable[Call]) -> dict[Call, Call]:
    """Return for each cast the call that it is charged to; casts that a user wrote stand for themselves.

    - A rounding of a result that was computed from low numbers belongs to what computed it.
    - Other casts belong to the product that uses them first, or to what uses them at the same line.
    - A cast that nothing uses belongs to what computed its operand.
    """
    held: dict[Variable, str] = {}
    charged: dict[Call, Call] = {}
    for call in calls:
        operation = call.operation
        given = {held.get(each, "") for each in call.operands if each.maker is not None}
        only = given.pop() if len(given) == 1 else ""
        if isinstance(operation, Operation) and operation.is_cast:
            if operation.low is not None:
                held.update((each, str(operation.low)) for each in call.results)
                charged[call] = _owner(call, held)
            continue
        if operation.name in EXACT or not isinstance(operation, Operation):
            held.update((each, only) for each in call.results)
        elif operation.low is not None:
            held.update((each, str(operation.low)) for each in call.results)
    return charged


def _owner(cast: Call, held: Mapping[Variable, str]) -> Call:
    operation, maker = _operation(cast), made_by(cast.operands[0])
    if maker is not None and not _computes(maker):
        maker = None
    if maker is not None and _is_low(maker, held, str(operation.low)):
        return maker
    user = next(_users(cast), None)
    if user is None:
        return maker or cast
    using = _operation(user)
    is_product = JAX.rules.get(using.name) == "lower"
    is_same = (using.module, using.source) == (operation.module, operation.source)
    return user if is_product or is_same else cast


def _is_low(call: Call, held: Mapping[Variable, str], low: str) -> bool:
    """Return whether a call computed with numbers of a low precision alone, and not by a rule for float32."""
    rule = JAX.rules.get(call.operation.name)
    if rule == "lower":
        return True
    if rule == "float32" and not call.is_backward:
        return False
    return all(held.get(each) == low for each in call.operands if each.maker is not None)


def _users(call: Call) -> Iterator[Call]:
    """Yield the calls that compute with a cast's result, directly or after other casts and moves."""
    for variable in call.results:
        for user in variable.uses:
            if _computes(user):
                yield user
            else:
                yield from _users(user)


def _computes(call: Call) -> bool:
    operation = call.operation
    return isinstance(operation, Operation) and not operation.is_cast and operation.name not in MOVES | LAYOUT


def _size(call: Call) -> int:
    operation = _operation(call)
    return sum(math.prod(operation.equation.outvars[place].aval.shape) for place in operation.floats)


def _is_float(atom: Any) -> bool:
    return jaxprs.is_array(atom.aval) and bool(jnp.issubdtype(atom.aval.dtype, jnp.floating))
