"""How much the gradients and the loss change with each result of a step: reverse mode over what ran.

The step is differentiated as float32 would compute it, at the values that the program had. So no value is
computed again, and of a product only the two products of its derivative are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from preamp.arrays.jax import widen
from preamp.jax.blaming.losses import Lost, changes
from preamp.jax.blaming.operations import (
    Derivative,
    Operation,
    Signature,
    derivative,
    results_in_float32,
    wide,
)
from preamp.jax.blaming.tape import Call, Node, Stack, Tape, Unstack, Variable, refusal

GRADIENTS, LOSS = 0, 1
"""The places of a variable's sensitivities."""


class Effect(NamedTuple):
    """What a result's error changes; numbers on the device.

    Attributes:
        gradients: the 2-norm of the error times the sensitivity of the gradients to it.
        loss: the sum of the error times the derivative of the loss.
    """

    gradients: Any
    loss: Any


def seed(node: Node, place: int, value: Any) -> None:
    """Add to one of a value's sensitivities.

    Args:
        node: any; nothing is kept for arguments and constants.
        place: `GRADIENTS` or `LOSS`.
        value: an array of its shape.
    """
    if node.maker is not None:
        before = node.sensitivities[place]
        node.sensitivities[place] = value if before is None else before + value


def measure(tape: Tape) -> dict[Call, list[Effect]]:
    """Return the effects of each call that was compared with float32.

    Sensitivities that were seeded are carried to every value of the tape. They and the values that the
    derivative needs are dropped on the way; errors are kept.
    """
    effects: dict[Call, list[Effect]] = {}
    for call in reversed(tape.calls):
        operation = call.operation
        sensitivities = [[each.sensitivities[place] for each in call.results] for place in (GRADIENTS, LOSS)]
        if call.losses:
            effects[call] = list(map(_effect, call.losses, *sensitivities))
        if isinstance(operation, Operation):
            try:
                _pull(call, operation, sensitivities)
            except Exception as error:  # a library's own primitive may raise anything
                tape.notes[refusal(operation, error)] = None
        else:
            _pull_layout(call, operation, sensitivities)
        call.kept = []
        for each in call.results:
            each.sensitivities = [None, None]
    return effects


def _effect(lost: Lost, gradient: Any, loss: Any) -> Effect:
    if lost.delta is None or (gradient is None and loss is None):
        return Effect(0.0, 0.0)
    known = loss if gradient is None else gradient
    pair = [jnp.zeros_like(known) if each is None else each for each in (gradient, loss)]
    return Effect(*changes(lost.delta, *pair))


def _pull(call: Call, operation: Operation, sensitivities: list[list[Any]]) -> None:
    taken = [each for each in call.operands if each.maker is not None]
    for place, results in enumerate(sensitivities):
        if taken and any(each is not None for each in results):
            for node, array in zip(taken, _pulled(operation, call, results), strict=True):
                seed(node, place, array)


def _pulled(operation: Operation, call: Call, results: Sequence[Any]) -> list[Any]:
    """Return the sensitivities to the active operands; those that are not finite are taken for 0.

    Args:
        operation: what ran.
        call: with the values of the operands.
        results: the sensitivity to each result that is floating or complex; None for 0.
    """
    if operation.is_cast:
        return [result.astype(wide(operation.equation.invars[0].aval.dtype)) for result in results]
    shapes = results_in_float32(operation.equation)
    filled = [
        jnp.zeros(like.shape, like.dtype) if each is None else each
        for each, like in zip(results, shapes, strict=True)
    ]
    found, tape = _derivative(operation.signature, call.active)
    operands = [each if each is None else widen(each) for each in call.kept]
    return [
        _finite(each.value) for each in tape.run(found.program, list(map(Variable, [*operands, *filled])))
    ]


@lru_cache(maxsize=4096)
def _derivative(signature: Signature, active: tuple[bool, ...]) -> tuple[Derivative, Tape]:
    """Return the derivative of an equation, and what runs it."""
    return derivative(signature, active), Tape(in_float32=True)


def _finite(array: Any) -> Any:
    return array if np.isfinite(array).all() else jnp.where(jnp.isfinite(array), array, 0)


def _pull_layout(call: Call, operation: Unstack | Stack, sensitivities: Sequence[Sequence[Any]]) -> None:
    for place, arrays in enumerate(sensitivities):
        known = next((each for each in arrays if each is not None), None)
        if known is not None:
            filled = [jnp.zeros_like(known) if each is None else each for each in arrays]
            for node, array in zip(call.operands, operation.pulled(filled), strict=True):
                seed(node, place, array)
