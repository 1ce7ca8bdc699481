"""A guard's state that was saved beside a loss scale: converted where the target can hold it, else named."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from preamp import CheckpointError, Dynamic, LossyConversion, Reading, Static, dialects, guards
from preamp.cli.app import run
from preamp.guards.base import dump_state
from preamp.systems.convert import convert
from preamp.systems.dialects import ALL
from preamp.torch import GradScaler
from tests import originals

FORMATS = {name: dialect for name, dialect in ALL.items() if dialect.format is not None}
# What an adapter of ours saves in the format, and how many optimizers may have a guard's state in it.
HOLDING = {"TORCH": 9, "DEEPSPEED": 1, "DEEPSPEED_016": 1, "DEEPSPEED_FUSED": 1, "KERAS": 1, "TF_KERAS": 1}
RULES: dict[str, guards.Guard[Any]] = {
    "spike": guards.SpikeGuard(),
    "window": guards.OLMO(rolling_interval_length=6),
    "one number": guards.METASEQ(ewm_ratio_to_skip_batch=1.5),
}
NOT_FINITE = (1.0, 2.0, 3.0, math.nan, 2.0)


def state_of(guard: guards.Guard[Any], losses: tuple[float, ...] = (2.0, 1.9, 2.2, 2.1)) -> dict[str, Any]:
    state = guard.start()
    for loss in losses:
        state = guard.advance(state, Reading(True, loss=loss, grad_norm=loss / 2.0))
    return dump_state(state)


def entries(name: str, states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what our adapter of a system saves, with a guard's states."""
    dialect = FORMATS[name]
    saved = dialect.dump(dialect.start())
    made = {
        "TORCH": lambda: {**saved, "preamp_state": {"guard": states, "steps": 4}},
        "DEEPSPEED": lambda: {**saved, "preamp_guard": states[0]},
        "DEEPSPEED_FUSED": lambda: {
            **saved,
            "preamp": {"delayed_shift": 1, "cur_hysteresis": 1, "preamp_guard": states[0]},
        },
        "KERAS": lambda: {**saved, **variables(states[0])},
    }
    made |= {"DEEPSPEED_016": made["DEEPSPEED"], "TF_KERAS": made["KERAS"]}
    return made[name]()


def variables(state: dict[str, Any], name: str = "guard") -> dict[str, Any]:
    named: dict[str, Any] = {}
    for inner, part in state.items():
        more = variables(part, f"{name}.{inner}") if isinstance(part, dict) else {f"{name}.{inner}": part}
        named |= more
    return named


def line_of(capsys: pytest.CaptureFixture[str], source: Path, origin: str, out: Path, target: str) -> str:
    """Run the command; return the line that it prints."""
    capsys.readouterr()
    names = [name.lower().replace("_", "-") for name in (origin, target)]
    assert run(["convert", str(source), str(out), "--from", names[0], "--to", names[1]]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    return printed


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("origin", HOLDING)
def test_it_is_converted_or_named(origin: str, target: str, tmp_path: Path) -> None:
    for number, guard in enumerate(RULES.values()):
        for losses in ((2.0, 1.9, 2.2, 2.1), NOT_FINITE):
            state = state_of(guard, losses)
            source, out = tmp_path / f"{number}{losses[1]}.json", tmp_path / f"{number}{losses[1]}.out.json"
            source.write_text(json.dumps({"part": entries(origin, [state])}))
            done = convert(source, FORMATS[origin], out, FORMATS[target])
            named = "the guard's state (only preamp saves this)"
            if target not in HOLDING:
                assert (done.guards, done.lost.count(named)) == (0, 1)
                continue
            assert done.guards == 1
            assert not any("guard" in lost for lost in done.lost)
            there = json.loads(out.read_text())
            wanted = entries(target, [state])
            assert repr(guard_of(there)) == repr(guard_of(wanted))
            back = tmp_path / f"{number}{losses[1]}.back.json"
            convert(out, FORMATS[target], back, FORMATS[origin])
            assert repr(guard_of(json.loads(back.read_text()))) == repr(guard_of(entries(origin, [state])))


def guard_of(saved: dict[str, Any]) -> Any:
    """Return the part of what was saved that a guard is restored from."""
    named = {name: value for name, value in saved.items() if name.startswith("guard.")}
    of_torch = saved.get("preamp_state", {}).get("guard")
    return of_torch or saved.get("preamp_guard") or saved.get("preamp", {}).get("preamp_guard") or named


@pytest.mark.parametrize("target", FORMATS)
def test_states_for_several_optimizers_stay_together(target: str, tmp_path: Path) -> None:
    states = [state_of(RULES["spike"]), state_of(RULES["spike"], (5.0, 5.1))]
    (tmp_path / "in.json").write_text(json.dumps(entries("TORCH", states)))
    done = convert(tmp_path / "in.json", dialects.TORCH, tmp_path / "out.json", FORMATS[target])
    if HOLDING.get(target, 0) > 1:
        assert done.guards == 2
        assert guard_of(json.loads((tmp_path / "out.json").read_text())) == states
    else:
        assert done.guards == 0
        assert "the guard's state for 2 optimizers (only preamp saves this)" in done.lost


def trained(guard: guards.Guard[Any], steps: int = 20) -> tuple[GradScaler, Any]:
    """Return a scaler that has trained, and a function that trains it for one step with some loss."""
    scaler = GradScaler("cpu", init_scale=4.0, guard=guard)
    return scaler, stepper(scaler, steps)


def stepper(scaler: GradScaler, steps: int = 0) -> Any:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def step(loss: float) -> str | None:
        scaler.scale(weight.sum() * loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.last_step is not None
        return scaler.last_step.reason

    for number in range(steps):
        assert step(2.0 + 0.01 * (number % 3)) is None
    return step


@pytest.mark.parametrize("suffix", [".pt", ".json", ".msgpack"])
@pytest.mark.parametrize("through", [name for name in HOLDING if name != "TORCH"])
def test_a_guard_of_a_scaler_resumes_after_a_conversion_and_back(
    through: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = guards.SpikeGuard()
    scaler, _ = trained(guard)
    torch.save({"scaler": scaler.state_dict()}, tmp_path / "in.pt")
    there, back = tmp_path / f"there{suffix}", tmp_path / "back.pt"
    for line in (
        line_of(capsys, tmp_path / "in.pt", "TORCH", there, through),
        line_of(capsys, there, through, back, "TORCH"),
    ):
        assert ", the guard's state from" in line
        assert "guard's state (saved" not in line
    saved = torch.load(back)
    assert saved["preamp_state"]["guard"] == list(scaler.state_dict()["preamp_state"]["guard"])
    for state_dict, reason in ((saved, "spike"), ({**saved, "preamp_state": {}}, None)):
        again = GradScaler("cpu", guard=guard)
        again.load_state_dict(state_dict)
        assert stepper(again)(20.0) == reason  # without the state, the guard knows of no step


def test_deepspeeds_loss_scaler_keeps_what_attach_put_into_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = state_of(guards.SpikeGuard())
    for name, original in (
        (
            "DEEPSPEED",
            originals.DeepSpeed(
                init_scale=2.0**16,
                scale_window=3,
                min_scale=1.0,
                hysteresis=2,
                consecutive_hysteresis=False,
            ),
        ),
        ("DEEPSPEED_FUSED", originals.DeepSpeedFused(init_scale=2.0**16, scale_window=3, min_scale=1.0)),
    ):
        saved = original.save()
        if name == "DEEPSPEED":
            saved["loss_scaler"].preamp_guard = state
        else:
            saved["preamp"] = {"preamp_guard": state}
        torch.save({"optimizer_state_dict": saved}, source := tmp_path / f"{name}.pt")
        for target, suffix in (("DEEPSPEED", ".json"), ("DEEPSPEED_FUSED", ".pt"), ("TORCH", ".json")):
            out = tmp_path / f"{name} to {target}{suffix}"
            assert ", the guard's state from" in line_of(capsys, source, name, out, target)
            there = torch.load(out) if suffix == ".pt" else json.loads(out.read_text())
            assert guard_of(there) in (state, [state])
        line = line_of(capsys, source, name, tmp_path / f"{name}.megatron.json", "MEGATRON")
        assert "Not carried: " in line
        assert "the guard's state (only preamp saves this)" in line


@pytest.mark.parametrize("guard", [RULES["spike"], RULES["window"]], ids=repr)
@pytest.mark.parametrize("name", ["in.keras", "in.weights.h5"])
def test_files_of_our_keras_optimizer(
    name: str, guard: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import keras

    from preamp.keras import LossScaleOptimizer

    def compiled() -> Any:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(LossScaleOptimizer(keras.optimizers.SGD(), guard=guard), "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    model = compiled()
    model.fit(np.ones((12, 1)), np.ones((12, 1)), batch_size=4, verbose=0)
    getattr(model, "save" if name == "in.keras" else "save_weights")(tmp_path / name)
    held = {v.name: np.asarray(v).tolist() for v in model.optimizer.variables if v.name.startswith("guard.")}
    assert len(held) > 2

    line = line_of(capsys, tmp_path / name, "KERAS", tmp_path / "torch.json", "TORCH")
    assert ", the guard's state from optimizer of" in line
    scaler = GradScaler("cpu", guard=guard)
    scaler.load_state_dict(json.loads((tmp_path / "torch.json").read_text()))
    [state] = scaler.state_dict()["preamp_state"]["guard"]
    assert variables(state) == held

    line_of(capsys, tmp_path / "torch.json", "TORCH", tmp_path / "back.json", "KERAS")
    again = compiled().optimizer
    again.load_own_variables(json.loads((tmp_path / "back.json").read_text()))
    assert {v.name: np.asarray(v).tolist() for v in again.variables if v.name in held} == held


@pytest.mark.parametrize("guard", [RULES["spike"], RULES["window"]], ids=repr)
def test_tensorflows_checkpoints_of_our_optimizer(
    guard: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import tensorflow as tf
    import tf_keras

    from preamp.tensorflow import LossScaleOptimizer

    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(1,))])
    model.compile(LossScaleOptimizer(tf_keras.optimizers.SGD(), guard=guard), "mse")
    model.fit(np.ones((12, 1)), np.ones((12, 1)), batch_size=4, verbose=0)
    source = tf.train.Checkpoint(optimizer=model.optimizer).write(str(tmp_path / "in"))
    line = line_of(capsys, Path(source), "TF_KERAS", tmp_path / "torch.json", "TORCH")
    assert ", the guard's state from optimizer.loss_scale of" in line
    scaler = GradScaler("cpu", guard=guard)
    scaler.load_state_dict(json.loads((tmp_path / "torch.json").read_text()))
    [state] = scaler.state_dict()["preamp_state"]["guard"]
    numbers = model.optimizer._loss_scale.numbers()
    assert variables(state) == {name: value for name, value in numbers.items() if name.startswith("guard.")}


def test_a_guard_that_has_judged_nothing_has_no_state_to_lose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(GradScaler("cpu", guard=guards.SpikeGuard()).state_dict(), tmp_path / "in.pt")
    line = line_of(capsys, tmp_path / "in.pt", "TORCH", tmp_path / "out.json", "JMP")
    assert "Nothing was lost." in line
    assert "guard's state" not in line


def test_guards_that_differ_are_not_one_state(tmp_path: Path) -> None:
    saved = [entries("DEEPSPEED", [state_of(RULES["window"], losses)]) for losses in ((1.0, 2.0), (3.0,))]
    torch.save({"a": saved[0], "b": saved[1]}, tmp_path / "two.pt")
    with pytest.raises(CheckpointError, match=r"differ, at a .*, b "):
        convert(tmp_path / "two.pt", dialects.DEEPSPEED, tmp_path / "out.pt", dialects.TORCH)
    same = entries("DEEPSPEED", [state_of(RULES["window"], NOT_FINITE)])  # NaN is not equal to itself
    torch.save({"a": same, "b": pickle.loads(pickle.dumps(same))}, tmp_path / "copies.pt")
    done = convert(tmp_path / "copies.pt", dialects.DEEPSPEED, tmp_path / "out.pt", dialects.TORCH)
    assert done.equal == ("b",)


@pytest.mark.parametrize(
    ("origin", "changes", "said"),
    [
        ("TORCH", {"preamp_state": {"guard": 3.0}}, r"guard=3\.0 is not a list of states"),
        ("TORCH", {"preamp_state": {"guard": [3.0]}}, r"3\.0 is not a guard's state"),
        ("DEEPSPEED", {"preamp_guard": {"loss": {"level": "high"}}}, "level='high' is not one number"),
        ("DEEPSPEED", {"preamp_guard": {"values": [1.0, [2.0]]}}, r"values=\[2\.0\] is not one number"),
        ("DEEPSPEED_FUSED", {"preamp": {"preamp_guard": "all"}}, "'all' is not a guard's state"),
        ("KERAS", {"guard.loss": 1.0, "guard.loss.level": 2.0}, "guard.loss.level is inside a number"),
    ],
)
def test_a_broken_state_is_an_error(origin: str, changes: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text(
        json.dumps({**FORMATS[origin].dump(FORMATS[origin].start()), **changes})
    )
    with pytest.raises(CheckpointError, match=said):
        convert(tmp_path / "in.json", FORMATS[origin], tmp_path / "out.json", dialects.TORCH)
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("origin", HOLDING)
def test_a_dialect_that_leaves_it_out_warns(origin: str) -> None:
    dialect = FORMATS[origin]
    with pytest.warns(LossyConversion, match=rf"a state of dialects\.{origin} has the loss scale alone"):
        state = dialect.load(entries(origin, [state_of(RULES["spike"])]))
    assert state.scale == dialect.start().scale


@pytest.mark.parametrize(
    ("config", "more"),
    [({"fp16": {"enabled": True}}, {}), ({"bf16": {"enabled": True}}, {}), ({}, {})],
    ids=["float16", "bfloat16", "float32"],
)
def test_folders_of_preamp_deepspeed_are_of_pytorchs_format(
    config: Any, more: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from preamp.deepspeed import initialize

    for guard in (None, guards.SpikeGuard()):
        model, folder = torch.nn.Linear(2, 1), tmp_path / repr(guard)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = initialize(model=model, optimizer=optimizer, config=config, guard=guard)
        x = torch.ones(1, 2, dtype=model.weight.dtype)
        for _ in range(2):
            engine.backward(engine(x).float().mean() / 1024.0)
            engine.step()
        engine.save_checkpoint(folder)
        capsys.readouterr()
        out = tmp_path / f"{guard}.json"
        for origin in ("deepspeed", "deepspeed-fused"):
            assert run(["convert", str(folder), str(out), "--from", origin, "--to", "torch"]) == 2
            said = capsys.readouterr().err
            assert str(folder) in said
            assert "preamp.deepspeed saved it" in said
            assert ("Write --from torch." in said) == (bool(config) or guard is not None)
        if not config and guard is None:
            assert "in a training without a loss scale and without a guard" in said
            continue
        line = line_of(capsys, folder, "TORCH", out, "TORCH")
        assert (", the guard's state from optimizer.loss_scale_optimizer.scaler" in line) == bool(guard)
        assert "Nothing was lost." in line


def test_states_of_preamp_jax_are_refused_with_what_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import jax.numpy as jnp
    import optax
    from flax import serialization

    from preamp.jax import loss_scaled

    policy = dialects.TORCH(init_scale=64.0)
    opt_state = loss_scaled(optax.sgd(0.1), policy, guard=guards.SpikeGuard()).init({"w": jnp.ones(2)})
    (tmp_path / "in.msgpack").write_bytes(serialization.to_bytes({"opt_state": opt_state}))
    for origin in ("flax", "torch"):
        names = [str(tmp_path / name) for name in ("in.msgpack", "out.json")]
        assert run(["convert", *names, "--from", origin, "--to", "torch"]) == 2
        said = capsys.readouterr().err
        assert "in.msgpack holds nothing that" in said
        assert "preamp.jax saved it" in said
        assert "dialects.TORCH.dump(opt_state.policy_state, policy)" in said
    assert dialects.TORCH.dump(opt_state.policy_state, policy)["scale"] == 64.0


def test_policies_of_deepspeed_without_the_counts_of_hysteresis_are_read() -> None:
    saved = entries("DEEPSPEED_FUSED", [state_of(RULES["spike"])])
    saved["preamp"] = {"preamp_guard": saved["preamp"]["preamp_guard"]}  # as converted from another system
    assert dialects.DEEPSPEED_FUSED.load_policy(saved) == dialects.DEEPSPEED_FUSED.policy
    assert isinstance(dialects.DEEPSPEED_FUSED.policy, Dynamic)
    constant = {**entries("DEEPSPEED", [state_of(RULES["spike"])]), "dynamic": False}
    assert dialects.DEEPSPEED.load_policy(constant) == Static(2.0**16)
