"""What a row's errors do to the gradients, measured: they are injected into the step in float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from preamp.autocasting.tables import DEFAULT

from .inside import Operation, Tape, Variable, key_of, owners_of, region, steps


class Watched(Tape):
    """Keeps what each call loses, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: dict[int, Any] = {}

    def _call(self, operation: Any, operands: list[Variable]) -> list[Variable]:
        results = super()._call(operation, operands)
        if isinstance(operation, Operation) and operation.differs and results[0].node.maker:
            (exact,) = operation.in_float32(*(each.value for each in operands))
            self.lost[self.count] = np.asarray(results[0].value, np.float32) - np.asarray(exact, np.float32)
        return results


def measured_effects(
    loss_fn: Any, params: Any, *args: Any, low: str = "bfloat16", repeats: int = 2, **settings: Any
) -> dict[Any, float]:
    """Return for each row the change of the gradients by its errors alone, with random signs.

    The unit is that of `BlameRow.effect`.
    """
    inside = region(low, DEFAULT, True)
    step = steps.traced(loss_fn, params, args, {}, inside)
    scale = settings.get("loss_scale", 1.0)
    tape = Watched()
    results = tape.run(step.program, step.operands(tape, scale))
    tape.join_backward(results[0].node)
    owners = owners_of(tape.calls, inside)
    errors: dict[Any, dict[int, Any]] = {}
    for call in tape.calls:
        error = tape.lost.get(call.index)
        if error is not None and np.abs(error).max(initial=0):
            errors.setdefault(key_of(owners.get(call, call)), {})[call.index] = error

    def gradients(injected: dict[int, list[Any]]) -> list[Any]:
        exact = Tape(in_float32=True, errors=injected)
        return [np.asarray(each.value) for each in exact.run(step.program, step.operands(exact, scale))[1:]]

    random = np.random.default_rng(1)
    plain = gradients({})
    weights = [steps.weight_of(param) for param in step.params]
    size = np.sqrt(sum(w**2 * np.square(g).sum() for w, g in zip(weights, plain, strict=True)))
    found = {}
    for key, row in errors.items():
        squares = 0.0
        for _ in range(repeats):
            signed = {n: [error * random.choice([-1, 1], error.shape)] for n, error in row.items()}
            pairs = zip(weights, gradients(signed), plain, strict=True)
            squares += sum(w**2 * np.square(g - old).sum() for w, g, old in pairs) / repeats
        found[key] = float(np.sqrt(squares)) / float(size)
    return found
