"""How many calls a step makes that reads nothing, and where Triton's kernels do its scalar work.

What the kernels compute is tested in `triton_interpreted.py`, in Triton's interpreter. Triton is installed in
.venv/triton, beside the other packages and not among them: loaded after TensorFlow it crashes the process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from preamp import Dynamic
from preamp.torch import GradScaler
from preamp.torch.scaling import grad_scaler

ROOT = Path(__file__).parents[2]
BESIDE = Path(sys.prefix) / "triton"
HAS_TRITON = BESIDE.exists() or importlib.util.find_spec("triton") is not None
# PyTorch 2.6 brings Triton 3.2, which imports setuptools and does not ask for it.
WORKS = not torch.__version__.startswith("2.6.") or importlib.util.find_spec("setuptools") is not None
with_triton = pytest.mark.skipif(
    not (HAS_TRITON and WORKS),
    reason="Triton is not installed, which PyTorch for CUDA brings, or not setuptools, which 3.2 needs",
)
# Operators that reserve memory or give another view of it, and launch nothing.
LAUNCH_NOTHING = {"empty", "empty_like", "unbind", "view", "detach", "alias", "select", "expand"}


class Calls(TorchDispatchMode):
    """Lists the operators that launch something on a device, and the others."""

    def __init__(self):
        super().__init__()
        self.launched, self.others = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        (self.others if name in LAUNCH_NOTHING else self.launched).append(name)
        return func(*args, **(kwargs or {}))


def beyond_the_optimizers(calls, policy, capturable, **limits):
    """List the calls of an iteration with 161 gradients that a bare fused optimizer does not make."""
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(161)]
    optimizer, loss = torch.optim.AdamW(parameters, fused=True), torch.ones(())
    scaler = GradScaler("cpu", policy=policy, capturable=capturable)
    for parameter in parameters:
        parameter.grad = torch.ones(4)

    def iterate():
        scaler.scale(loss)
        scaler.step(optimizer, **limits)
        scaler.update()

    with patch.object(grad_scaler, "_reads_are_free", lambda device: False):
        iterate()
        calls.launched.clear()
        with calls:
            iterate()
    with Calls() as own:
        optimizer.step()
    calls.launched = list((Counter(calls.launched) - Counter(own.launched)).elements())
    calls.others = list((Counter(calls.others) - Counter(own.others)).elements())
    return calls


@pytest.mark.parametrize(
    ("limits", "capturable", "launched"),
    [({}, False, 14), ({"max_norm": 1.0}, False, 16), ({}, True, 16), ({"max_norm": 1.0}, True, 18)],
)
def test_without_triton_a_fused_step_makes_fewer_calls_than_the_original(limits, capturable, launched):
    seen = beyond_the_optimizers(Calls(), Dynamic(), capturable, **limits)
    assert (len(seen.launched), seen.others) == (launched, [])


def python(*words, **environment):
    """Run Python with Triton in a process of its own."""
    path = os.pathsep.join([str(ROOT / "src"), str(BESIDE)])
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": path, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@with_triton
def test_the_kernels_do_what_operators_do():
    """The second file has a training for every optimizer, policy and change by hand."""
    code = (
        "import sys, pytest; from preamp.torch.scaling import launches; launches.DEVICE_TYPES = ('cpu',); "
        "code = pytest.main(sys.argv[1:]); "
        "assert launches._launched and not launches._failed; sys.exit(code)"
    )
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]  # NumPy's, of inf and NaN
    options += ["-k", "not compile"]  # what `torch.compile` traces launches none of them
    files = [f"tests/torch/{name}.py" for name in ("triton_interpreted", "test_capturable")]
    done = python("-c", code, *options, *files, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr


# What runs without the interpreter, one after the other in one process: a name of each, and its code.
STEPS = """
launches.DEVICE_TYPES = {kinds}
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.AdamW([weight], lr=0.5, fused=True)
scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)
with patch.object(grad_scaler, "_reads_are_free", lambda device: False):
    for number in (3.0, 4.0, float("inf"), 5.0):
        scaler.scale(torch.zeros(()))
        weight.grad = torch.full((3,), number)
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
assert (scaler.get_scale(), scaler.last_step.skipped, scaler._get_growth_tracker()) == (8.0, False, 1)
"""
COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from preamp import Compat, Dynamic
from preamp.torch.scaling import launches, triton_kernels

resets = ("growth", "backoff")
other = Dynamic(
    compat=Compat(at_ceiling="refuse", bounds="always", backoff_divisor=4.0), hysteresis_reset=resets
)
sources = [ASTSource(triton_kernels.prepare, dict(
    total_at="*fp32", scale_at="*fp32", numbers_at="*fp32", finite_at="*i1", constant="fp32", max_norm="fp32"
), {})]
for policy in (Dynamic(), other):
    settings = launches._settings(policy)
    places = dict(finite_at="*i1", scale_at="*fp32", good_at="*fp32", bad_at="*fp32", copy_at="*fp32")
    signature = {**places, **dict.fromkeys(settings, "constexpr")}
    sources.append(ASTSource(triton_kernels.advance, signature, settings))
for target in (GPUTarget("cuda", 75, 32), GPUTarget("cuda", 90, 32)):
    for source in sources:
        assert "cubin" in compile(source, target=target, options={"num_warps": 1}).asm
"""


ONE_BY_ONE = """
import json, sys, traceback
said = {}
for name, code in json.loads(sys.argv[1]).items():
    try:
        exec(code)
        said[name] = ""
    except Exception:
        said[name] = traceback.format_exc()
print(json.dumps(said))
"""
IMPORTS = """
from unittest.mock import patch
import torch
from preamp.torch import GradScaler
from preamp.torch.scaling import grad_scaler, launches
"""
AFTER_TENSORFLOW = """
sys.modules["tensorflow"] = sys
launches.DEVICE_TYPES = ("cpu",)
assert not launches.can_prepare(torch.ones(()))
assert "triton" not in sys.modules
del sys.modules["tensorflow"]
"""
NOT_IMPORTED = "assert 'preamp.torch.scaling.triton_kernels' not in sys.modules"
SCRIPTS = {
    "imports": IMPORTS,
    "after TensorFlow": AFTER_TENSORFLOW,
    "on a CPU": STEPS.format(kinds=("cuda", "xpu")) + NOT_IMPORTED,
    "cannot be compiled": STEPS.format(kinds=("cpu",)) + "assert launches._failed == {'cpu'}",
    "for devices that are not here": COMPILE,
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Return what went wrong in each of the scripts, which run without Triton's interpreter."""
    cache = str(tmp_path_factory.mktemp("triton"))
    done = python("-c", ONE_BY_ONE, json.dumps(SCRIPTS), TRITON_INTERPRET="0", TRITON_CACHE_DIR=cache)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@with_triton
def test_on_a_cpu_the_kernels_are_not_imported(said):
    assert not said["on a CPU"]


@with_triton
def test_after_tensorflow_the_kernels_are_not_imported(said):
    """Importing Triton would crash the process, as some of PyTorch's own modules do when they import it."""
    assert not said["after TensorFlow"]


@with_triton
def test_where_a_kernel_cannot_be_compiled_operators_do_its_work(said):
    """Outside of its interpreter Triton has nothing to compile for on a CPU."""
    assert not said["cannot be compiled"]


@with_triton
def test_the_kernels_compile_for_devices_that_are_not_here(said):
    """The interpreter takes what the compiler does not."""
    assert not said["for devices that are not here"]
