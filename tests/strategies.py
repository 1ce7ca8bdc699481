"""What Hypothesis draws for the core: policies with every setting, overflow scripts and steps.

A script is a string with one mark a step; "1" is an overflow, as in `recorded/record.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from hypothesis import strategies as st

from preamp import (
    Compat,
    Dynamic,
    ExponentHistogram,
    Headroom,
    InexactScale,
    Moving,
    Policy,
    PolicyError,
    QuantizedRow,
    Reading,
    ScaleExhausted,
    Snapshot,
    SnapshotRow,
    Static,
    Step,
    Tolerant,
)
from preamp.policy.logarithm import log2_near as log2_near
from preamp.policy.logarithm import two_to as two_to
from preamp.policy.registry import RULES
from preamp.policy.registry import from_json as from_json
from preamp.policy.registry import to_json as to_json
from preamp.recipes.values import FORMATS
from preamp.record.exponents import BANDS
from preamp.record.snapshots import Kind

from .recorded.drivers import Scales, walk

scripts = st.text("01", max_size=60)

_powers = st.integers(-100, 100).map(lambda exponent: 2.0**exponent)
_scales = _powers | st.floats(1e-30, 1e30)
_dtypes = st.sampled_from(["float32", "float64"])
_growths = st.sampled_from([2.0, 4.0]) | st.floats(1.01, 16.0)
_backoffs = st.sampled_from([0.5, 0.25]) | st.floats(0.05, 0.99)
_lengths = st.integers(0, 12).map(lambda power: 2**power)
_events = st.sampled_from(["clean", "growth"])


COMPAT = {field.name for field in fields(Compat)}


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with those of `Compat`, which tests name beside the others, in one."""
    compat = {name: value for name, value in settings.items() if name in COMPAT}
    rest = {name: value for name, value in settings.items() if name not in COMPAT}
    return {**rest, "compat": Compat(**compat)} if compat else rest


def quietly(make: type[Any], **settings: Any) -> Any:
    """Make a policy, or a `Compat`, without the warning that its factors round."""
    with warnings.catch_warnings(action="ignore", category=InexactScale):
        return make(**(settings if make is Compat else nested(settings)))


def replace_quietly(policy: Any, **settings: Any) -> Any:
    """Return a policy with other settings, those of its `Compat` among them, without that warning."""
    with warnings.catch_warnings(action="ignore", category=InexactScale):
        compat = {name: settings.pop(name) for name in [*settings] if name in COMPAT}
        return replace(policy, **settings, **({"compat": replace(policy.compat, **compat)} if compat else {}))


@st.composite
def _moves(draw: st.DrawFn, fixed: dict[str, Any]) -> dict[str, Any]:
    """Draw what `Moving` takes: bounds that hold `init_scale` unless it may lie outside."""
    bounds = fixed.get("bounds") or draw(st.sampled_from(["strict", "moves"]))
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
        "at_floor": "hold" if floor is None else draw(st.sampled_from(["hold", "raise"])),
        "at_ceiling": draw(st.sampled_from(["clamp", "refuse"])),
        "bounds": bounds,
        "scale_dtype": draw(_dtypes),
        "factor_dtype": draw(_dtypes),
        **fixed,
    }


@st.composite
def dynamics(draw: st.DrawFn, **fixed: Any) -> Dynamic:
    """Draw a `Dynamic`, with some settings fixed."""
    own = {"hysteresis": draw(st.integers(1, 4)), "hysteresis_reset": draw(_events)}
    return quietly(Dynamic, **{**own, **draw(_moves(fixed))})


@st.composite
def tolerants(draw: st.DrawFn, **fixed: Any) -> Tolerant:
    """Draw a `Tolerant`, with some settings fixed."""
    return quietly(Tolerant, tolerance=draw(st.floats(0.0, 1.0)), **draw(_moves(fixed)))


statics = _scales.map(lambda scale: quietly(Static, scale=scale))


def moving(**fixed: Any) -> st.SearchStrategy[Moving[Any]]:
    """Draw a policy whose scale moves."""
    return dynamics(**fixed) | tolerants(**fixed)


@st.composite
def headrooms(draw: st.DrawFn) -> Headroom:
    """Draw a `Headroom`."""
    low, inside, high = sorted(draw(st.tuples(_scales, _scales, _scales)))
    return quietly(
        Headroom,
        init_scale=inside,
        min_scale=low,
        max_scale=high,
        margin=draw(st.floats(0.0, 24.0)),
        memory=draw(st.integers(1, 100)),
        patience=draw(_lengths),
    )


@st.composite
def near_the_defaults(draw: st.DrawFn, kind: type[Policy[Any]]) -> Policy[Any]:
    """Draw a policy of any kind: numbers some powers of two from their defaults, where these go together."""
    numbers = {one.name: one.default for one in fields(kind) if type(one.default) in (int, float)}
    try:
        return quietly(
            kind, **{name: type(n)(n * 2.0 ** draw(st.integers(-4, 4))) for name, n in numbers.items()}
        )
    except PolicyError:
        return kind()


OWN: dict[type[Policy[Any]], st.SearchStrategy[Any]] = {
    Static: statics,
    Dynamic: dynamics(),
    Tolerant: tolerants(),
    Headroom: headrooms(),
}


def _each(kinds: Iterable[type[Policy[Any]]]) -> st.SearchStrategy[Policy[Any]]:
    return st.one_of([OWN.get(kind, near_the_defaults(kind)) for kind in kinds])


seeing = _each(kind for kind in RULES.values() if kind.needs_amax)
blind = _each(kind for kind in RULES.values() if not kind.needs_amax)
policies = blind | seeing


def reading(policy: Policy[Any], state: Any, mark: str) -> Reading:
    """Return what a policy reads: of overflows the script, of gradients an amax of 2**-10 at every scale."""
    if mark == "1" or not policy.needs_amax:
        return Reading(mark == "0")
    return Reading(True, state.scale * 2.0**-10)


def play(policy: Policy[Any], script: str, state: Any = None) -> list[Any]:
    """Return the state before every step and after the last one that the policy did not give up on."""
    states = [policy.start() if state is None else state]
    try:
        for mark in script:
            states.append(policy.step(states[-1], reading(policy, states[-1], mark)))
    except ScaleExhausted:
        pass
    return states


def walked(policy: Policy[Any], script: str, state: Any = None) -> Scales:
    """Return the scales of every step, as the originals' are returned."""
    now = policy.start() if state is None else state

    def update(overflow: bool) -> None:
        nonlocal now
        now = policy.step(now, Reading(finite=not overflow))

    return walk(script, lambda: now.scale, update, ScaleExhausted)


_names = st.text() | st.just("\ud800 lone surrogate") | st.just("größe.0.weight\n")
_loose = st.none() | st.floats()
_recorded = st.floats(min_value=0.0)
steps = st.builds(
    Step,
    index=st.integers(min_value=0),
    scale=_recorded,
    finite=st.booleans(),
    skipped=st.booleans(),
    new_scale=st.none() | _recorded,
    loss=_loose,
    grad_norm=_loose,
    amax=_loose,
    zeros=_loose,
    culprits=st.lists(_names, max_size=3).map(tuple),
    seconds=_loose,
    buffers=st.lists(_names, max_size=2).map(tuple),
    restored=st.lists(_names, max_size=2).map(tuple),
)
runs = (
    st.lists(steps, max_size=8)
    .map(lambda run: sorted(run, key=lambda step: step.index))
    .map(lambda run: [step for n, step in enumerate(run) if n == 0 or step.index > run[n - 1].index])
)


def _histogram(low: int, counts: list[int], zeros: int, nonfinite: int) -> ExponentHistogram:
    return ExponentHistogram(low, tuple(counts), zeros, nonfinite)


_counts = st.integers(0, 3) | st.integers(0, 2**63 - 1)
histograms = st.builds(
    _histogram, st.integers(-1074, 1023), st.lists(_counts, max_size=12), zeros=_counts, nonfinite=_counts
)
_low_dtypes = st.sampled_from(list(BANDS))
_magnitudes = st.none() | st.floats(0.0, exclude_min=True, allow_infinity=False)


@st.composite
def snapshot_rows(draw: st.DrawFn, *kinds: Kind) -> SnapshotRow:
    """Draw a row of one of some kinds, with or without what only some lenses measure."""
    seen = draw(histograms)
    name, dtype = draw(_names), draw(st.sampled_from(["float16", "float32", "x"]))
    exact = draw(_magnitudes), draw(_magnitudes), draw(st.none() | st.integers(0, seen.nonfinite))
    return SnapshotRow(name, draw(st.sampled_from(kinds)), dtype, seen, *exact)


def _rows(most: int, *kinds: Kind) -> st.SearchStrategy[tuple[SnapshotRow, ...]]:
    return st.lists(snapshot_rows(*kinds), max_size=most).map(tuple)


_shares = st.floats(0.0, 1.0)
_quantized = st.builds(
    QuantizedRow,
    _names,
    st.sampled_from(["fprop", "dgrad", "wgrad"]),
    st.sampled_from(["input", "weight", "gradient"]),
    st.sampled_from(list(FORMATS)),
    st.integers(0, 2**63 - 1),
    _shares,
    _shares,
    st.floats(),
)
snapshots = st.builds(
    Snapshot,
    st.integers(),
    st.floats(),
    _low_dtypes,
    _rows(5, "activation", "flow", "gradient"),
    _rows(2, "input"),
    _rows(2, "weight"),
    st.lists(_quantized, max_size=3, unique_by=lambda row: row[:4]).map(tuple),
)
