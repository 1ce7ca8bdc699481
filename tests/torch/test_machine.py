"""What `preamp.torch.check` measures, what it advises, and that it leaves the process as it was."""

import json
import math
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from preamp.errors import PolicyError, UsageError
from preamp.machine import NOT_TRIED, REFERENCE, Advice, MachineReport, PrecisionRow, Product
from preamp.machine.measurements import advise, compared, judged, measure_product
from preamp.torch import autocast, check, machine
from tests.compilers import HAS_CXX, NO_CXX

from .switches import torch_devices, unscaled

CODE = dict.fromkeys(("float32", "TF32", "bfloat16", "float16"), "code")


@pytest.fixture(scope="module")
def report():
    return check(["cpu"])


def row(precision, speed, training="works", *, device="cuda"):
    product = Product(speed, problem="" if speed else "RuntimeError: none")
    return PrecisionRow(device, precision, {"matmul": product, "conv": product}, training)


def test_it_measures_each_precision_of_the_cpu(report):
    assert [one.precision for one in report.rows] == [
        *("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    ]
    assert {one.device for one in report.rows} == {"cpu"}
    for one in report.rows:
        assert list(one.products) == ["matmul", "conv", "attention"]
        if not one.precision.startswith("float8"):
            assert one.training == "works"
            assert all(product.speed > 0.0 for product in one.products.values())
    assert all(product == REFERENCE for product in report.rows[0].products.values())
    assert [feature.name for feature in report.features] == [
        *("fused AdamW with GradScaler", "torch.compile with autocast")
    ]
    (advice,) = report.advice
    assert advice.precision in ("float32", "bfloat16", "float16")
    assert "autocast" in advice.code


def test_it_fits_80_columns(report):
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["device", "precision", "matmul", "conv", "attention", "training"]
    broken = replace(report, rows=[row("float32", 0.0, "RuntimeError: " + "no " * 99), *report.rows])
    assert max(map(len, str(broken).splitlines())) <= 80
    assert "RuntimeError: no no" in str(broken)


STATE = """
import json, os, random, torch
from preamp.torch import autocast, check, machine
from preamp.torch.autocasting.unscaled import watch
from torch.optim import optimizer

machine.PRODUCTS = {name: (make, sizes[:2]) for name, (make, sizes) in machine.PRODUCTS.items()}

torch.set_default_dtype(torch.float64)
torch.set_grad_enabled(False)
with autocast("cpu", torch.float16):
    def state():
        return [
            torch.get_rng_state().tolist(), random.getstate(), torch.is_grad_enabled(),
            torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
            torch.get_float32_matmul_precision(), id(optimizer._global_optimizer_pre_hooks),
            watch.is_on, watch._regions, dict(os.environ),
            torch._dynamo.config.get_config_copy(), torch._dynamo.utils.counters["frames"]["total"],
            sorted(os.listdir()),
        ]
    import torch._dynamo
    before = state()
    report = check()
    print(json.dumps([a == b for a, b in zip(before, state(), strict=True)]))
    print(json.dumps([feature.problem for feature in report.features]))
    print(json.dumps([row.training for row in report.rows]))
"""


def test_it_leaves_the_process_as_it_was(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", STATE], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    same, problems, training = map(json.loads, done.stdout.splitlines())
    assert all(same), same
    assert problems[0] == ""
    assert problems[1] == "" if HAS_CXX else problems[1].startswith(NO_CXX)
    assert set(training) == {"works", ""}
    # PyTorch's build for CUDA says so where it finds a CUDA_HOME and no GPU.
    assert [line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line] == []


def test_a_missing_compiler_is_named_in_one_line_and_variables_that_importing_it_sets_are_removed(tmp_path):
    program = (
        "import os; from preamp.torch import machine; machine.PRODUCTS = {}; before = dict(os.environ)\n"
        "print(machine.check(['cpu']).features[1].problem)\n"
        "print(set(os.environ.items()) ^ set(before.items()))"
    )
    beside = {**os.environ, "CXX": "/no/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=beside, capture_output=True, text=True, check=True
    )
    assert done.stdout == (
        "does not work: there is no C++ compiler. Install one (on Debian and Ubuntu g++), or set CXX to its "
        "path\nset()\n"
    )


def test_what_raises_is_missing_and_said(monkeypatch):
    def refuse(size, device, dtype):
        if dtype is torch.bfloat16:
            raise NotImplementedError("no kernel\nand a traceback")
        return lambda: torch.ones(1)

    monkeypatch.setattr(machine, "PRODUCTS", {"matmul": (refuse, (1, 2))})
    monkeypatch.setattr(machine, "_compiles", lambda *_: "does not work: no reason")
    found = check(["cpu"])
    brain = found.rows[1].products["matmul"]
    assert (brain.verdict, brain.problem) == ("missing", "NotImplementedError: no kernel")
    assert found.rows[1].speed == 0.0
    text = str(found)
    assert "bfloat16 on cpu: matmul: NotImplementedError: no kernel\n" in text
    assert "cpu: torch.compile with autocast does not work: no reason.\n" in text
    assert "traceback" not in text
    assert found.advice[0].precision != "bfloat16"


def test_a_slow_precision_is_measured_at_a_small_size(monkeypatch):
    now, sizes = 0.0, {"float32": [], "float16": []}
    monkeypatch.setattr("preamp.machine.measurements.perf_counter", lambda: now)

    def make(size, precision):
        def run():
            nonlocal now
            sizes[precision].append(size)
            now += size * (1e-4 if precision == "float32" else 6e-3)

        return run

    found = measure_product(make, (1, 2, 4, 8, 16, 32), "float16", None)
    assert max(sizes["float16"]) == 2
    assert found.speed == pytest.approx(1 / 60)
    assert found.verdict == "slower"
    found = measure_product(make, (1, 2, 4, 8, 16, 32, 64, 128), "float32", None)
    assert max(sizes["float32"]) == 64
    assert found.speed == pytest.approx(1.0)


@pytest.fixture
def timed_calls(monkeypatch):
    """Return what makes a function that takes 5 ms by a clock of its own, times a factor for each call."""
    now = 0.0
    monkeypatch.setattr("preamp.machine.measurements.perf_counter", lambda: now)

    def make(factor):
        calls = count()

        def run():
            nonlocal now
            now += 5e-3 * factor(next(calls))

        return run

    return make


def test_calls_that_other_programs_slow_down_do_not_change_a_speed(timed_calls):
    steady, disturbed = timed_calls(lambda n: 1.0), timed_calls(lambda n: 1.0 if n % 3 == 0 else 10.0)
    assert compared(steady, disturbed) == pytest.approx(1.0)


def test_a_precision_that_seems_a_little_slower_is_measured_again(timed_calls):
    def factor(n):  # disturbed for the first ten calls: a warm-up, two for the size, and seven that count
        return 1.5 if n < 10 else 1.0

    made = {"float32": timed_calls(lambda n: 1.0), "bfloat16": timed_calls(factor)}
    found = measure_product(lambda size, precision: made[precision], [1], "bfloat16", True)
    assert found.speed == pytest.approx(1.0)
    assert found.verdict == "native"
    made["bfloat16"] = timed_calls(lambda n: 1.5)
    found = measure_product(lambda size, precision: made[precision], [1], "bfloat16", True)
    assert found.speed == pytest.approx(1 / 1.5)
    assert found.verdict == "slower"


@pytest.mark.parametrize(
    ("product", "verdict"),
    [
        (Product(0.5), "slower"),
        (Product(0.5, claimed=True), "slower"),
        (Product(0.5, claimed=False), "emulated"),
        (Product(3.0, claimed=False), "emulated"),
        (Product(1.0), "same"),
        (Product(1.0, claimed=True), "native"),
        (Product(2.0), "native"),
        (Product(0.0, True, "RuntimeError"), "missing"),
        (NOT_TRIED, "not tried"),
    ],
)
def test_native_or_emulated_by_speed_and_by_what_the_framework_says(product, verdict):
    assert product.verdict == verdict


@pytest.mark.parametrize(
    ("rows", "precision", "reason"),
    [
        ([row("bfloat16", 4.0), row("float16", 4.2)], "bfloat16", "4 times as fast as in float32"),
        ([row("bfloat16", 0.5), row("float16", 4.0)], "float16", "8 times as fast as in bfloat16"),
        ([row("bfloat16", 0.0), row("float16", 4.0)], "float16", "bfloat16 does not work"),
        ([row("bfloat16", 1.1), row("float16", 0.02)], "float32", "(bfloat16 1.10x, float16 0.02x)"),
        ([row("bfloat16", 4.0, "the loss is nan"), row("float16", 0.5)], "float32", "(float16 0.50x)"),
        ([row("bfloat16", 0.0), row("float16", 0.0)], "float32", "nothing in low precision works"),
        ([row("TF32", 3.0), row("bfloat16", 1.0), row("float16", 1.0)], "TF32", "3 times as fast"),
        ([row("TF32", 3.0), row("bfloat16", 5.0), row("float16", 5.0)], "bfloat16", "5 times as fast"),
    ],
)
def test_what_is_advised(rows, precision, reason):
    found = advise([row("float32", 1.0), *rows], CODE)
    assert isinstance(found, Advice)
    assert (found.device, found.precision, found.code) == ("cuda", precision, "code")
    assert reason in found.reason


def test_a_training_that_does_not_learn_does_not_work():
    assert judged(0.01, 0.01, 5.0) == "works"
    assert judged(math.nan, 0.01, 5.0) == "the loss is nan"
    assert "from 5 to 4.9, in float32 to 0.01" in judged(4.9, 0.01, 5.0)
    assert "in float32 to 1" in judged(2.0, 1.0, 5.0)


def test_autocast_that_switches_itself_off_does_not_work(monkeypatch):
    monkeypatch.setitem(machine.DTYPES, "float16", torch.float64)  # of which PyTorch warns
    assert "autocast" in machine._training("cpu", "float16")


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        (["gpu"], PolicyError, "device='gpu' is not a device type"),
        (["xpu"], UsageError, "This machine has no 'xpu'. Write one of its devices: cpu"),
        ("xpu", UsageError, "This machine has no 'xpu'"),
        ([torch.device("cpu:0")], UsageError, "This machine has no 'cpu:0'"),
        ([], UsageError, "devices is empty. Leave it out to check all, or write some of cpu"),
    ],
)
def test_devices_that_are_not_there_are_refused(devices, error, message, monkeypatch):
    monkeypatch.setattr(machine, "device_types", lambda: ["cpu"])
    with pytest.raises(error, match=message):
        check(devices)


STAND_IN = """
import torch
from tests.torch.stand_in_device import install

kept = install("npu", double=False)
from preamp.torch import machine

machine.PRODUCTS = {name: (make, sizes[:2]) for name, (make, sizes) in machine.PRODUCTS.items()}
machine._compiles = lambda *_: "does not work: " + "no " * 99
print(machine.check())
"""


@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="no device can stand in for one",
)
def test_an_accelerator_is_checked_beside_the_cpu_and_what_it_lacks_is_said():
    """On a device that computes on the CPU, without convolutions and without kernels for autocast."""
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", STAND_IN], cwd=root, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    found = {tuple(line.split()[:2]): line for line in lines if re.match(r"(cpu|npu) ", line)}
    assert re.search(r"1\.00x native +missing +1\.00x native +works$", found["npu", "float32"])
    assert re.search(r"x \w+ +- +\S+x \w+ +fails$", found["npu", "float16"])
    assert re.search(r" works$", found["cpu", "float16"])
    assert "float32 on npu: conv: NotImplementedError: convolution_overrideable" in done.stdout
    assert "npu: fused AdamW with GradScaler works." in lines
    assert any(line.startswith("Use float32 on npu: ") for line in lines)


@pytest.mark.parametrize("devices", [torch.device("cpu"), ("cpu", "cpu")])
def test_devices_are_given_as_names_or_objects_one_or_several(devices, monkeypatch):
    monkeypatch.setattr(machine, "_compiles", lambda *_: "")
    monkeypatch.setattr(machine, "PRODUCTS", {})
    assert [one.device for one in check(devices).advice] == ["cpu"]


@pytest.mark.parametrize("precision", ["float32", "TF32", "bfloat16", "float16"])
def test_the_advised_lines_import_what_they_use(precision):
    lines = machine._code("cpu")[precision].replace("...", "(weight * 2.0).sum()")
    weight = torch.nn.Parameter(torch.ones(2))
    with machine._tf32(False):
        exec(lines, {"weight": weight, "optimizer": torch.optim.SGD([weight], lr=0.1)})
    torch.set_float32_matmul_precision("highest")


def test_what_pytorch_says_of_the_hardware(monkeypatch):
    """Of GPUs with stand-ins for PyTorch's answers: no GPU is asked."""
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, native in {
        (6, 1): {"bfloat16": False, "float16": True, "float8": False},
        (8, 0): {"bfloat16": True, "float16": True, "float8": False},
        (9, 0): {"bfloat16": True, "float16": True, "float8": True},
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation, c=capability: c >= (8, 0)
        )
        assert torch_devices.native_precisions("cuda") == native
        assert ("TF32" in machine._precisions("cuda")) == (capability >= (8, 0))
    assert "TF32" not in machine._precisions("cpu")
    features = {"avx512_bf16": False, "amx_bf16": True}
    monkeypatch.setattr(torch_devices, "cpu_features", lambda: features)
    assert torch_devices.native_precisions("cpu") == {"bfloat16": True, "float16": False, "float8": False}
    monkeypatch.setattr(torch_devices, "cpu_features", lambda: {"sve": True})
    assert torch_devices.native_precisions("cpu") == {}
    assert torch_devices.native_precisions("nothing") == {}


def test_the_setting_of_tf32_is_restored():
    assert torch.get_float32_matmul_precision() == "highest"
    with machine._tf32(True):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_report_of_other_rows_prints():
    empty = MachineReport([row("float32", 1.0)], [], [], {}, 0.0)
    assert "float32" in str(empty)


def test_it_works_inside_a_region_and_in_inference_mode(monkeypatch):
    monkeypatch.setattr(machine, "_compiles", lambda *_: "")
    monkeypatch.setattr(machine, "PRODUCTS", {})
    monkeypatch.setattr(unscaled.watch, "_regions", 5)
    before = random.getstate()
    with torch.inference_mode(), autocast("cpu", torch.bfloat16):
        found = check(["cpu"])
        assert torch.is_inference_mode_enabled()
    assert [one.training for one in found.rows if one.training] == ["works"] * 3
    assert unscaled.watch._regions == 5
    assert random.getstate() == before
