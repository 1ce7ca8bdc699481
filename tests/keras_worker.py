"""A process of its own for Keras, which has one backend for life.

One JSON request a line on stdin, one JSON answer a line on stdout.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import jax
import keras
import numpy as np
from recorded.drivers import Scales, walk

import preamp
from preamp.policy.registry import from_json


def optimizer(arguments: dict[str, Any], script: str) -> Scales:
    """Drive `keras.optimizers.LossScaleOptimizer` through its public `apply`."""
    variable = keras.Variable(np.zeros(1, "float32"))
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), **arguments)
    scaler.build([variable])
    clean, overflow = (keras.ops.convert_to_tensor([x], "float32") for x in (0.0, math.inf))

    return walk(
        script,
        lambda: float(scaler.dynamic_scale),
        lambda overflows: scaler.apply([overflow if overflows else clean], [variable]),
    )


def policy(make: str, settings: dict[str, Any], readings: list[list[Any]]) -> list[list[float]]:
    """Advance one of our policies with `keras.ops`, compiled if it looks at gradients: it has more to do."""
    rule = from_json({"class": make, "settings": settings}, lambda name: None)
    advance = jax.jit(rule.advance, static_argnums=2) if rule.needs_amax else rule.advance
    state = [keras.ops.convert_to_tensor(x, "float32") for x in rule.start()]
    states = []
    for finite, *seen in readings:
        values = [None if x is None else keras.ops.convert_to_tensor(x, "float32") for x in seen]
        reading = preamp.Reading(keras.ops.convert_to_tensor(finite), *values)
        state = advance(type(rule.start())(*state), reading, keras.ops.where)
        states.append([float(x) for x in state])
    return states


if __name__ == "__main__":
    for line in sys.stdin:
        job, *rest = json.loads(line)
        print(json.dumps({"optimizer": optimizer, "policy": policy}[job](*rest)), flush=True)
