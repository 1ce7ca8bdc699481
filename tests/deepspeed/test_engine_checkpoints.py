"""Saved engines: they go on bit for bit, are written whole or not at all, and execute nothing."""

from __future__ import annotations

import copy
import logging
import math
import pickle
import resource
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from preamp.deepspeed import Engine, initialize
from preamp.deepspeed.engine.checkpoint_files import STATES
from preamp.errors import CheckpointError, UsageError

WARMUP = {"type": "WarmupDecayLR", "params": {"total_num_steps": 12, "warmup_num_steps": 3}}
FLOAT16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}
CONFIGS = {"fp16": FLOAT16, "bf16": {"bf16": {"enabled": True}}, "float32": {}}


def made(config: dict[str, Any], *, seed: int = 0, width: int = 5, optimizer: str = "AdamW") -> Engine:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
    section = {"type": optimizer, "params": {"lr": 0.1}}
    return initialize(model=model, config={"optimizer": section, "scheduler": WARMUP, **config})[0]


def train(engine: Engine, begin: int, overflows: list[bool]) -> None:
    """Train on a batch that depends on the number of the micro-step alone."""
    dtype = engine.module[0].weight.dtype
    for number, overflow in enumerate(overflows, begin):
        random = torch.Generator().manual_seed(number)
        loss = engine(torch.randn(4, 3, generator=random).to(dtype)).float().square().mean()
        engine.backward(loss * (math.inf if overflow else 1.0))
        engine.step()


def state(engine: Engine) -> bytes:
    """Return all that there is to an engine, as bytes."""
    counters = engine.global_steps, engine.skipped_steps, engine.micro_steps, engine.global_samples
    parts = engine.module.state_dict(), engine.optimizer.state_dict(), engine.lr_scheduler.state_dict()
    tensors: list[bytes] = []

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value.detach().view(-1).view(torch.uint8).numpy().tobytes())
            return str(value.dtype)
        if isinstance(value, dict):
            return {str(name): plain(one) for name, one in value.items()}
        return [plain(one) for one in value] if isinstance(value, list | tuple) else value

    return repr((counters, engine.get_lr(), plain(list(parts)))).encode() + b"".join(tensors)


@pytest.mark.parametrize("precision", CONFIGS)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_training_goes_on_bit_for_bit_from_every_step(precision, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    steps = data.draw(st.integers(1, 2), label="gradient_accumulation_steps")
    config = {**CONFIGS[precision], "gradient_accumulation_steps": steps}
    overflows = data.draw(st.lists(st.booleans(), min_size=1, max_size=6), label="overflows")
    overflows = [overflow and precision != "float32" for overflow in overflows for _ in range(steps)]

    whole = made(config)
    for number in range(0, len(overflows), steps):
        whole.save_checkpoint(folder)
        train(whole, number, overflows[number : number + steps])
    for number in range(0, len(overflows), steps):
        resumed = made(config, seed=1)
        path, _ = resumed.load_checkpoint(folder, tag=f"global_step{number // steps}")
        assert path == str(folder / f"global_step{number // steps}" / STATES)
        train(resumed, number, overflows[number:])
        assert state(resumed) == state(whole)


def test_the_latest_checkpoint_and_what_the_client_put_into_it(tmp_path):
    engine = made(FLOAT16)
    train(engine, 0, [False])
    assert engine.save_checkpoint(tmp_path, client_state={"epoch": 3, "seen": torch.arange(2)}) is True
    train(engine, 1, [False])
    engine.save_checkpoint(tmp_path, tag=7, save_latest=False)
    assert (tmp_path / "latest").read_text() == "global_step1"
    other = made(FLOAT16, seed=1)
    _, client = other.load_checkpoint(tmp_path)
    assert (client["epoch"], client["seen"].tolist(), other.global_steps) == (3, [0, 1], 1)
    assert other.load_checkpoint(tmp_path, tag="7")[1] == {}
    assert state(other) == state(engine)


def test_without_a_latest_checkpoint_nothing_is_loaded(tmp_path, caplog):
    engine = made(FLOAT16)
    before = state(engine)
    assert engine.load_checkpoint(tmp_path) == (None, None)
    assert "there is no file" in caplog.text
    assert state(engine) == before


def test_parts_of_a_checkpoint(tmp_path):
    engine = made(FLOAT16)
    train(engine, 0, [False, True, True, False])
    engine.save_checkpoint(tmp_path)

    only = made(FLOAT16, seed=1)
    only.load_checkpoint(tmp_path, load_module_only=True)
    assert (only.global_steps, only.cur_scale) == (0, 2.0**8)
    assert torch.equal(only.module[0].weight, engine.module[0].weight)

    # Of the optimizer the loss scale alone: another optimizer goes on from the rounded weights.
    anew = made(FLOAT16, seed=1, optimizer="SGD")
    anew.load_checkpoint(tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert (anew.global_steps, anew.cur_scale, anew.lr_scheduler.last_epoch) == (4, engine.cur_scale, 0)
    assert engine.cur_scale == 2.0**7
    train(anew, 4, [False])
    assert torch.equal(anew.module[0].weight, engine.module[0].weight)  # the warm-up begins at 0


def test_another_precision_loads_the_weights_and_keeps_its_scale(tmp_path):
    engine = made(FLOAT16)
    train(engine, 0, [False, True, True])
    engine.save_checkpoint(tmp_path)
    other = made(CONFIGS["bf16"], seed=1)
    other.load_checkpoint(tmp_path)
    assert (other.cur_scale, other.global_steps) == (1.0, 3)
    masters = [group["params"][0] for group in engine.optimizer.param_groups]
    assert torch.equal(other.optimizer.param_groups[0]["params"][0], masters[0])

    unchecked = made({"bf16": {"enabled": True, "check_grad_overflow": False}})
    unchecked.load_checkpoint(tmp_path)
    unchecked.save_checkpoint(tmp_path, tag="without a scale")
    engine.load_checkpoint(tmp_path, tag="without a scale")
    assert engine.cur_scale == 2.0**7

    other.save_checkpoint(tmp_path, tag="skips only")  # at a scale of 1
    engine.load_checkpoint(tmp_path, tag="skips only")
    assert engine.cur_scale == 2.0**7


def test_a_training_can_be_made_longer(tmp_path):
    engine = made(FLOAT16)
    train(engine, 0, [False] * 12)
    assert engine.get_lr() == [pytest.approx(0.001 / 9)]
    engine.save_checkpoint(tmp_path)
    longer = {**WARMUP, "params": {**WARMUP["params"], "total_num_steps": 1000}}
    resumed = made({**FLOAT16, "scheduler": longer})
    resumed.load_checkpoint(tmp_path)
    train(resumed, 12, [False])
    assert resumed.get_lr() == [pytest.approx(0.001 * (1000 - 12) / (1000 - 3))]


def test_an_unfinished_update_begins_anew(tmp_path, caplog):
    config = {**FLOAT16, "gradient_accumulation_steps": 3}
    engine = made(config)
    train(engine, 0, [False] * 5)
    engine.save_checkpoint(tmp_path)
    assert "the gradients of 2 micro-steps are not saved" in caplog.text
    resumed = made(config, seed=1)
    train(resumed, 0, [False])  # forgotten
    resumed.load_checkpoint(tmp_path)
    assert resumed.micro_steps == 3
    train(resumed, 3, [False] * 3)
    train(engine, 5, [False])
    assert state(resumed) == state(engine)


def test_frozen_parameters_can_be_left_out(tmp_path):
    engine = made(FLOAT16)
    engine.module[0].requires_grad_(False)
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    saved = torch.load(tmp_path / "global_step0" / STATES, weights_only=True)
    assert list(saved["module"]) == ["2.weight", "2.bias"]
    with pytest.raises(CheckpointError, match=r"0.weight, 0.bias differ"):
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, load_module_strict=False)


def test_a_save_takes_the_previous_ones_place_in_one_move(tmp_path):
    """A file being replaced is not written to: wherever a save is killed, the old or the new one is whole."""
    engine = made(FLOAT16)
    for tag in ("first", "first", "second"):
        paths = [path for path in (tmp_path / "latest", tmp_path / "first" / STATES) if path.exists()]
        whole = [path.read_bytes() for path in paths]
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("rb")) for path in paths]
            train(engine, 0, [False])
            engine.save_checkpoint(tmp_path, tag=tag)
            assert [file.read() for file in files] == whole
        assert made(FLOAT16, seed=1).load_checkpoint(tmp_path)[0] == str(tmp_path / tag / STATES)


def test_a_full_disk_leaves_the_previous_one(tmp_path):
    engine = made(FLOAT16)
    engine.save_checkpoint(tmp_path, tag="same")
    here = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match="checkpoint 'same' was not written"):
            engine.save_checkpoint(tmp_path, tag="same", client_state={"large": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == here


def test_a_save_that_fails_says_so_and_leaves_the_previous_one(tmp_path):
    engine = made(FLOAT16)
    engine.save_checkpoint(tmp_path, tag="good")
    before = state(engine)
    (tmp_path / "bad").write_text("a file where the checkpoint's folder is to be")
    with pytest.raises(CheckpointError, match="checkpoint 'bad' was not written"):
        engine.save_checkpoint(tmp_path, tag="bad")
    assert (tmp_path / "latest").read_text() == "good"
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "bad",
        "good",
        "latest",
        STATES,
    ]
    assert state(engine) == before


class Executes:
    """A pickle that leaves a trace where it is executed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path):
    engine = made(FLOAT16)
    for client in ({"path": Executes(tmp_path / "executed")}, {"deep": [(lambda: 1,)]}):
        with pytest.raises(CheckpointError, match="client_state holds a value that cannot be loaded"):
            engine.save_checkpoint(tmp_path, client_state=client)
    engine.optimizer.param_groups[0]["lr"] = np.float64(0.1)
    with pytest.raises(CheckpointError, match=r"optimizer holds a value that cannot .*numpy"):
        engine.save_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_trusted_change_nothing_and_execute_nothing(tmp_path):
    engine = made(FLOAT16)
    train(engine, 0, [False])
    engine.save_checkpoint(tmp_path, tag="good")
    path = tmp_path / "good" / STATES
    good = path.read_bytes()
    executed = tmp_path / "executed"
    hostile = tmp_path / "hostile.pt"
    torch.save({"module": {"x": Executes(executed)}}, hostile)
    nothing = tmp_path / "nothing.pt"
    torch.save({"weights": 1}, nothing)
    bad = [good[: len(good) // 2], b"", b"text", hostile.read_bytes(), nothing.read_bytes()]
    bad.append(pickle.dumps(Executes(executed)))
    before = state(engine)
    for content in bad:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="Write tag= with another checkpoint"):
            engine.load_checkpoint(tmp_path)
    assert not executed.exists()
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*Write tag= with one of \['good'\]"):
        engine.load_checkpoint(tmp_path, tag="bad")
    assert state(engine) == before


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"width": 6}, r"was saved from another model: 0.weight, 0.bias, 2.weight differ"),
        (
            {"config": CONFIGS["float32"]},
            "does not fit: the checkpoint has master weights .*Or write load_optimizer_states=False",
        ),
        ({"optimizer": "SGD"}, "was saved with SGD, and this is AdamW. Write load_optimizer_states=False"),
        (
            {"config": {**FLOAT16, "scheduler": {"type": "StepLR", "params": {"step_size": 2}}}},
            "was saved without a WarmupDecayLR. Write load_lr_scheduler_states=False",
        ),
    ],
)
def test_another_model_is_refused_before_anything_is_changed(tmp_path, other, message):
    engine = made(**{"config": FLOAT16, **other})
    engine.save_checkpoint(tmp_path)
    here = made(FLOAT16, seed=1)
    train(here, 0, [False, False])
    before = copy.deepcopy(state(here))
    with pytest.raises(CheckpointError, match=message):
        here.load_checkpoint(tmp_path)
    assert state(here) == before


def altered(path: Path, *way: Any, value: Any) -> None:
    """Write another value into a saved state."""
    saved = torch.load(path, weights_only=True)
    *first, last = way
    part = saved
    for name in first:
        part = part[name]
    part[last] = value
    torch.save(saved, path)


@pytest.mark.parametrize(
    ("way", "value"),
    [
        (("optimizer", "loss_scale_optimizer", "scaler", "scale"), math.nan),
        (("optimizer", "loss_scale_optimizer", "masters"), []),
        (("optimizer", "loss_scale_optimizer"), {}),
        (("optimizer", "param_groups"), []),
        (("lr_scheduler",), "text"),
        (("global_steps",), "text"),
        (("skipped_steps",), -1),
    ],
)
def test_states_that_do_not_fit_change_nothing(tmp_path, way, value):
    engine = made(FLOAT16)
    train(engine, 0, [False])
    engine.save_checkpoint(tmp_path, tag="altered")
    altered(tmp_path / "altered" / STATES, *way, value=value)
    here = made(FLOAT16, seed=1)
    train(here, 0, [False, True, True])
    before = state(here)
    with pytest.raises(CheckpointError, match="altered"):
        here.load_checkpoint(tmp_path)
    assert state(here) == before


@pytest.mark.parametrize("tag", ["", "..", "latest", "a/b", "/preamp", "line\n"])
def test_a_tag_that_names_no_folder_is_refused(tmp_path, tag):
    with pytest.raises(UsageError, match=r"cannot name a checkpoint's folder .*Write tag='best'"):
        made(FLOAT16).save_checkpoint(tmp_path, tag=tag)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"\0", b"nowhere", b"x" * 5000])
def test_a_damaged_latest_is_one_clear_error(tmp_path, content):
    engine = made(FLOAT16)
    engine.save_checkpoint(tmp_path)
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match="Write tag="):
        engine.load_checkpoint(tmp_path)


def test_loading_says_nothing_of_what_is_well(tmp_path, caplog):
    engine = made(FLOAT16)
    with caplog.at_level(logging.DEBUG, "preamp.deepspeed"):
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
    assert caplog.records == []
