"""Settings of policies that cannot work, or round: what is refused and told, and in which words."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import fields, replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import (
    Compat,
    Dynamic,
    InexactScale,
    Policy,
    PolicyError,
    Static,
    Tolerant,
)
from tests.strategies import COMPAT, RULES, nested, quietly

NOT_A_NUMBER: list[Any] = ["2", None, True, False, 1j, Decimal(2), [2.0], math.nan]
NOT_POSITIVE: list[Any] = [0, 0.0, -0.0, -1.0, math.inf, -math.inf]
NOT_WHOLE: list[Any] = [2.5, True, False, "2", math.nan, math.inf, -1]
UNKNOWN: list[Any] = ["", "HOLD", None, 1, True, []]
OPTIONAL = ("min_scale", "max_scale", "backoff_divisor")

BAD: dict[str, list[Any]] = {
    "init_scale": [*NOT_A_NUMBER, *NOT_POSITIVE],
    "min_scale": [*NOT_A_NUMBER, *NOT_POSITIVE],
    "max_scale": [*NOT_A_NUMBER, *NOT_POSITIVE],
    "growth_factor": [*NOT_A_NUMBER, *NOT_POSITIVE, 1, 0.5],
    "backoff_factor": [*NOT_A_NUMBER, *NOT_POSITIVE, 1, 1.5],
    "growth_interval": [*NOT_WHOLE, None, 0],
    "at_floor": UNKNOWN,
    "compat": [None, 1, True, "strict", []],
}
BAD_COMPAT = {
    "backoff_divisor": [*NOT_A_NUMBER, *NOT_POSITIVE, 1, 0.5],
    "growth_delay": [*NOT_WHOLE, None],
    "at_ceiling": UNKNOWN,
    "bounds": UNKNOWN,
    "scale_dtype": [*UNKNOWN, "float16"],
    "factor_dtype": [*UNKNOWN, "float16"],
}
BAD_DYNAMIC = {"hysteresis": [*NOT_WHOLE, None, 0], "hysteresis_reset": [*UNKNOWN, "overflow", ("clean",)]}
BAD_TOLERANT = {"tolerance": [*NOT_A_NUMBER, -0.1, 1.1, math.inf]}
BAD_STATIC = {"scale": [*NOT_A_NUMBER, *NOT_POSITIVE]}
BAD_OF: dict[type[Policy[Any]], dict[str, list[Any]]] = {
    Dynamic: BAD | BAD_DYNAMIC,
    Tolerant: BAD | BAD_TOLERANT,
    Static: BAD_STATIC,
}


def not_numbers(kind: type[Policy[Any]]) -> dict[str, list[Any]]:
    """Return what no number of any rule may be."""
    return {field.name: NOT_A_NUMBER for field in fields(kind) if type(field.default) in (int, float)}


INVALID = [
    pytest.param(make, name, values, id=f"{make.__name__}-{name}")
    for make, table in [
        *[(kind, BAD_OF.get(kind) or not_numbers(kind)) for kind in RULES.values()],
        (Compat, BAD_COMPAT),
    ]
    for name, values in table.items()
]


def refusal(make: Any, **setting: Any) -> str:
    """Return what is said of a setting that is refused, else nothing."""
    try:
        make(**setting)
    except PolicyError as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize(("make", "name", "values"), INVALID)
def test_a_setting_that_cannot_work_is_refused_by_name(make: Any, name: str, values: list[Any]) -> None:
    assert issubclass(PolicyError, ValueError)
    for value in values:
        if value is not None or name not in OPTIONAL:
            said = refusal(make, **{name: value})
            assert "Write " in said, value
            assert f"{name}={value!r}" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("init_scale", 1e39), ("init_scale", 1e-46), ("min_scale", 1e-46), ("max_scale", 1e39)],
        *[("growth_factor", 1e39), ("growth_factor", 1 + 1e-9), ("backoff_divisor", 1 + 1e-9)],
        *[("backoff_factor", 1 - 1e-9), ("backoff_factor", 1e-46), ("backoff_divisor", 1e39)],
    ],
)
@pytest.mark.parametrize("make", [Dynamic, Tolerant])
def test_a_setting_that_float32_turns_into_one_that_cannot_work_is_refused(
    make: Any, name: str, value: float
) -> None:
    with pytest.raises(PolicyError, match=rf"{name}=.* Write "):
        make(**nested({"bounds": "moves", name: value}))
    assert quietly(make, scale_dtype="float64", factor_dtype="float64", bounds="moves", **{name: value})


@pytest.mark.parametrize("make", [Dynamic, Tolerant])
@pytest.mark.parametrize("conflict", [
    {"min_scale": 2.0**33, "init_scale": 2.0**33},
    {"min_scale": 8.0, "max_scale": 2.0, "init_scale": 4.0},
    {"init_scale": 2.0**33},
    {"init_scale": 123456789.0, "max_scale": 2.0**20},
    {"init_scale": 2.0**-15},
    {"init_scale": 1e-5},
    {"min_scale": None, "at_floor": "raise"},
])  # fmt: skip
def test_settings_that_contradict_each_other_name_settings_that_do_not(
    make: Any, conflict: dict[str, Any]
) -> None:
    with pytest.raises(PolicyError) as refused:
        make(**conflict)
    text = str(refused.value)
    assert any(f"{name}=" in text for name in conflict)
    advice = dict(re.findall(r"(\w+)=([\w.+-]*\w)", text.partition("Write ")[2]))
    assert quietly(make, **{**conflict, **{name: float(value) for name, value in advice.items()}})


@pytest.mark.parametrize("make", [Dynamic, Tolerant])
@pytest.mark.parametrize(
    ("name", "inexact", "exact"),
    [
        *[("growth_factor", 3.0, 4.0), ("growth_factor", 1.1, 1024.0), ("backoff_factor", 0.3, 2.0**-9)],
        *[("backoff_factor", 0.8, 0.25), ("backoff_divisor", 3.0, 8.0), ("backoff_divisor", 1.01, 2)],
        *[("init_scale", 1000.0, 1024.0), ("min_scale", 0.3, 0.25), ("max_scale", 1e5, 2.0**17)],
    ],
)
def test_a_factor_that_rounds_is_told_where_it_was_written(
    make: Any, name: str, inexact: float, exact: float
) -> None:
    make, other = (Compat, "growth_delay") if name in COMPAT else (make, "growth_interval")
    with pytest.warns(InexactScale, match=f"^{name}=") as told:
        settings = make(**{name: inexact})
    with pytest.warns(InexactScale) as told_again:
        replace(settings, **{other: 5})
    assert [warning.filename for warning in (*told, *told_again)] == [__file__, __file__]
    advised = re.search(r"Write (\w+)=(\S+) unless", str(told[0].message))
    assert advised
    make(**{advised[1]: float(advised[2])})  # neither refused nor warned of: warnings are errors here
    make(**{name: exact})


def test_a_static_scale_that_rounds_is_told_where_it_was_written() -> None:
    with pytest.warns(InexactScale, match=r"^scale=1000\b.* Write scale=1024") as told:
        Static(1000)
    assert [warning.filename for warning in told] == [__file__]


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 30), st.integers(-40, 40))
def test_powers_of_two_are_not_warned_of(power: int, exponent: int) -> None:
    with warnings.catch_warnings(action="error"):
        Static(2.0**exponent)
        Dynamic(growth_factor=2.0**power, backoff_factor=2.0**-power)
        Tolerant(growth_factor=2.0**power, compat=Compat(backoff_divisor=2.0**power))
