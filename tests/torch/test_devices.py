"""Devices that are not here: what stands in for them is trained on, each kind in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from preamp import UsageError, casting
from preamp.torch import GradScaler, autocast

from .switches import torch_devices

CHECKS = Path(__file__).with_name("device_checks.py")
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))


@pytest.mark.skipif(RELEASE < (2, 10), reason="PyTorch has backends in Python since 2.10")
@pytest.mark.parametrize(
    ("device", "which", "number"),  # all of it where no float64 hides what is wrong
    [("stand-in", "pytorchs_scaler or widest", 10), ("stand-in without float64", "", 25)],
    ids=["stand-in", "stand-in without float64"],
)
def test_all_that_trains_on_the_cpu_trains_on_another_device(device, which, number):
    told = {**os.environ, "PREAMP_TEST_DEVICE": device, "KERAS_BACKEND": "torch"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(CHECKS),
        "-k",
        which,
    ]
    done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=900, check=False)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed is not None
    assert int(passed[1]) >= number


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float64), ("cuda", torch.float64), ("mps", torch.float32)]
)
def test_what_is_known_of_a_device_is_not_tried(device, dtype):
    assert torch_devices.widest(torch.device(device)) is dtype  # although there may be none


def test_a_device_that_raises_for_float64_gets_float32_and_is_asked_once(monkeypatch):
    asked = []

    def ones(*size, dtype, device):
        asked.append(device)
        raise RuntimeError("Required aspect fp64 is not supported on the device")

    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch_devices, "_has_double", {})
    device = torch.device("xpu:1")
    assert [torch_devices.widest(one) for one in (device, torch.device("xpu"))] == [torch.float32] * 2
    assert asked == [device]


@pytest.mark.parametrize("device", ["xpu", "hpu", "mtia", "mps", "privateuseone"])
def test_a_scaler_for_any_device_type_is_made_as_pytorch_makes_it(device, recwarn):
    mine, theirs = GradScaler(device, init_scale=8.0), torch.amp.GradScaler(device, init_scale=8.0)
    assert mine.is_enabled() == theirs.is_enabled()
    assert mine.state_dict() == theirs.state_dict()
    assert not recwarn.list


@pytest.mark.parametrize("device", ["xpu", "hpu", "mtia", "xla", "mps", "ipu"])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, torch.float32])
def test_a_region_for_any_device_type_says_and_does_what_pytorchs_does(device, dtype):
    outcomes = []
    for region in (autocast, torch.autocast):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                with region(device, dtype=dtype):
                    state = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            except (RuntimeError, AssertionError) as error:
                state = type(error), str(error)
        outcomes.append((state, [(one.category, str(one.message)) for one in heard]))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("device", ["mtia", "maia", "mtia:0"])
@pytest.mark.parametrize("edit", [{"casting": casting.DEFAULT}, {"report": True}, {"emulate": True}], ids=str)
def test_where_pytorch_casts_nothing_nothing_is_edited(device, edit, recwarn):
    kind = device.partition(":")[0]
    if hasattr(torch._C.DispatchKey, f"Autocast{kind.upper()}"):
        pytest.skip(f"PyTorch {torch.__version__} casts for {kind}")
    try:
        torch.autocast(device, dtype=torch.bfloat16)
    except RuntimeError as error:  # of a release that knows no such device
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            autocast(device, dtype=torch.bfloat16, **edit)
        return
    with pytest.raises(
        UsageError, match=rf"has none for '{kind}'\. Write autocast\('{device}'\) without them"
    ):
        autocast(device, dtype=torch.bfloat16, **edit)


@pytest.mark.parametrize("device", ["xpu", "hpu", "mps"])
def test_a_region_that_edits_leaves_other_devices_alone(device):
    x = torch.ones(2, 2)
    try:
        torch.autocast(device, dtype=torch.bfloat16)
    except RuntimeError as error:  # for MPS in releases as late as 2.8, where there is none
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            autocast(device, dtype=torch.bfloat16, casting=casting.DEFAULT.float32("mm"))
        return
    with autocast(device, dtype=torch.bfloat16, casting=casting.DEFAULT.float32("mm")):
        assert torch.mm(x, x).dtype is torch.float32
