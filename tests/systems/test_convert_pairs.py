"""Between any two formats: what is read back differs from what was written exactly by what was named."""

from __future__ import annotations

import json
import math
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from preamp import (
    CheckpointError,
    Dynamic,
    FloorSchedule,
    Headroom,
    LogMax,
    LossyConversion,
    PolicyError,
    Reading,
    ScaleExhausted,
    State,
    Static,
    dialects,
)
from preamp.checks import FLOAT32_MAX
from preamp.cli.app import run
from preamp.systems.convert import convert
from preamp.systems.dialects import ALL
from preamp.systems.formats import backoff_factor
from preamp.torch import GradScaler
from tests.combinations import in_one_test
from tests.strategies import COMPAT, replace_quietly

FORMATS = {name: dialect for name, dialect in ALL.items() if dialect.format is not None}
REMEMBERED = {
    "bad": 0.0,
    "lost": -3.0,
    "peaks": 7.0,
    "level": -11.25,
    "spread": 0.5,
    "gap": 0.0,
    "steps": 13.0,
}


def told(dialect: Any, saved: Any) -> dict[str, Any]:
    """Return all that decides how a system, and our adapter of it, goes on from what is saved."""
    policy, state = dialect.load_policy(saved), dialect.load_quietly(saved)
    remembered = {
        name: value
        for name, value in dialect.format.remembered(dialect.format.find(saved)).items()
        if name not in ("scale", "good", "bad") and value
    }
    if isinstance(policy, Static):
        return {"scale": policy.scale, **remembered}
    said = {
        "scale": state.scale,
        "growth_factor": policy.growth_factor,
        "backoff_factor": backoff_factor(policy),
        "growth_interval": policy.growth_interval,
        "growth_delay": policy.compat.growth_delay,
        "min_scale": policy.min_scale,
        "scale_dtype": policy.compat.scale_dtype,
        "at_floor": policy.at_floor,
        "raise_on_arrival": policy.compat.raise_on_arrival and policy.at_floor == "raise",
        "clean steps": max(
            state.good - policy.compat.growth_delay, 0
        ),  # the clean steps that count towards a growth
        "tolerance": getattr(policy, "tolerance", 0.0),
        "max_consecutive_overflows": getattr(policy, "max_consecutive_overflows", None),
        "hysteresis": getattr(policy, "hysteresis", 1),
        "max_scale": policy.max_scale,
        **remembered,
    }
    if policy.max_scale is not None:
        said["at_ceiling"] = policy.compat.at_ceiling
    if isinstance(policy, Dynamic) and policy.hysteresis > 1:
        said["overflows_left"] = policy.overflows_left(state)
        said["hysteresis_reset"] = policy.hysteresis_reset
    return said


def trajectory(policy: Any, state: Any, script: list[bool]) -> list[Any]:
    """Return the scale after each step, and whether it was skipped, up to where the policy gives up."""
    gone: list[Any] = []
    for overflows in script:
        try:
            state = policy.step(state, Reading(not overflows))
        except ScaleExhausted:
            return [*gone, "gives up"]
        gone.append((repr(state.scale), overflows))  # which finds NaN equal to NaN
    return gone


def files_of(name: str, dialect: Any) -> list[dict[str, Any]]:
    """Return what this system may have saved: its own, and what our adapter adds."""
    draw = random.Random(name)
    own = dialect.policy
    saved = []
    with warnings.catch_warnings(action="ignore", category=LossyConversion):
        for good in (0.0, 1.0, float(draw.randint(2, 30))):
            state = own.start()._replace(scale=2.0 ** draw.randint(4, 20), good=good)
            saved.append(dialect.dump(state))
        for policy in (Dynamic(hysteresis=3, growth_interval=77), Dynamic(min_scale=2.0**5), Static(2.0**9)):
            state = policy.start()
            if isinstance(policy, Dynamic):
                state = state._replace(scale=2.0**12, good=5.0, bad=float(policy.hysteresis > 1))
            try:
                saved.append(dialect.dump(state, policy))
            except PolicyError:  # a system without scales that stay
                assert isinstance(policy, Static)
    if dialect.format.with_remembered(saved[0], REMEMBERED) is not None:
        saved.append(dialect.format.with_remembered(saved[1], REMEMBERED))
        saved.append(dialect.format.with_remembered(saved[1], {"bad": 0.0, "steps": 0.0}))
    return saved


@pytest.mark.parametrize("origin", FORMATS)
def test_what_is_read_back_differs_by_what_was_named(origin: str, tmp_path: Path) -> None:
    refused = 0
    for number, saved in enumerate(files_of(origin, FORMATS[origin])):
        source = tmp_path / f"{number}.json"
        source.write_text(json.dumps({"epoch": 3, "part": saved}))
        for target in FORMATS:
            out = tmp_path / f"{number}.{target}.json"
            try:
                done = convert(source, FORMATS[origin], out, FORMATS[target])
            except PolicyError:
                assert isinstance(FORMATS[origin].load_policy(saved), Static)
                refused += 1
                continue
            there = json.loads(out.read_text())
            before, after = told(FORMATS[origin], saved), told(FORMATS[target], there)
            differing = {name for name in before if before[name] != after.get(name)}
            if "at_ceiling" not in after:  # without a ceiling, which is named
                differing.discard("at_ceiling")
            ceilings = {before.get("max_scale"), after.get("max_scale")}
            if ceilings == {None, FLOAT32_MAX} and "scale_dtype" in differing:  # which says the same
                differing.discard("max_scale")
            named = {one.partition("=")[0] for one in done.lost} - {"overflows"}
            # Two ways to say how many overflows a backoff takes: where it takes one, none can be missing.
            free = {"overflows_left", "hysteresis_reset"}
            assert differing - free == named - free, (target, done.lost, before, after)
    assert refused < len(FORMATS)


# Where nothing is named, nothing differs

SETTINGS: dict[str, list[Any]] = {
    "growth_factor": [2.0, 3.0, 1.1],
    "backoff_factor": [0.5, 0.25, 1 / 3],
    "backoff_divisor": [None, 2.0, 3.0],
    "growth_delay": [0, 1, 2],
    "min_scale": [None, 2.0**-126, 1.0, 0.1],
    "max_scale": [None, 2.0**24, 1e5, FLOAT32_MAX],
    "at_floor": ["hold", "raise"],
    "raise_on_arrival": [False, True],
    "at_ceiling": ["clamp", "refuse"],
    "bounds": ["strict", "moves", "always"],
    "scale_dtype": ["float32", "float64"],
    "factor_dtype": ["float32", "float64"],
    "hysteresis": [1, 2, 3],
    "hysteresis_reset": [("clean",), ("growth",), ("clean", "backoff"), ("growth", "backoff"), ()],
    "max_consecutive_overflows": [None, 2],
    "tolerance": [0.0, 0.25, 0.5],
}


def near(draw: random.Random, dialect: Any) -> tuple[Any, Any]:
    """Draw a rule that differs from a system's in few settings, if in any, and a state of it."""
    names = [name for name in SETTINGS if name in COMPAT or hasattr(dialect.policy, name)]
    while True:
        settings = {name: draw.choice(SETTINGS[name]) for name in names if draw.random() < 0.1}
        try:
            policy = replace_quietly(dialect.policy, growth_interval=draw.randint(1, 5), **settings)
            break
        except PolicyError:  # such as a floor above the ceiling
            continue
    scale = draw.choice([2.0 ** draw.randint(-3, 20), 2.0 ** draw.choice([-140, -120, 126, 127]), 1000.1])
    good, bad = draw.randrange(policy.growth_interval + policy.compat.growth_delay), draw.randint(0, 3)
    state = policy.start()._replace(scale=scale, good=float(good), bad=float(bad))
    return policy, state._replace(age=bad + 2.0) if hasattr(state, "age") else state


def scripts_for(draw: random.Random, policy: Any) -> list[list[bool]]:
    """Draw where steps overflow over three growth intervals, and in a row down to the end of the numbers."""
    steps = 3 * (policy.growth_interval + policy.compat.growth_delay)
    often = [[draw.random() < rate for _ in range(steps)] for rate in (0.0, 1 / steps, 0.3, 0.7)]
    if policy.growth_interval > 5:  # that of a system which does not save it, in the thousands
        return often[:2]
    return [*often, [True] * draw.choice([3, 9, 200]) + [False] * steps]


@pytest.mark.filterwarnings("ignore::preamp.InexactScale")
@pytest.mark.parametrize("origin", FORMATS)
def test_where_nothing_is_named_both_rules_move_the_scale_alike(origin: str) -> None:
    draw = random.Random(f"{origin} to all")
    differed, alike = set(), set()
    for _ in range(25):
        first = FORMATS[draw.choice([origin, *FORMATS])]
        try:
            saved, _ = FORMATS[origin].dump_and_tell(*reversed(near(draw, first)))
        except CheckpointError:  # such as a scale that float32 does not have
            continue
        policy, state = FORMATS[origin].load_policy(saved), FORMATS[origin].load_quietly(saved)
        for target, dialect in FORMATS.items():
            there, lost = dialect.dump_and_tell(state, policy)
            rule, moved = dialect.load_policy(there), dialect.load_quietly(there)
            for script in scripts_for(draw, policy):
                if len(script) > 999 and (lost or target in alike):
                    continue  # long, and tried already
                ours, theirs = trajectory(policy, state, script), trajectory(rule, moved, script)
                if ours != theirs:
                    differed.add(target)
                    assert lost, (target, policy, state, rule, moved)
            if not lost:
                alike.add(target)
    assert origin in alike
    assert differed or policy.growth_interval > 5  # else this compared nothing


@pytest.mark.parametrize("origin", FORMATS)
@in_one_test(target=FORMATS)
def test_a_first_clean_step_that_only_one_rule_counts_is_always_named(origin: str, target: str) -> None:
    policy = FORMATS[origin].policy
    delays = [FORMATS[name].policy.compat.growth_delay for name in (origin, target)]
    for good in (0.0, 1.0, 2.0, 9.0):
        _, lost = FORMATS[target].dump_and_tell(policy.start()._replace(scale=64.0, good=good), policy)
        named = [one for one in lost if one.startswith("growth_delay=")]
        assert len(named) == (delays[0] != delays[1])
        if named:
            when = "later" if delays[1] > delays[0] else "sooner"
            grows = f"after an overflow the scale grows 1 clean step {when}"
            assert named == [f"growth_delay={delays[0]} (becomes {delays[1]}: {grows})"]


@pytest.mark.parametrize("through", ["deepspeed", "deepspeed-fused"])
@pytest.mark.parametrize("good", [0, 1, 7])
def test_to_deepspeed_and_back_says_and_gives_the_same(
    good: int, through: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = {**dialects.TORCH.dump(dialects.TORCH.start()), "_growth_tracker": good}
    (tmp_path / "0.json").write_text(json.dumps(saved))
    for number, (origin, target) in enumerate((("torch", through), (through, "torch"))):
        names = [str(tmp_path / f"{number + more}.json") for more in (0, 1)]
        assert run(["convert", *names, "--from", origin, "--to", target]) == 0
        assert f"carried scale 65536, clean steps {good}, overflows 0" in capsys.readouterr().out
    assert json.loads((tmp_path / "2.json").read_text()) == saved


def test_a_scale_that_is_rounded_is_named() -> None:
    with pytest.warns(LossyConversion, match=r"scale=1000\.1 \(becomes 1000\.0999755859375\)"):
        dialects.TORCH.dump(State(1000.1, 0.0, 0.0))


def test_what_float32_and_int32_do_not_hold_is_written_in_full_to_msgpack(tmp_path: Path) -> None:
    from flax import serialization

    saved = dialects.DEEPSPEED.dump(State(1000.1, 5.0, 0.0), dialects.DEEPSPEED(scale_window=2**40))
    (tmp_path / "in.json").write_text(json.dumps(saved))
    done = convert(tmp_path / "in.json", dialects.DEEPSPEED, tmp_path / "out.msgpack", dialects.DEEPSPEED)
    assert done.lost == []
    assert serialization.msgpack_restore((tmp_path / "out.msgpack").read_bytes()) == saved


# What our scaler adds


def headroom_checkpoint(path: Path) -> GradScaler:
    """Train a little and save; return the scaler."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = GradScaler("cpu", policy=Headroom())
    for factor in (1.0, 2.0, math.inf, 1.0, 3.0):
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.save({"scaler": scaler.state_dict()}, path)
    return scaler


def test_a_headroom_checkpoint_goes_on_in_another_scaler_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scaler = headroom_checkpoint(tmp_path / "in.pt")
    for name in ("out.pt", "out.json"):
        arguments = [
            "convert",
            str(tmp_path / "in.pt"),
            "--from",
            "torch",
            "--to",
            "torch",
            str(tmp_path / name),
        ]
        assert run(arguments) == 0
        assert "Nothing was lost." in capsys.readouterr().out
        saved = torch.load(tmp_path / name) if name == "out.pt" else json.loads((tmp_path / name).read_text())
        assert saved == scaler.state_dict()
        again = GradScaler("cpu", policy=Headroom())
        again.load_state_dict(saved)
        assert again.policy_state == scaler.policy_state
        torch.amp.GradScaler("cpu").load_state_dict(saved)  # which leaves out what it does not know


@pytest.mark.parametrize("target", ["deepspeed", "nemo", "keras", "fairseq"])
def test_what_a_headroom_checkpoint_loses_is_named(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scaler = headroom_checkpoint(tmp_path / "in.pt")
    arguments = [
        "convert",
        str(tmp_path / "in.pt"),
        "--from",
        "torch",
        "--to",
        target,
        str(tmp_path / "out.json"),
    ]
    assert run(arguments) == 0
    said = capsys.readouterr().out
    for name, value in scaler.policy_state._asdict().items():
        if name not in ("scale", "good", "bad") and value:
            assert f"{name}={value!r} (only preamp saves this)" in said
    assert "steps=5 (only preamp saves this)" in said


def test_two_scalers_that_remember_otherwise_are_not_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = headroom_checkpoint(tmp_path / "in.pt").state_dict()
    other = {**saved, "preamp_state": {**saved["preamp_state"], "level": 3.0}}
    torch.save({"a": saved, "b": other}, tmp_path / "two.pt")
    with pytest.raises(CheckpointError, match=r"differ, at a .*, b "):
        convert(tmp_path / "two.pt", dialects.TORCH, tmp_path / "out.pt", dialects.TORCH)
    later = {**saved, "preamp_state": {**saved["preamp_state"], "steps": 99}}
    torch.save({"a": saved, "b": later}, tmp_path / "copies.pt")
    convert(tmp_path / "copies.pt", dialects.TORCH, tmp_path / "out.pt", dialects.TORCH)


def test_a_broken_memory_is_an_error(tmp_path: Path) -> None:
    saved = headroom_checkpoint(tmp_path / "in.pt").state_dict()
    saved["preamp_state"]["level"] = "high"
    torch.save(saved, tmp_path / "broken.pt")
    with pytest.raises(CheckpointError, match="saved level='high' is not one number"):
        convert(tmp_path / "broken.pt", dialects.TORCH, tmp_path / "out.pt", dialects.TORCH)


def test_what_our_keras_optimizer_remembers_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import keras

    from preamp.keras import LossScaleOptimizer

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(keras.optimizers.Adam(), policy=Headroom()), "mse")
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "in.keras")
    assert (
        run(
            [
                "convert",
                str(tmp_path / "in.keras"),
                str(tmp_path / "out.json"),
                "--from",
                "keras",
                "--to",
                "torch",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "policy='Headroom' (only preamp saves this)" in said
    assert "spread=1.0 (only preamp saves this)" in said


# Dialects alone


def test_loading_what_a_dialect_has_no_place_for_warns(tmp_path: Path) -> None:
    saved = headroom_checkpoint(tmp_path / "in.pt").state_dict()
    with pytest.warns(
        LossyConversion, match=r"level=.* is left out. To continue with that policy, load it into"
    ):
        state = dialects.TORCH.load(saved)
    assert state.scale == saved["scale"]
    assert dialects.TORCH.load({**saved, "preamp_state": {"bad": 0.0, "steps": 9}}) == state


@pytest.mark.parametrize("policy", [FloorSchedule(floors=((0, 1.0), (9, 4.0))), LogMax()])
@pytest.mark.parametrize("dialect", FORMATS)
def test_a_rule_that_no_system_has_is_named_with_what_it_remembers(dialect: str, policy: Any) -> None:
    state = policy.start()
    extra = state._fields[-1]
    state = state._replace(**{extra: 6.0})
    with pytest.warns(LossyConversion, match=rf"policy={type(policy).__name__}\(.*{extra}=6\.0"):
        FORMATS[dialect].dump(state, policy)


def test_a_state_of_another_rule_is_named() -> None:
    with pytest.warns(LossyConversion, match=r"level=2\.0"):
        dialects.TORCH.dump(Headroom().start()._replace(level=2.0))
    assert dialects.TORCH.dump(State(8.0, 0.0, 0.0))["scale"] == 8.0
