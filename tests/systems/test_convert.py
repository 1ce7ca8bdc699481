"""`preamp convert` on files as the systems themselves write them, and on files that nobody should open."""

from __future__ import annotations

import gzip
import inspect
import json
import math
import os
import pickle
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from preamp import Dynamic, dialects
from preamp.cli.app import run
from preamp.errors import LossyConversion
from preamp.systems.dialects import ALL
from preamp.torch import GradScaler
from tests import originals

SCRIPT = "0001000010000"
TARGET = {"scale": 4096.0, "growth_interval": 3, "_growth_tracker": 1}
FACTORS = {"growth_factor": 2.0, "backoff_factor": 0.5}


def converted(capsys: pytest.CaptureFixture[str], source: Path, origin: str, out: Path, target: str) -> str:
    """Run the command; return the one line that it prints."""
    capsys.readouterr()  # DeepSpeed talks when it is imported
    status = run(["convert", str(source), "--from", origin, "--to", target, str(out)])
    printed = capsys.readouterr()
    assert (status, printed.err) == (0, "")
    assert printed.out.count("\n") == 1
    return printed.out


def refused(capsys: pytest.CaptureFixture[str], source: Path, origin: str, out: Path, target: str) -> str:
    """Run the command on what it must refuse; return the one line of the error. Nothing is written."""
    capsys.readouterr()
    before = sorted(out.parent.iterdir())
    status = run(["convert", str(source), "--from", origin, "--to", target, str(out)])
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert printed.err.count("\n") == 1
    assert sorted(out.parent.iterdir()) == before
    return printed.err


# The files of each system


def training(**more: Any) -> dict[str, Any]:
    """Return a training checkpoint around what is in question."""
    model = torch.nn.Linear(2, 2)
    return {"model": model.state_dict(), "epoch": 3, "history": [1.0, {"loss": 2.0}], **more}


def save_torch(path: Path) -> tuple[Path, originals.Original]:
    original = originals.Torch(growth_interval=3)
    original.walk(SCRIPT)
    torch.save(training(amp={"scaler": original.save()}), path / "in.pt")
    return path / "in.pt", original


def save_zero(path: Path) -> tuple[Path, originals.Original]:
    """Write the folder that ZeRO's save_checkpoint writes."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    original = originals.DeepSpeed(
        init_scale=2.0**16,
        scale_window=3,
        min_scale=1.0,
        hysteresis=2,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=True,
    )
    original.walk(SCRIPT)
    optimizer = {**original.save(), "zero_stage": ZeroStageEnum.gradients, "partition_count": [1]}
    folder = path / "in" / "global_step13"
    folder.mkdir(parents=True)
    torch.save({"optimizer_state_dict": optimizer}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    torch.save({"module": {}, "optimizer": None}, folder / "mp_rank_00_model_states.pt")
    (path / "in" / "latest").write_text("global_step13")
    return path / "in", original


def save_stage_0(path: Path) -> tuple[Path, originals.Original]:
    original = originals.DeepSpeedFused(init_scale=2.0**16, scale_window=3, min_scale=1.0)
    original.walk(SCRIPT)
    folder = path / "in" / "best"
    folder.mkdir(parents=True)
    torch.save({"module": {}, "optimizer": original.save()}, folder / "mp_rank_00_model_states.pt")
    return folder, original


def save_flax(path: Path) -> tuple[Path, originals.Original]:
    from flax import serialization

    original = originals.Flax(growth_interval=3)
    original.walk(SCRIPT)
    params = {"kernel": np.zeros((2, 2)), "scale": np.ones(2)}  # as of a LayerNorm
    tree = {"params": params, "dynamic_scale": original.scaler, "step": 13}
    (path / "in.msgpack").write_bytes(serialization.to_bytes(tree))
    return path / "in.msgpack", original


def save_json(path: Path) -> tuple[Path, originals.Original]:
    original = originals.Jmp(period=3)
    original.walk(SCRIPT)
    entries = {name: np.asarray(value).item() for name, value in vars(original.scaler).items()}
    (path / "in.json").write_text(json.dumps([{"step": 13}, {"loss_scale": entries}]))
    return path / "in.json", original


def save_tf_keras(path: Path) -> tuple[Path, originals.Original]:
    import tensorflow as tf

    original = originals.TfKeras(dynamic_growth_steps=3)
    original.walk(SCRIPT)
    return Path(tf.train.Checkpoint(optimizer=original.optimizer).write(str(path / "in"))), original


def save_keras(path: Path) -> tuple[Path, originals.Original]:
    return _save_keras(path, "in.keras", "save")


def save_keras_weights(path: Path) -> tuple[Path, originals.Original]:
    return _save_keras(path, "in.weights.h5", "save_weights")


def _save_keras(path: Path, name: str, method: str) -> tuple[Path, originals.Original]:
    import keras

    original = originals.Keras(dynamic_growth_steps=3)
    original.walk(SCRIPT)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), dynamic_growth_steps=3))
    model.optimizer.build(model.trainable_variables)
    model.optimizer.dynamic_scale.assign(original.optimizer.dynamic_scale)
    model.optimizer.step_counter.assign(original.optimizer.step_counter)
    getattr(model, method)(path / name)
    return path / name, original


FILES = {
    "torch": save_torch,
    "deepspeed": save_zero,
    "deepspeed-fused": save_stage_0,
    "flax": save_flax,
    "jmp": save_json,
    "tf-keras": save_tf_keras,
    "keras": save_keras,
}
WHERE = {
    "torch": "amp.scaler of",
    "deepspeed": "optimizer_state_dict of",
    "deepspeed-fused": "optimizer of",
    "flax": "dynamic_scale of",
    "jmp": "1.loss_scale of",
    "tf-keras": "optimizer.loss_scale of",
    "keras": "optimizer of",
}
UNSAVED = {"flax", "tf-keras"}  # whose files have no interval


@pytest.mark.parametrize("name", FILES)
def test_what_a_system_wrote_goes_on_in_pytorch(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, original = FILES[name](tmp_path)
    said = converted(capsys, source, name, out := tmp_path / "out.pt", "torch")
    assert f"carried scale {original.scale():g}" in said
    assert WHERE[name] in said
    assert "equal" not in said
    theirs = originals.Torch()
    theirs.load(torch.load(out) | ({"growth_interval": 3 + (name == "flax")} if name in UNSAVED else {}))
    assert theirs.walk("0" * 9) == original.walk("0" * 9)


def test_weights_of_keras_hold_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, original = save_keras_weights(tmp_path)
    converted(capsys, source, "keras", out := tmp_path / "out.json", "torch")
    saved = json.loads(out.read_text())
    assert (saved["scale"], saved["_growth_tracker"]) == (original.scale(), 1)


def test_our_keras_optimizer_is_read_as_keras(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import keras

    from preamp.keras import LossScaleOptimizer

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=64.0), "mse")
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "in.keras")
    said = converted(capsys, tmp_path / "in.keras", "keras", tmp_path / "out.json", "torch")
    assert "carried scale 64, clean steps 0" in said


def test_pytorchs_goes_on_in_every_other_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from flax import serialization

    source, original = save_torch(tmp_path)
    scales = original.walk("0" * 9)

    converted(capsys, source, "torch", out := tmp_path / "flax.msgpack", "flax")
    flax = originals.Flax(growth_interval=2)
    flax.scaler = serialization.from_bytes(flax.scaler, out.read_bytes())
    assert flax.walk("0" * 9) == scales

    for name, kind, arguments in (
        ("jmp", originals.Jmp, {}),
        ("keras", originals.Keras, {"dynamic_growth_steps": 3}),
        ("tf-keras", originals.TfKeras, {"dynamic_growth_steps": 3}),
        ("deepspeed", originals.DeepSpeed, vars_of_zero()),
    ):
        converted(capsys, source, "torch", out := tmp_path / f"{name}.json", name)
        theirs = kind(**arguments)
        theirs.load(json.loads(out.read_text()))
        assert theirs.walk("0" * 9) == scales


def vars_of_zero() -> dict[str, Any]:
    return {
        "init_scale": 1.0,
        "scale_window": 9,
        "min_scale": 1.0,
        "hysteresis": 5,
        "consecutive_hysteresis": False,
    }


def test_a_conversion_and_its_reverse_give_the_entries_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, original = save_zero(tmp_path)
    converted(capsys, source, "deepspeed", tmp_path / "0.json", "deepspeed")
    first = json.loads((tmp_path / "0.json").read_text())
    for target in ("torch", "jmp", "deepspeed"):
        converted(capsys, tmp_path / "0.json", "deepspeed", tmp_path / f"{target}.pt", target)
        converted(capsys, tmp_path / f"{target}.pt", target, tmp_path / f"{target}.json", "deepspeed")
        again = json.loads((tmp_path / f"{target}.json").read_text())
        assert [again[name] for name in ("cur_scale", "cur_iter", "scale_window")] == [
            first[name] for name in ("cur_scale", "cur_iter", "scale_window")
        ]
    assert again == first
    assert original.scale() == first["cur_scale"]


def test_megatron_is_given_the_tensor_that_it_moves_to_a_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = save_torch(tmp_path)
    said = converted(capsys, source, "torch", out := tmp_path / "out.pt", "megatron")
    saved = torch.load(out)
    assert (saved["scale"].shape, saved["scale"].dtype) == ((1,), torch.float32)
    assert "Not carried: growth_interval=3 (becomes 1000), hysteresis=1 (becomes 2)" in said


def test_fairseqs_lost_counters_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = save_torch(tmp_path)
    said = converted(capsys, source, "torch", out := tmp_path / "out.pt", "fairseq")
    assert "clean steps=1 (becomes 0)" in said
    assert "clean steps 0, overflows 0, steps 0" in converted(
        capsys, out, "fairseq", tmp_path / "back.json", "torch"
    )


def test_overflows_counted_for_a_policy_that_is_not_in_the_file_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    scaler = GradScaler("cpu", policy=Dynamic(hysteresis=3))
    scaler.scale(weight.sum() * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.save(scaler.state_dict(), tmp_path / "ours.pt")
    line = converted(capsys, tmp_path / "ours.pt", "torch", tmp_path / "theirs.json", "apex")
    assert "overflows 1 from" in line
    assert "overflows=1 (counted for a policy that the checkpoint does not hold)" in line
    line = converted(capsys, tmp_path / "ours.pt", "torch", tmp_path / "ours.json", "torch")
    assert "Nothing was lost." in line


def test_where_nothing_is_lost_the_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = save_torch(tmp_path)
    assert "Nothing was lost." in converted(capsys, source, "torch", tmp_path / "out.json", "jmp")


# Several, none


@pytest.mark.parametrize("copy", [dict, lambda saved: saved], ids=["two", "one twice"])
def test_equal_states_at_two_places_are_named(
    copy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = torch.amp.GradScaler("cpu").state_dict()
    torch.save(training(gan={"g": saved, "d": [copy(saved)]}, last=copy(saved)), tmp_path / "in.pt")
    said = converted(capsys, tmp_path / "in.pt", "torch", tmp_path / "out.json", "jmp")
    assert f"from gan.g of {tmp_path / 'in.pt'}." in said
    assert "An equal one is at gan.d.0 and last; the one at gan.g was taken. Nothing was lost." in said


def test_a_checkpoint_that_holds_itself_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inner: dict[str, Any] = {"scaler": torch.amp.GradScaler("cpu").state_dict()}
    inner["parent"] = [inner, inner]
    torch.save(inner, tmp_path / "in.pt")
    said = converted(capsys, tmp_path / "in.pt", "torch", tmp_path / "out.json", "jmp")
    assert "from scaler of" in said
    assert "equal" not in said


def test_different_states_are_an_error_that_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = torch.amp.GradScaler("cpu").state_dict()
    torch.save(training(gan={"g": saved, "d": [{**saved, "scale": 8.0}]}), tmp_path / "in.pt")
    said = refused(capsys, tmp_path / "in.pt", "torch", tmp_path / "out.json", "deepspeed")
    assert "that differ, at gan.g (65536), gan.d.0 (8)" in said


def test_another_system_that_fits_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = save_stage_0(tmp_path)
    said = refused(capsys, source, "deepspeed", tmp_path / "out.json", "torch")
    assert "Write --from deepspeed_fused." in said
    torch.save(training(), tmp_path / "none.pt")
    said = refused(capsys, tmp_path / "none.pt", "torch", tmp_path / "out.json", "deepspeed")
    assert said.strip().endswith("holds nothing that torch.amp.GradScaler, torch 2.13 saves.")


def test_a_state_that_cannot_be_gone_on_from_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.json").write_text(json.dumps({**TARGET, "scale": 0.0, **FACTORS}))
    assert "no gradient would survive" in refused(
        capsys, tmp_path / "in.json", "torch", tmp_path / "out.json", "deepspeed"
    )
    (tmp_path / "in.json").write_text(json.dumps({**TARGET, **FACTORS, "growth_interval": 0}))
    assert "growth_interval=0" in refused(
        capsys, tmp_path / "in.json", "torch", tmp_path / "out.json", "deepspeed"
    )


# Files and flags that cannot work


def test_no_file_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = save_torch(tmp_path)
    before = source.read_bytes()
    assert "exists and is not overwritten" in refused(capsys, source, "torch", source, "deepspeed")
    (tmp_path / "link.pt").symlink_to(source)
    assert "exists" in refused(capsys, source, "torch", tmp_path / "link.pt", "deepspeed")
    assert source.read_bytes() == before


@pytest.mark.parametrize(
    ("origin", "target", "out", "said"),
    [
        ("torhc", "deepspeed", "out.pt", "--from torhc is unknown. Write one of torch"),
        (
            "pytorch",
            "deepspeed",
            "out.pt",
            "torch, tf_keras, megatron, jmp, apex",
        ),  # without systems that save none
        ("torch", "depspeed", "out.pt", "--to depspeed is unknown. Write one of deepspeed"),
        (
            "torch",
            "paddle",
            "out.pt",
            "how Paddle amp.GradScaler, paddlepaddle 3.3 saves its loss scale is not",
        ),
        ("paddle", "torch", "out.pt", "is not known to preamp"),
        ("torch", "keras", "out.h5", "Write {}/out.json"),
        ("torch", "keras", "out", "Write {}/out.json"),
        ("torch", "keras", "none/out.pt", "{}/none is not a folder"),
    ],
)
def test_flags_that_cannot_work(
    origin: str, target: str, out: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = save_torch(tmp_path)
    status = run(["convert", str(source), "--from", origin, "--to", target, str(tmp_path / out)])
    printed = capsys.readouterr()
    assert (status, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert said.format(tmp_path) in printed.err


WRONG: dict[str, bytes] = {
    "empty": b"",
    "picture": b"\x89PNG\r\n\x1a\n" + bytes(99),
    "number": b"3",
    "text": b"scale: 65536\n",
    "list": b"[1, 2]",
    "broken json": b'{"scale": ',
    "deep json": b'{"a":' * 100_000,
    "zip": b"PK\x03\x04" + bytes(99),
    "hdf5": b"\x89HDF\r\n\x1a\n" + bytes(99),
    "pickle": b"\x80\x04}q\x00.",
    "plain pickle": pickle.dumps({"scale": 1.0}),
    "msgpack": b"\xde\x00\x14\xa1",
    "latin": '{"größe": 1}'.encode("latin-1"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_file_of_another_kind(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in"
    source.write_bytes(WRONG[kind])
    said = refused(capsys, source, "torch", tmp_path / "out.json", "deepspeed")
    assert str(source) in said
    assert not re.search("unpack|protocol|ValueError", said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "in is empty."),
        (gzip.compress(b"{}", mtime=0), "in is compressed with gzip. Unpack it first: gunzip -k "),
        (b'{"preamp_trace": 1}\n{"index": 0}\n', "in is the trace of a run, which holds no checkpoint"),
        (b'\xef\xbb\xbf{"preamp_trace": 1}\r\n', "in is the trace of a run, which holds no checkpoint"),
    ],
)
def test_a_file_of_a_known_kind_is_called_what_it_is(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_bytes(content)
    assert said in refused(capsys, tmp_path / "in", "torch", tmp_path / "out.json", "deepspeed")


def test_a_part_of_a_tensorflow_checkpoint_is_refused_with_its_prefix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ckpt-1.index", "ckpt-1.data-00000-of-00001"):
        (tmp_path / name).write_bytes(b"parts")
    for name in ("ckpt-1.index", "ckpt-1.data-00000-of-00001"):
        said = refused(capsys, tmp_path / name, "tf-keras", tmp_path / "out.json", "torch")
        assert f"Write its prefix: {tmp_path / 'ckpt-1'}\n" in said
    said = refused(capsys, tmp_path, "tf-keras", tmp_path / "out.json", "torch")
    assert f"or the prefix of a TensorFlow checkpoint: {tmp_path / 'ckpt-1'}\n" in said


def test_a_damaged_file_of_keras_says_which_variable_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import h5py

    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["optimizer/vars/3"] = h5py.SoftLink("/nowhere")
    said = refused(capsys, tmp_path / "in.h5", "keras", tmp_path / "out.json", "torch")
    assert "in.h5 is damaged: its variable optimizer/vars/3 is missing." in said
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["optimizer/vars"] = 3.0
    said = refused(capsys, tmp_path / "other.h5", "keras", tmp_path / "out.json", "torch")
    assert "other.h5 is damaged: its optimizer/vars is not a group of variables." in said


def test_json_may_begin_with_a_mark_of_its_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.json"
    source.write_text(json.dumps(torch.amp.GradScaler("cpu").state_dict()), encoding="utf-8-sig")
    assert "carried scale 65536" in converted(capsys, source, "torch", tmp_path / "out.json", "deepspeed")


def test_a_folder_or_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder := tmp_path / "folder").mkdir()
    assert "neither latest nor" in refused(capsys, folder, "deepspeed", tmp_path / "out.json", "torch")
    (folder / "latest").write_text("global_step9")
    said = refused(capsys, folder, "deepspeed", tmp_path / "out.json", "torch")
    assert f"names a folder that does not exist: {folder / 'global_step9'}" in said
    missing = tmp_path / "missing.pt"
    assert f"{missing}: No such file" in refused(capsys, missing, "torch", tmp_path / "out.json", "deepspeed")


@pytest.mark.parametrize("name", ["torch", "flax", "keras", "jmp"])
def test_a_file_that_was_cut_off_is_an_error(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = FILES[name](tmp_path)
    whole, cut = source.read_bytes(), source.with_name(f"cut{source.suffix}")
    for length in (1, 9, len(whole) // 3, len(whole) // 2, len(whole) - 40, len(whole) - 2):
        cut.write_bytes(whole[:length])
        assert str(cut) in refused(capsys, cut, name, tmp_path / "out.json", "torch")


# Files that would execute code


class Calls:
    """Pickles as the call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("function", [os.mkdir, os.system, eval, subprocess.check_call, Path, torch.load])
def test_a_file_that_wants_code_to_run_is_refused(
    function: Any, zipped: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, trace = tmp_path / "in.pt", tmp_path / "trace"
    hostile = Calls(function, {os.mkdir: str(trace)}.get(function, f"__import__('os').mkdir('{trace}')"))
    saved = {"scaler": torch.amp.GradScaler("cpu").state_dict(), "more": hostile}
    torch.save(saved, source, _use_new_zipfile_serialization=zipped)
    assert str(source) in refused(capsys, source, "torch", tmp_path / "out.json", "deepspeed")
    assert not trace.exists()


def test_what_looks_like_a_librarys_own_is_not_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.npy"
    hostile = [Calls(np.save, str(trace), 1), Calls(np.lib.format.open_memmap, str(trace), "w+", None, (9,))]
    saved = {"scaler": torch.amp.GradScaler("cpu").state_dict(), "more": hostile}
    torch.save(saved, tmp_path / "in.pt")
    converted(capsys, tmp_path / "in.pt", "torch", tmp_path / "out.json", "deepspeed")
    assert not trace.exists()


def test_members_of_enums_are_read_as_python_3_11_2_saved_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    stage = Calls(getattr, ZeroStageEnum, "gradients")
    torch.save({"scaler": torch.amp.GradScaler("cpu").state_dict(), "stage": stage}, tmp_path / "in.pt")
    converted(capsys, tmp_path / "in.pt", "torch", tmp_path / "out.json", "deepspeed")


def test_the_shells_of_one_file_do_not_open_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = save_zero(tmp_path)
    converted(capsys, source, "deepspeed", tmp_path / "out.json", "torch")
    with pytest.raises(pickle.UnpicklingError, match="DynamicLossScaler"):
        torch.load(next(source.glob("*/zero*")), weights_only=True)


def test_an_archive_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        archive.writestr("readme.txt", "hello")
    refused(capsys, tmp_path / "in.zip", "torch", tmp_path / "out.json", "deepspeed")


def test_help_names_every_system_with_a_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", "--help"]) == 0
    (listed,) = re.findall(r"wrote the checkpoint: (.+?)\.", " ".join(capsys.readouterr().out.split()))
    named = {name.lower().replace("_", "-") for name, one in ALL.items() if one.format is not None}
    assert {*re.split(", | or ", listed)} == named


# What the origin does not save


@pytest.mark.parametrize("name", [name for name, one in ALL.items() if one.format is not None])
def test_an_argument_is_saved_or_named_as_not_saved(name: str) -> None:
    origin = ALL[name]
    unsaved = origin.unsaved_arguments()
    for given in ({"growth_interval": 7}, {"scale_window": 7}, {"dynamic_growth_steps": 7}, {"period": 7}):
        (argument,) = given
        if argument not in inspect.signature(origin._make).parameters:
            continue
        rule: Any = origin(**given)
        back: Any = origin.load_policy(origin.dump_and_tell(rule.start(), rule)[0])
        assert (back.growth_interval == 7) == (argument not in unsaved)
        break
    else:
        pytest.fail(f"{name} has an interval under another name")


def test_a_default_that_stands_for_what_was_not_saved_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = dialects.MEGATRON(growth_interval=70)
    with pytest.warns(LossyConversion, match="growth_interval=70"):
        saved = dialects.MEGATRON.dump(rule.start(), rule)
    torch.save({"grad_scaler": saved}, tmp_path / "theirs.pt")
    said = converted(capsys, tmp_path / "theirs.pt", "megatron", out := tmp_path / "ours.pt", "torch")
    assert torch.load(out)["growth_interval"] == 1000
    assert "megatron does not save min_scale=1.0, growth_factor=2.0" in said
    assert "growth_interval=1000: these defaults were assumed." in said


def test_what_our_scaler_took_from_a_policy_and_did_not_save_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scaler, weight = GradScaler("cpu", policy=Dynamic(hysteresis=2)), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.save(scaler.state_dict(), tmp_path / "ours.pt")
    said = converted(capsys, tmp_path / "ours.pt", "torch", tmp_path / "out.json", "deepspeed")
    assert "torch does not save hysteresis=1, min_scale=None, max_scale=" in said
