"""A run that is cut at any step goes on as if it were not: from the original's checkpoint, and from ours."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given

from preamp import Dynamic, Policy, State, Static, TolerantState, dialects
from preamp.errors import CheckpointError, LossyConversion, PolicyError
from tests import originals
from tests.combinations import in_one_test
from tests.recorded.drivers import Arguments
from tests.strategies import dynamics, play, scripts, walked

# The systems that are installed


class Peer(NamedTuple):
    """A dialect, its original, and the arguments given to both."""

    dialect: str
    original: type[originals.Original]
    settings: list[Arguments]


ZERO = [
    {
        "init_scale": init_scale,
        "scale_window": scale_window,
        "min_scale": min_scale,
        "hysteresis": hysteresis,
        "consecutive_hysteresis": consecutive,
        "raise_error_at_min_scale": raises,
    }
    for init_scale, scale_window, min_scale, hysteresis, consecutive, raises in (
        (2.0**16, 2, 1.0, 2, False, True),
        (2.0**16, 3, 1.0, 3, True, True),
        (16.0, 1, 2.0, 3, False, False),
        (4.0, 3, 1.0, 1, False, True),
        (1000.0, 3, 300.0, 2, True, False),
    )
]
STAGE_0 = [
    {"init_scale": 2.0**16, "scale_window": 1, "min_scale": 1.0},
    {"init_scale": 16.0, "scale_window": 3, "min_scale": 4.0},
]
PEERS = [
    Peer("TORCH", originals.Torch, [
        {"growth_interval": 2},
        {"growth_interval": 3, "growth_factor": 1.5, "backoff_factor": 0.7, "init_scale": 1000.1},
    ]),
    Peer("KERAS", originals.Keras, [{"dynamic_growth_steps": 3, "initial_scale": 1024.0}]),
    Peer("TF_KERAS", originals.TfKeras, [{"dynamic_growth_steps": 3, "initial_scale": 8.0}]),
    Peer("FLAX", originals.Flax, [
        {"growth_interval": 2, "scale": 8.0, "minimum_scale": 4.0},
        {"growth_interval": 3, "growth_factor": 1.5, "backoff_factor": 0.7, "scale": 1000.1},
    ]),
    Peer("JMP", originals.Jmp, [
        {"period": 3, "loss_scale": 8.0, "min_loss_scale": 4.0},
        {"period": 2, "loss_scale": 1000.1, "factor": 3},
    ]),
    Peer("DEEPSPEED", originals.DeepSpeed, ZERO),
    Peer("DEEPSPEED_FUSED", originals.DeepSpeedFused, STAGE_0),
    Peer("DEEPSPEED_FUSED", originals.DeepSpeedUnfused, STAGE_0),
]  # fmt: skip
CASES = [(peer.dialect, peer.original, arguments) for peer in PEERS for arguments in peer.settings]

each_case = pytest.mark.parametrize(
    ("name", "original", "arguments"), CASES, ids=lambda value: getattr(value, "__name__", None)
)


def random_script(seed: int, length: int = 20) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice("00001") for _ in range(length))


@each_case
def test_what_the_original_saved_goes_on_like_the_original(
    name: str, original: Any, arguments: Arguments
) -> None:
    dialect, script = dialects.ALL[name], random_script(1)
    there, rest = original(**arguments), dialect(**arguments)
    scales, raised = there.walk(script)
    saving = original(**arguments)
    for cut in range(len(scales) - 1):
        saved = saving.save()
        policy = dialect.load_policy(saved, rest)
        assert settings_of(policy) == settings_of(rest)
        assert walked(policy, script[cut:], dialect.load(saved, rest)) == (
            scales[cut:],
            None if raised is None else raised - cut,
        )
        saving.walk(script[cut])


@each_case
def test_what_we_save_goes_on_in_the_original_like_ours(
    name: str, original: Any, arguments: Arguments
) -> None:
    dialect, script = dialects.ALL[name], random_script(2)
    policy = dialect(**arguments)
    for cut, state in enumerate(play(policy, script)[:-1]):
        again = original(**arguments)
        again.load(dialect.dump_and_tell(state, policy)[0])
        assert again.walk(script[cut:]) == walked(policy, script[cut:], state)


def settings_of(policy: Policy[Any]) -> dict[str, Any]:
    """Return all settings but the first scale, which no checkpoint has."""
    return {**policy.get_config(), "init_scale": None}


# The systems that were recorded

RECORDED = json.loads(
    (Path(__file__).parents[1] / "recorded" / "checkpoints.json").read_text(encoding="utf-8")
)
SCRIPT = RECORDED["script"]

each_recording = pytest.mark.parametrize(
    "recording", RECORDED["recordings"], ids=lambda recording: recording["dialect"]
)


def recall(changes: list[list[float]], steps: int) -> list[float]:
    """Return all scales of a recording."""
    scales: list[float] = []
    for step in range(steps + 1):
        scales.append(dict(changes).get(step, scales[-1] if scales else None))
    return scales


@each_recording
def test_what_was_recorded_goes_on_as_it_was_recorded(recording: dict[str, Any]) -> None:
    dialect = dialects.ALL[recording["dialect"]]
    rest, scales = dialect(**recording["arguments"]), recall(recording["changes"], len(SCRIPT))
    for cut, (saved, changes) in enumerate(zip(recording["saved"], recording["resumed"], strict=True)):
        policy, state = dialect.load_policy(saved, rest), dialect.load(saved, rest)
        resumed = scales[cut:] if changes is None else recall(changes, len(SCRIPT) - cut)
        assert settings_of(policy) == settings_of(rest)
        assert walked(policy, SCRIPT[cut:], state) == (resumed, None)


@each_recording
def test_we_save_what_the_original_was_given_and_went_on_with(recording: dict[str, Any]) -> None:
    dialect = dialects.ALL[recording["dialect"]]
    policy = dialect(**recording["arguments"])
    for state, saved, otherwise in zip(
        play(policy, SCRIPT), recording["saved"], recording["loaded"], strict=True
    ):
        assert dialect.dump_and_tell(state, policy)[0] == {**saved, **otherwise}


def test_only_fairseq_goes_on_otherwise_than_it_would_have() -> None:
    others = {each["dialect"] for each in RECORDED["recordings"] if any(each["resumed"])}
    assert others == {"FAIRSEQ"}


# All formats

KNOWN = sorted(name for name, dialect in dialects.ALL.items() if dialect.format)
each_format = pytest.mark.parametrize("name", KNOWN)
COUNTING = [name for name in KNOWN if name != "FAIRSEQ"]


@each_format
@given(script=scripts)
def test_what_is_saved_is_loaded(name: str, script: str) -> None:
    dialect = dialects.ALL[name]
    small = {"TORCH": {"init_scale": 2.0**70}, "KERAS": {"initial_scale": 2.0**70}}  # else it may fall to 0
    policy = dialect(**small.get(name, {}))
    for state in play(policy, script):
        saved, lost = dialect.dump_and_tell(state, policy)
        again = dialect.load(saved)
        if name == "FAIRSEQ":
            assert again == dialects.FAIRSEQ.start()._replace(scale=state.scale)
            assert bool(lost) == any(state[1:])
        else:
            assert (again.scale, again.good, lost) == (state.scale, state.good, [])
            assert walked(policy, "0110" * 3, again) == walked(policy, "0110" * 3, state)


def test_every_other_dialect_says_that_its_checkpoints_are_not_known() -> None:
    for name in set(dialects.ALL) - set(KNOWN):
        for call in (dialects.ALL[name].load, dialects.ALL[name].load_policy, dialects.ALL[name].dump):
            with pytest.raises(CheckpointError, match="is not known to preamp"):
                call({"scale": 1.0})


def test_the_formats_that_were_asked_for_are_known() -> None:
    assert {*KNOWN} == {
        *["TORCH", "DEEPSPEED", "DEEPSPEED_016", "DEEPSPEED_FUSED", "MEGATRON", "APEX", "NEMO"],
        *["KERAS", "TF_KERAS", "FLAX", "JMP", "FAIRSEQ"],
    }


def frameworks() -> list[Any]:
    import jax.numpy as jnp
    import tensorflow as tf
    import torch

    return [
        *[int, float, np.float64, np.float32, np.asarray, torch.tensor, jnp.asarray, tf.constant],
        tf.Variable,
    ]


def test_numbers_may_be_scalars_of_any_framework() -> None:
    saved = dialects.MEGATRON.dump(State(1024.0, 5.0, 1.0))
    for scalar in (*frameworks(), lambda x: np.asarray([x])):
        assert dialects.MEGATRON.load({name: scalar(x) for name, x in saved.items()}) == (1024, 5, 1)


@each_format
@in_one_test(
    value=[np.inf, -np.inf, np.nan, 0.0, -1.0, None, "65536", b"1", True, [], {}, [1, 2], 10**400, 1j]
)
def test_a_scale_that_is_none_is_refused(name: str, value: Any) -> None:
    dialect = dialects.ALL[name]
    saved = dialect.dump(dialect.start())
    entries = saved.get("loss_scaler0", saved)
    (scale,) = [key for key, number in entries.items() if number == dialect.start().scale]
    with pytest.raises(CheckpointError, match=r"Write|is not one number"):
        dialect.load({**entries, scale: value})


@each_format
def test_what_lacks_an_entry_or_is_something_else_is_refused(name: str) -> None:
    dialect = dialects.ALL[name]
    saved = dialect.dump(dialect.start())
    entries = saved.get("loss_scaler0", saved)
    needed = {*dialect.known_format().entries}
    for missing in needed:
        with pytest.raises(CheckpointError, match=f"{dialect.system} saves, which has the entries"):
            dialect.load({key: value for key, value in entries.items() if key != missing})
    for other in ({}, [], None, "saved", 65536.0, object()):
        with pytest.raises(CheckpointError, match="saves, which has the entries"):
            dialect.load(other)


@pytest.mark.parametrize("value", [0.5, np.nan, np.inf, None, "1", True])
def test_a_count_that_is_none_is_refused(value: Any) -> None:
    for dialect, name in ((dialects.TORCH, "_growth_tracker"), (dialects.DEEPSPEED, "cur_iter")):
        with pytest.raises(CheckpointError, match=f"the saved {name}="):
            dialect.load({**dialect.dump(dialect.start()), name: value})


@pytest.mark.parametrize(
    ("dialect", "name", "value", "problem"),
    [
        (dialects.TORCH, "growth_interval", 0, "growth_interval=0"),
        (dialects.TORCH, "growth_factor", 0.5, "growth_factor=0.5"),
        (dialects.DEEPSPEED, "delayed_shift", 0, "hysteresis=0"),
        (dialects.DEEPSPEED, "scale_window", -3, "growth_interval=-3"),
        (dialects.DEEPSPEED, "consecutive_hysteresis", "no", "neither True nor False"),
        (dialects.JMP, "factor", 1, "growth_factor=1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(dialect: Any, name: str, value: Any, problem: str) -> None:
    saved = {**dialect.dump(dialect.start()), name: value}
    for load in (dialect.load, dialect.load_policy):
        with pytest.raises((PolicyError, CheckpointError), match=problem):
            load(saved)


# What is particular to a system


@pytest.mark.parametrize("arguments", [ZERO[0], {**ZERO[0], "hysteresis": 1}])
@pytest.mark.parametrize(
    ("name", "value"), [("scale_factor", 3.0), ("cur_iter", 0), ("cur_hysteresis", 5), ("cur_scale", 1000)]
)
def test_a_zero_scaler_goes_on_whatever_was_set_by_hand(arguments: Arguments, name: str, value: Any) -> None:
    original = originals.DeepSpeed(**arguments)
    original.walk("0001000")
    setattr(original.scaler, name, value)
    saved = original.save()
    policy, state = dialects.DEEPSPEED.load_policy(saved), dialects.DEEPSPEED.load(saved)
    again = originals.DeepSpeed(**ZERO[1])
    again.load(dialects.DEEPSPEED.dump(state, policy))
    script = "0001111000000000" * 2
    assert walked(policy, script, state) == original.walk(script) == again.walk(script)


def test_flaxs_object_has_the_settings_that_its_checkpoint_lacks() -> None:
    arguments = {"growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.25, "minimum_scale": None}
    scaler = originals.Flax(**arguments).scaler
    assert dialects.FLAX.load_policy(scaler) == dialects.FLAX(**arguments)
    assert dialects.FLAX.load(scaler) == dialects.FLAX.start()


def test_deepspeed_saves_static_scales() -> None:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    saved = vars(LossScaler(128))
    assert dialects.DEEPSPEED.load_policy(saved) == Static(128.0)
    assert dialects.DEEPSPEED.load({"loss_scaler": LossScaler(128)}) == State(128.0, 0.0, 0.0)
    assert dialects.DEEPSPEED.dump(State(128.0, 7.0, 0.0), Static(128.0)) == saved
    stage_0 = dialects.DEEPSPEED_FUSED.dump(State(128.0, 7.0, 0.0), Static(128.0))
    assert dialects.DEEPSPEED_FUSED.load_policy(stage_0) == Static(128.0)
    for name in {*KNOWN} - {"DEEPSPEED", "DEEPSPEED_016", "DEEPSPEED_FUSED"}:
        with pytest.raises(PolicyError, match="not a rule that"):
            dialects.ALL[name].dump(State(128.0, 0.0, 0.0), Static(128.0))


def test_deepspeeds_floor_of_0_is_no_floor() -> None:
    scaler = originals.DeepSpeed(**{**ZERO[0], "min_scale": 0.0})
    policy = dialects.DEEPSPEED.load_policy(scaler.save())
    assert (policy.min_scale, policy.at_floor) == (None, "hold")  # type: ignore[attr-defined]
    assert dialects.DEEPSPEED.dump(policy.start(), policy)["min_scale"] == 0.0


def test_the_counts_of_our_own_scaler_come_along() -> None:
    import torch

    from preamp.torch import GradScaler

    scaler = GradScaler("cpu", policy=dialects.DEEPSPEED(hysteresis=3))
    optimizer = torch.optim.SGD([parameter := torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    for gradient in (0.0, np.inf, np.inf):
        parameter.grad = torch.full((1,), gradient)
        scaler.scale(torch.ones(1))
        scaler.step(optimizer)
        scaler.update()
    assert dialects.TORCH.load(scaler.state_dict()) == (2.0**16, 0.0, 2.0)


def test_the_hysteresis_that_we_keep_at_stage_0_comes_along() -> None:
    original = originals.DeepSpeedFused(**STAGE_0[0])
    saved = {**original.save(), "preamp": {"delayed_shift": 3, "cur_hysteresis": 2}}
    assert dialects.DEEPSPEED_FUSED.load(saved) == State(2.0**16, 0.0, 1.0)
    assert dialects.DEEPSPEED_FUSED.load_policy(saved).hysteresis == 3  # type: ignore[attr-defined]


def test_a_state_of_any_framework_is_saved() -> None:
    for scalar in frameworks():
        state = State(*map(scalar, (1024, 5, 0)))
        saved = dialects.TORCH.dump(state)
        assert (saved["scale"], saved["_growth_tracker"]) == (1024.0, 5)
        assert {type(value) for value in saved.values()} == {float, int}


def test_apex_has_a_scale_for_every_loss() -> None:
    one, other = {"loss_scale": 1024.0, "unskipped": 7}, {"loss_scale": 2.0, "unskipped": 1}
    assert dialects.APEX.load(OrderedDict(loss_scaler0=one)) == State(1024.0, 7.0, 0.0)
    assert dialects.APEX.load({"loss_scaler0": one, "loss_scaler1": dict(one)}) == State(1024.0, 7.0, 0.0)
    assert dialects.APEX.load(other) == State(2.0, 1.0, 0.0)
    with pytest.raises(CheckpointError, match=r"2 losses have scales that differ.* saved\['loss_scaler0'\]"):
        dialects.APEX.load({"loss_scaler0": one, "loss_scaler1": other})


# From one system to another


@pytest.mark.parametrize("left", COUNTING)
@pytest.mark.parametrize("right", ["TORCH", "DEEPSPEED", "DEEPSPEED_FUSED", "JMP", "KERAS"])
def test_a_conversion_keeps_the_step_of_the_next_growth(left: str, right: str) -> None:
    policy, there = dialects.ALL[left].policy, dialects.ALL[right]
    for clean in (1, 2, 500, 999):
        state = policy.start()._replace(scale=1024.0, good=float(clean))
        saved, _ = there.dump_and_tell(state, policy)
        rest = there.policy
        if right == "KERAS":
            rest = dialects.KERAS(dynamic_growth_steps=saved["dynamic_growth_steps"])
        moved = [
            next(step for step, scale in enumerate(walked(rule, "0" * 2100, start)[0]) if scale != 1024.0)
            for rule, start in ((policy, state), (there.load_policy(saved, rest), there.load(saved, rest)))
        ]
        assert moved[0] == moved[1]


def lost(dialect: Any, state: Any, policy: Any) -> str:
    """Return the warning's words."""
    with pytest.warns(LossyConversion) as caught:
        dialect.dump(state, policy)
    assert [warning.filename for warning in caught] == [__file__]
    return str(caught[0].message)


def test_what_is_lost_is_named() -> None:
    said = lost(dialects.TORCH, State(1024.0, 5.0, 1.0), dialects.DEEPSPEED)
    assert "hysteresis=2 (becomes 1), min_scale=1.0 (becomes None), at_floor='raise' (becomes 'hold')" in said
    assert "good" not in said
    said = lost(dialects.FAIRSEQ, TolerantState(1024.0, 5.0, 1.0, 9.0), None)
    assert "clean steps=5 (becomes 0), overflows=1 (becomes 0), steps=9 (becomes 0)" in said
    said = lost(dialects.FLAX, State(1024.0, 5.0, 1.0), dialects.TORCH(growth_interval=100))
    assert "growth_interval=100 (becomes 2001)" in said
    said = lost(dialects.DEEPSPEED, State(1024.0, 5.0, 1.0), dialects.TORCH(backoff_factor=0.25))
    assert "backoff_factor=0.25 (becomes 0.5)" in said
    assert dialects.DEEPSPEED.dump_and_tell(State(1024.0, 5.0, 1.0), dialects.TORCH)[0]["cur_iter"] == 6
    said = lost(dialects.DEEPSPEED, State(1024.0, 5.0, 1.0), dialects.TORCH)
    assert "growth_delay=0 (becomes 1: after an overflow the scale grows 1 clean step later)" in said
    said = lost(dialects.TORCH, State(1024.0, 5.0, 1.0), dialects.FLAX)
    assert "min_scale=1.2e-38 (becomes None), at_ceiling='clamp' (becomes 'refuse')" in said
    said = lost(dialects.TORCH, TolerantState(1024.0, 5.0, 1.0, 9.0), dialects.FAIRSEQ(tolerance=0.25))
    assert "tolerance=0.25 (becomes 0.0)" in said


def test_nothing_is_said_where_nothing_is_lost() -> None:
    assert dialects.TORCH.dump(State(1024.0, 5.0, 1.0), dialects.NEMO)["_growth_tracker"] == 5
    assert dialects.JMP.dump(State(1024.0, 5.0, 1.0), dialects.TORCH)["counter"] == 5
    assert dialects.MEGATRON.dump(State(1024.0, 5.0, 1.0), dialects.MEGATRON)["hysteresis_tracker"] == 1


def test_a_scale_beyond_the_systems_numbers_is_refused() -> None:
    for scale in (2.0**200, 2.0**-200, 0.0, np.inf):
        with pytest.raises(CheckpointError, match="no gradient would survive"):
            dialects.TORCH.dump(State(scale, 0.0, 0.0))
    assert dialects.DEEPSPEED.dump(State(2.0**200, 0.0, 0.0))["cur_scale"] == 2.0**200


def test_a_rule_that_the_system_does_not_have_is_refused() -> None:
    class Mine(Dynamic):
        pass

    saved = dialects.KERAS.dump(Mine().start(), Mine(max_scale=None, min_scale=None))
    assert saved["dynamic_growth_steps"] == 2000
    with pytest.raises(PolicyError, match=r"Write dialects\.TORCH instead"):
        dialects.TORCH.dump(State(8.0, 0.0, 0.0), Static(8.0))


@given(
    policy=dynamics(min_scale=None, at_floor="hold", bounds="moves", max_consecutive_overflows=None),
    script=scripts,
)
def test_overflows_left_are_those_until_the_scale_backs_off(policy: Dynamic, script: str) -> None:
    state = play(policy, script)[-1]._replace(scale=1.0)
    scales, _ = walked(policy, "1" * policy.hysteresis, state)
    assert policy.overflows_left(state) == next(step for step, scale in enumerate(scales) if scale < 1.0)
