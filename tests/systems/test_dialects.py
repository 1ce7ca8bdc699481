"""Every dialect beside the system it is named after: equal scales, bit for bit, and equal ends.

Systems that are installed run here (`originals.py`); of the others, `recorded/scalers.json` holds what
they did. Both comparisons must also notice when a policy is changed a little.
"""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import PolicyError, Reading, ScaleExhausted, State, dialects
from tests import originals
from tests.recorded.drivers import Arguments, Scales
from tests.strategies import COMPAT, replace_quietly, walked

# The systems that are installed


class Peer(NamedTuple):
    """A dialect, the original, the name of the original's window and the arguments given to both."""

    dialect: str
    original: Callable[[Arguments, str], Scales]
    window: str
    settings: list[Arguments]


DEEPSPEED = [
    {
        "init_scale": init_scale,
        "scale_window": scale_window,
        "min_scale": min_scale,
        "hysteresis": hysteresis,
        "consecutive_hysteresis": consecutive,
        "raise_error_at_min_scale": raises,
    }
    for (init_scale, min_scale), hysteresis, scale_window, consecutive, raises in product(
        [(2.0**16, 1.0), (1000.0, 100.0), (1.0, 4.0)],
        [1, 3],
        [1, 3],
        [False, True],
        [False, True],
    )
]
STAGE_0 = [
    {"init_scale": init_scale, "scale_window": scale_window, "min_scale": min_scale}
    for init_scale, scale_window, min_scale in (
        *[(2.0**16, 1000, 1.0), (2.0**16, 1, 0.25), (2.0**100, 2, 100.0)],
        *[(1000.1, 3, 1.0), (1.0, 5, 4.0)],
    )
]

PEERS = [
    Peer("TORCH", originals.torch, "growth_interval", [
        {},
        {"growth_interval": 1},
        {"growth_interval": 1, "init_scale": 2.0**126},
        {"growth_interval": 2, "init_scale": 2.0**-140},
        {"growth_interval": 3, "growth_factor": 1.5, "backoff_factor": 0.7},
        {"growth_interval": 2, "growth_factor": 1.1, "backoff_factor": 0.9, "init_scale": 1000.1},
        {"growth_interval": 5, "growth_factor": 3.0, "backoff_factor": 0.3},
    ]),
    Peer("KERAS", originals.keras, "dynamic_growth_steps", [
        {},
        {"dynamic_growth_steps": 1},
        {"dynamic_growth_steps": 2, "initial_scale": 2.0**126},
        {"dynamic_growth_steps": 3, "initial_scale": 1000.1},
        {"dynamic_growth_steps": 5, "initial_scale": 2.0**-145},
    ]),
    Peer("TF_KERAS", originals.tf_keras, "dynamic_growth_steps", [
        {},
        {"dynamic_growth_steps": 1, "initial_scale": 2.0**126},
        {"dynamic_growth_steps": 2, "initial_scale": 0.3},
        {"dynamic_growth_steps": 3, "initial_scale": 1000.1},
        {"dynamic": False, "initial_scale": 128.0},
    ]),
    Peer("FLAX", originals.flax, "growth_interval", [
        {},
        {"growth_interval": 0},
        {"growth_interval": 1, "scale": 2.0**126},
        {"growth_interval": 2, "scale": 2.0**-120},
        {"growth_interval": 3, "growth_factor": 1.5, "backoff_factor": 0.7, "minimum_scale": 100.0},
        {"growth_interval": 2, "growth_factor": 1.1, "backoff_factor": 0.9, "scale": 1000.1},
        {"growth_interval": 5, "scale": 2.0**120, "minimum_scale": 2.0**122},
        {"growth_interval": 4, "scale": 2.0**120, "minimum_scale": None, "backoff_factor": 0.9},
    ]),
    Peer("JMP", originals.jmp, "period", [
        {},
        {"period": 1, "loss_scale": 2.0**126},
        {"period": 2, "loss_scale": 2.0, "min_loss_scale": 16.0},
        {"period": 3, "factor": 3, "loss_scale": 1000.1},
        {"period": 4, "factor": 10, "min_loss_scale": 0.3},
    ]),
    Peer("DEEPSPEED", originals.deepspeed, "scale_window", DEEPSPEED),
    Peer("DEEPSPEED_FUSED", originals.deepspeed_fused, "scale_window", STAGE_0),
    Peer("DEEPSPEED_FUSED", originals.deepspeed_unfused, "scale_window", STAGE_0),
]  # fmt: skip

each_peer = pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.original.__name__)


def scripts(window: int) -> list[str]:
    """Return scripts that meet every rule of a scaler that grows after about `window` clean steps."""
    if window > 100:
        return ["0" * (window + 1) + "1" + "0" * 9 + "11"]
    gaps = "".join("0" * gap + ones for ones in ("1", "11", "111") for gap in range(window - 1, window + 3))
    bursts = "".join("0" * gap + "1" * burst for gap in (2, 9, 30) for burst in range(1, 6))
    draw = random.Random(window)
    chance = ["".join("1" if draw.random() < rate else "0" for _ in range(60)) for rate in (0.05, 0.3, 0.7)]
    return ["1" * 300, "0" * 150, "10" * 30, gaps, bursts, *chance]


def recollect(peer: Peer) -> list[tuple[Arguments, str, Scales]]:
    """Run an original through its settings and scripts."""
    return [
        (arguments, script, peer.original(arguments, script))
        for arguments in peer.settings
        for script in scripts(arguments.get(peer.window, 2000))
    ]


@each_peer
@settings(deadline=None, max_examples=10)
@given(st.data(), st.text("01", max_size=40))
def test_no_script_that_hypothesis_finds_tells_them_apart(peer: Peer, data: Any, script: str) -> None:
    arguments = data.draw(st.sampled_from(peer.settings))
    assert walked(dialects.ALL[peer.dialect](**arguments), script) == peer.original(arguments, script)


# The systems that were recorded

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "scalers.json").read_text(encoding="utf-8"))
RECORDINGS = RECORDED["recordings"]


def recall(recording: dict[str, Any]) -> tuple[Arguments, str, Scales]:
    """Return the arguments, the script and the scales of a recording."""
    script, raised = RECORDED["scripts"][recording["script"]], recording["raises_at"]
    changes = {step: float(scale) for step, scale in recording["changes"]}
    scales = [changes[0]]
    for step in range(1, (len(script) if raised is None else raised + 1) + 1):
        scales.append(changes.get(step, scales[-1]))
    arguments = {
        name: math.inf if value == "inf" else value for name, value in recording["arguments"].items()
    }
    return arguments, script, (scales, raised)


@pytest.mark.parametrize("dialect", sorted({recording["dialect"] for recording in RECORDINGS}))
def test_every_scale_is_the_recorded_one(dialect: str) -> None:
    for recording in RECORDINGS:
        if recording["dialect"] == dialect:
            arguments, script, theirs = recall(recording)
            assert walked(dialects.ALL[dialect](**arguments), script) == theirs, recording


# The comparisons notice


def mutants(policy: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each setting of a policy, and what makes it with that setting changed as little as matters."""
    changes: dict[str, Callable[[Any], Any]] = {
        "init_scale": lambda x: x * 1.5,
        "growth_factor": lambda x: x * (1 + 2.0**-20),
        "backoff_factor": lambda x: x * (1 - 2.0**-20),
        "backoff_divisor": lambda x: x * (1 + 2.0**-20),
        "growth_interval": lambda x: x + 1,
        "growth_delay": lambda x: x + 1,
        "hysteresis": lambda x: x + 1,
        "hysteresis_reset": lambda x: "growth" if x == "clean" else "clean",
        "min_scale": lambda x: 1.0 if x is None else x * 1.5,
        "max_scale": lambda x: 2.0**121 if x is None else x / 2.5,
        "at_floor": lambda x: "raise" if x == "hold" else "hold",
        "at_ceiling": lambda x: "clamp" if x == "refuse" else "refuse",
        "scale_dtype": lambda x: "float64" if x == "float32" else "float32",
        "factor_dtype": lambda x: "float32",
    }
    optional = ("min_scale", "max_scale")
    same = {
        "at_floor": policy.min_scale is None,
        "at_ceiling": policy.max_scale is None,
        "backoff_factor": policy.compat.backoff_divisor is not None,
        "factor_dtype": policy.compat.factor_dtype == "float32",  # the factors are already rounded
        "hysteresis_reset": getattr(policy, "hysteresis", 1) == 1,
    }
    for name, change in changes.items():
        value = getattr(policy.compat if name in COMPAT else policy, name, None)
        if not same.get(name) and (value is not None or name in optional):
            yield name, partial(replace_quietly, policy, **{"bounds": "moves", name: change(value)})


def unnoticed(make: Callable[..., Any], cases: list[tuple[Arguments, str, Scales]]) -> set[str]:
    """Return the settings that can change without any case telling."""
    seen, noticed = set(), set()
    for arguments, script, theirs in cases:
        for name, mutant in mutants(make(**arguments)):
            seen.add(name)
            if name not in noticed and walked(mutant(), script) != theirs:
                noticed.add(name)
    return seen - noticed


def recorded_of(name: str) -> list[tuple[Arguments, str, Scales]]:
    return [recall(recording) for recording in RECORDINGS if recording["dialect"] == name]


UNNOTICED = {
    "TF_KERAS": {"scale_dtype"},  # factors are exact and the floor is far above float32's own
}


@each_peer
def test_a_dialect_is_its_original_and_nothing_close_to_it(peer: Peer) -> None:
    make, cases = dialects.ALL[peer.dialect], recollect(peer)
    for arguments, script, theirs in cases:
        assert walked(make(**arguments), script) == theirs, (arguments, script)
    moving = [case for case in cases if case[0].get("dynamic", True)]
    assert unnoticed(make, moving) == UNNOTICED.get(peer.dialect, set())


@pytest.mark.parametrize("name", sorted({recording["dialect"] for recording in RECORDINGS}))
def test_no_small_change_goes_unnoticed_by_the_recordings(name: str) -> None:
    assert unnoticed(dialects.ALL[name], recorded_of(name)) == UNNOTICED.get(name, set())


# The dialects themselves

ABSENT = {"APEX"}  # its original is neither installed nor recorded

each_dialect = pytest.mark.parametrize("name", sorted(dialects.ALL))


def test_every_dialect_is_compared_with_its_original_if_there_is_one() -> None:
    compared = {peer.dialect for peer in PEERS} | {recording["dialect"] for recording in RECORDINGS}
    assert set(dialects.ALL) == compared | ABSENT
    assert not compared & ABSENT


@pytest.mark.parametrize(
    ("policy", "mark", "moves"),
    [
        (dialects.DEEPSPEED(init_scale=16, scale_window=3), "0", [4, 7, 10]),
        (dialects.APEX(init_scale=2.0**30, scale_window=1), "0", []),
    ],
)
def test_the_scale_moves_on_the_steps_on_which_the_original_was_seen_to_move_it(
    policy: Any, mark: str, moves: list[int]
) -> None:
    scales, _ = walked(policy, mark * 11)
    assert [step for step in range(1, len(scales)) if scales[step] != scales[step - 1]] == moves


def test_apex_without_a_floor_reaches_zero_when_apex_did() -> None:
    assert walked(dialects.APEX(), "1" * 1100)[0].index(0.0) == 1091


@each_dialect
def test_a_dialect_is_the_policy_of_its_defaults(name: str) -> None:
    dialect = dialects.ALL[name]
    assert dialect is getattr(dialects, name)
    assert dialect() == dialect.policy
    assert walked(dialect, "0" * 2001 + "1" * 5) == walked(dialect(), "0" * 2001 + "1" * 5)
    assert (dialect.name, repr(dialect)) == (name, f"dialects.{name}")
    assert all(text and text in (dialect.__doc__ or "") for text in (dialect.system, dialect.odd))


def test_a_dialect_gives_up_like_its_policy() -> None:
    with pytest.raises(ScaleExhausted):
        dialects.DEEPSPEED.step(State(1.0, 0.0, 1.0), Reading(finite=False))


@each_dialect
def test_a_dialect_travels(name: str) -> None:
    dialect = dialects.ALL[name]
    assert pickle.loads(pickle.dumps(dialect)) is dialect
    assert copy.deepcopy(dialect) is dialect


def test_a_dialect_rounds_without_a_warning_and_refuses_what_a_policy_refuses() -> None:
    assert dialects.TORCH(growth_factor=1.5).growth_factor == 1.5  # type: ignore[attr-defined]
    with pytest.raises(PolicyError, match="hysteresis=0"):
        dialects.DEEPSPEED(hysteresis=0)
    with pytest.raises(PolicyError, match="Write initial_scale"):
        dialects.TF_KERAS(dynamic=False)
