"""What Hypothesis draws for the core: policies with every setting, overflow scripts and steps.

A script is a string with one mark a step; "1" is an overflow, as in `recorded/record.py`.
"""

from __future__ import annotations

import warnings
from typing import Any

from hypothesis import strategies as st

from preamp import Dynamic, InexactScale, Moving, Policy, Reading, Starved, Static, Step, Tolerant

from .recorded.record import Scales, walk

scripts = st.text("01", max_size=60)

_powers = st.integers(-100, 100).map(lambda exponent: 2.0**exponent)
_scales = _powers | st.floats(1e-30, 1e30)
_dtypes = st.sampled_from(["float32", "float64"])
_growths = st.sampled_from([2.0, 4.0]) | st.floats(1.01, 16.0)
_backoffs = st.sampled_from([0.5, 0.25]) | st.floats(0.05, 0.99)
_events = st.lists(st.sampled_from(["clean", "growth", "backoff"]), unique=True).map(tuple)


def quietly(make: type[Policy[Any]], **settings: Any) -> Any:
    """Make a policy without the warning that its factors round."""
    with warnings.catch_warnings(action="ignore", category=InexactScale):
        return make(**settings)


@st.composite
def _moves(draw: st.DrawFn, fixed: dict[str, Any]) -> dict[str, Any]:
    """Draw what `Moving` takes: bounds that hold `init_scale` unless it may lie outside."""
    bounds = fixed.get("bounds") or draw(st.sampled_from(["strict", "moves", "always"]))
    low, inside, high = sorted(draw(st.tuples(_scales, _scales, _scales)))
    floor = draw(st.sampled_from([None, low]))
    return {
        "init_scale": inside if bounds == "strict" else draw(_scales),
        "growth_factor": draw(_growths),
        "backoff_factor": draw(_backoffs),
        "backoff_divisor": draw(st.none() | _growths),
        "growth_interval": draw(st.integers(1, 6)),
        "growth_delay": draw(st.integers(0, 2)),
        "min_scale": floor,
        "max_scale": draw(st.sampled_from([None, high])),
        "at_floor": "hold" if floor is None else draw(st.sampled_from(["hold", "raise", "raise_on_arrival"])),
        "at_ceiling": draw(st.sampled_from(["clamp", "refuse"])),
        "bounds": bounds,
        "scale_dtype": draw(_dtypes),
        "factor_dtype": draw(_dtypes),
        **fixed,
    }


@st.composite
def dynamics(draw: st.DrawFn, **fixed: Any) -> Dynamic:
    """Draw a `Dynamic`, with some settings fixed."""
    reset = fixed.get("hysteresis_reset", draw(_events))
    own = {
        "hysteresis": draw(st.integers(1, 4)),
        "hysteresis_reset": reset,
        "max_consecutive_overflows": draw(st.none() | st.integers(1, 8)) if reset == ("clean",) else None,
    }
    return quietly(Dynamic, **{**own, **draw(_moves(fixed))})


@st.composite
def tolerants(draw: st.DrawFn, **fixed: Any) -> Tolerant:
    """Draw a `Tolerant`, with some settings fixed."""
    return quietly(Tolerant, tolerance=draw(st.floats(0.0, 1.0)), **draw(_moves(fixed)))


statics = _scales.map(lambda scale: quietly(Static, scale=scale))


def moving(**fixed: Any) -> st.SearchStrategy[Moving[Any]]:
    """Draw a policy whose scale moves."""
    return dynamics(**fixed) | tolerants(**fixed)


policies: st.SearchStrategy[Policy[Any]] = statics | moving()


def play(policy: Policy[Any], script: str, state: Any = None) -> list[Any]:
    """Return the state before every step and after the last one that the policy did not give up on."""
    states = [policy.start() if state is None else state]
    try:
        for mark in script:
            states.append(policy.step(states[-1], Reading(finite=mark == "0")))
    except Starved:
        pass
    return states


def walked(policy: Policy[Any], script: str, state: Any = None) -> Scales:
    """Return the scales of every step, as the originals' are returned."""
    now = policy.start() if state is None else state

    def update(overflow: bool) -> None:
        nonlocal now
        now = policy.step(now, Reading(finite=not overflow))

    return walk(script, lambda: now.scale, update, Starved)


_names = st.text() | st.just("\ud800 lone surrogate") | st.just("größe.0.weight\n")
_loose = st.none() | st.floats()
steps = st.builds(
    Step,
    index=st.integers(),
    scale=st.floats(),
    finite=st.booleans(),
    skipped=st.booleans(),
    new_scale=_loose,
    loss=_loose,
    grad_norm=_loose,
    peak=_loose,
    zeros=_loose,
    culprits=st.lists(_names, max_size=3).map(tuple),
    seconds=_loose,
)
