"""The rows of a report: what each call lost, charged to an operator at a line of a module.

Autocast writes casts into a program that its user has not written, so they are charged to the operator that
they belong to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from preamp.autocasting.report import OUTSIDE
from preamp.autocasting.tables import JAX, Rule
from preamp.blaming.blame import BlameRow, Direction, Part, ProductOf
from preamp.jax import jaxprs
from preamp.jax.autocasting.counting import LAYOUT, flops_of
from preamp.jax.autocasting.lookahead import MOVES
from preamp.jax.autocasting.settings import Settings
from preamp.jax.blaming.effects import Effect
from preamp.jax.blaming.losses import Lost
from preamp.jax.blaming.operations import Operation, is_low
from preamp.jax.blaming.tape import Call, Tape, made_by
from preamp.recipes.values import PRODUCTS

_PARTS: Mapping[Rule | None, Part] = {"lower": "product", "float32": "sensitive"}


class Key(NamedTuple):
    """What identifies a row."""

    module: str
    operator: str
    source: str
    direction: Direction
    product: ProductOf = ""


@dataclass
class _Sums:
    """What a row adds up.

    Attributes:
        first: a call of the operator that the row is about.
        calls: of that operator.
        low: the low precision that its results, or what was cast for it, are rounded to; None if none is.
    """

    first: Call
    calls: set[Call] = field(default_factory=set)
    low: np.dtype[Any] | None = None
    local_error: float = 0.0
    square: float = 0.0
    loss_effect: float = 0.0
    values: int = 0
    lost: int = 0
    lost_share: float = 0.0
    overflowed: int = 0
    breaks: str = ""
    amax: float = 0.0

    def add(self, call: Call, losses: Sequence[Lost], effects: Sequence[Effect], loss: float) -> None:
        error, size, lost_size = (
            math.hypot(*(getattr(each, name) for each in losses)) for name in ("error", "size", "count_size")
        )
        self.local_error = max(self.local_error, error / size if size else 0.0)
        self.square += sum(float(each.gradients) ** 2 for each in effects)
        self.loss_effect += sum(float(each.loss) for each in effects) / loss
        self.values += _size(call)
        self.lost += sum(int(each.count) for each in losses)
        self.lost_share = max(self.lost_share, lost_size / size if size else 0.0)
        self.overflowed += call.overflowed
        self.breaks = self.breaks or call.breaks
        self.amax = max(self.amax, *(float(each.amax) for each in losses))


def rows_of(
    tape: Tape, owners: Mapping[Call, Call], effects: Mapping[Call, Sequence[Effect]], loss: float
) -> list[BlameRow]:
    """Return a row for each operator that lost something, in no order.

    Args:
        tape: what ran.
        owners: of casts, as `owners_of` returns them.
        effects: of each call that was compared.
        loss: the absolute value of the loss.
    """
    numbers = [[each._replace(delta=None) for each in call.losses] for call in effects]
    fetched: Any = jax.device_get(list(zip(numbers, effects.values(), strict=True)))
    measured = dict(zip(effects, fetched, strict=True))
    found: dict[Key, _Sums] = {}
    for call in tape.calls:  # in this order, so that a row begins with what ran first
        if not call.losses:
            continue
        owner = owners.get(call, call)
        sums = found.setdefault(key_of(owner), _Sums(owner))
        sums.calls.add(owner)
        sums.low = sums.low or _operation(call).low
        losses, changes = measured[call]
        sums.add(call, losses, changes, loss)
    lossy = ((key, sums) for key, sums in found.items() if sums.local_error or sums.overflowed)
    return [_row(key, sums, tape.count) for key, sums in lossy]


def errors_of(row: BlameRow, calls: Iterable[Call], owners: Mapping[Call, Call]) -> dict[int, list[Any]]:
    """Return the errors of a row alone, by the index of the call, for `Tape(errors=...)`."""
    key = Key(row.module, row.operator, row.source, row.direction, row.product)
    own = (call for call in calls if call.losses and key_of(owners.get(call, call)) == key)
    return {call.index: [each.delta for each in call.losses] for call in own}


def low_flops(calls: Iterable[Call]) -> int:
    """Return the floating-point operations of the forward pass's products in low precision."""
    forward = (call.operation for call in calls if not call.is_backward)
    lows = (each for each in forward if isinstance(each, Operation) and each.low is not None)
    return sum(flops_of(operation.equation) for operation in lows)


def layers_of(calls: Iterable[Call]) -> dict[str, tuple[int, int]]:
    """Return the modules with products that a recipe quantizes, and the shapes (out, in) of their weights."""
    found: dict[str, tuple[int, int]] = {}
    for call in calls:
        operation = call.operation
        if not isinstance(operation, Operation) or not operation.module:
            continue
        if (quants := operation.quants) and not quants.product:
            shape = operation.equation.invars[1 - quants.first].aval.shape
            axes = operation.equation.params["dimension_numbers"][0][1 - quants.first]
            summed = math.prod(shape[axis] for axis in axes)
            found[operation.module] = math.prod(shape) // summed, summed
    return found


def _row(key: Key, sums: _Sums, count: int) -> BlameRow:
    call, operation = sums.first, _operation(sums.first)
    results = [atom.aval.dtype for atom in operation.equation.outvars]
    stored = next((dtype for dtype in results if jnp.issubdtype(dtype, jnp.inexact)), results[0])
    runs = sums.low or stored
    return BlameRow(
        index=call.index if key.direction == "forward" else count - call.index,
        module=key.module,
        operator=key.operator,
        direction=key.direction,
        source=key.source,
        inputs=", ".join(_inputs(call)),
        runs=", ".join(operation.quants.formats) if operation.quants else str(runs),
        part=_PARTS.get(JAX.rules.get(operation.name), "other"),
        calls=len(sums.calls),
        local_error=sums.local_error,
        effect=math.inf if sums.overflowed or sums.breaks else math.sqrt(sums.square),
        loss_effect=sums.loss_effect if key.direction == "forward" else 0.0,
        values=sums.values,
        lost=sums.lost,
        lost_share=sums.lost_share,
        overflowed=sums.overflowed,
        breaks=sums.breaks,
        amax=sums.amax,
        limit=float(jnp.finfo(runs).max),
        flops=sum(flops_of(_operation(each).equation) for each in sums.calls),
        product=key.product,
    )


def _operation(call: Call) -> Operation:
    assert isinstance(call.operation, Operation)  # what only takes arrays apart loses nothing
    return call.operation


def key_of(call: Call) -> Key:
    """Return the row that a call belongs to."""
    operation = _operation(call)
    direction: Direction = "backward" if call.is_backward else "forward"
    product: ProductOf = PRODUCTS[operation.quants.product] if operation.quants else ""
    return Key(operation.module or OUTSIDE, operation.name, operation.source, direction, product)


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


def owners_of(calls: Iterable[Call], settings: Settings) -> dict[Call, Call]:
    """Return for each cast the call that it is charged to; casts that a user wrote stand for themselves.

    - A cast of a result that was computed from low numbers belongs to what computed it.
    - Other casts belong to the product that uses them first. If what uses them is at the same line instead,
      they belong to what computed their operand there, as in `jnp.sum(x) + 1`, or else to what uses them.
    - A cast that nothing uses belongs to what computed its operand.

    Args:
        calls: what ran, in order.
        settings: of the region, whose table tells products from what runs in float32.
    """
    return {
        call: _owner(call, settings)
        for call in calls
        if isinstance(call.operation, Operation) and call.operation.is_cast and call.operation.low is not None
    }


def _owner(cast: Call, settings: Settings) -> Call:
    maker = made_by(cast.operands[0])
    if maker is not None and not _computes(maker):
        maker = None
    if maker is not None and _is_low(maker, settings):
        return maker
    user = next(_users(cast), None)
    if user is None:
        return maker or cast
    if _rule(user, settings) == "lower":
        return user
    if _place(user) != _place(cast):
        return cast
    return user if maker is None or _place(maker) != _place(cast) else maker


def _place(call: Call) -> tuple[str, str]:
    operation = _operation(call)
    return operation.module, operation.source


def _rule(call: Call, settings: Settings) -> Rule | None:
    operation = _operation(call)
    return settings.inside(operation.module).rules.get(operation.name)


def _is_low(call: Call, settings: Settings) -> bool:
    """Return whether a call computed with low numbers alone, and not by a rule for float32."""
    rule = _rule(call, settings)
    if rule == "float32" and not call.is_backward:
        return False
    return rule == "lower" or all(is_low(jnp.dtype(each)) for each in _inputs(call))


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
