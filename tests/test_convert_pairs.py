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
    State,
    Static,
    dialects,
)
from preamp.cli import run
from preamp.convert import convert
from preamp.dialects import ALL
from preamp.formats import backoff_factor
from preamp.torch import GradScaler

FORMATS = {name: dialect for name, dialect in ALL.items() if dialect.format is not None}
REMEMBERED = {
    "bad": 0.0,
    "lost": -3.0,
    "seen": 7.0,
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
    high, low = policy.max_scale or math.inf, policy.min_scale or 0.0
    said = {
        "scale": state.scale,
        "growth_factor": policy.growth_factor,
        "backoff_factor": backoff_factor(policy),
        "growth_interval": policy.growth_interval,
        "min_scale": low if low > 2.0**-126 else 0.0,
        "max_scale": high if high < 3e38 else math.inf,
        "at_floor": policy.at_floor,
        "good": state.good - policy.growth_delay,  # the clean steps that count towards a growth
        "tolerance": getattr(policy, "tolerance", 0.0),
        "max_consecutive_overflows": getattr(policy, "max_consecutive_overflows", None),
        "hysteresis": getattr(policy, "hysteresis", 1),
        **remembered,
    }
    if isinstance(policy, Dynamic) and policy.hysteresis > 1:
        said["overflows_left"] = policy.overflows_left(state)
        said["hysteresis_reset"] = policy.hysteresis_reset
    return said


def scales(dialect: Any, saved: Any, script: list[bool]) -> list[float]:
    policy, state = dialect.load_policy(saved), dialect.load_quietly(saved)
    gone = []
    for finite in script:
        state = policy.advance(state, Reading(finite))
        gone.append(state.scale)
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
    draw = random.Random(origin)
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
            named = {one.partition("=")[0] for one in done.lost} - {"bad"}
            # Two ways to say how many overflows a backoff takes: where it takes one, none can be missing.
            free = {"overflows_left", "hysteresis_reset"}
            assert differing - free == named - free, (target, done.lost, before, after)
            if not done.lost:
                for _ in range(3):
                    script = [draw.random() > 0.3 for _ in range(12)]
                    assert scales(FORMATS[origin], saved, script) == scales(FORMATS[target], there, script)
    assert refused < len(FORMATS)


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
            assert f"{name}={value!r} (saved by preamp)" in said
    assert "steps=5 (saved by preamp)" in said


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
    assert "policy='Headroom' (saved by preamp)" in said
    assert "spread=1.0 (saved by preamp)" in said


# Dialects alone


def test_loading_what_a_dialect_has_no_place_for_warns(tmp_path: Path) -> None:
    saved = headroom_checkpoint(tmp_path / "in.pt").state_dict()
    with pytest.warns(
        LossyConversion, match=r"level=.* is left out. To go on with that policy, load it into"
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
