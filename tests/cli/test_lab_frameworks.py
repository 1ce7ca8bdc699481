"""The same training in JAX as in PyTorch."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version

import numpy as np
import pytest

from preamp import Dynamic, Trace
from tests.cli.inside import Plan, autoencoder, digits, find_loop, train

POLICY = Dynamic(init_scale=2.0**23, growth_interval=3)  # its first growth overflows
RUNS = {  # precision, policy and whether it is rehearsed
    "float32": ("float32", None, True),
    "unscaled": ("float16", None, True),
    "bfloat16": ("bfloat16", None, True),
    "scaled": ("float16", POLICY, True),
    "native": ("float16", POLICY, False),
}

# How far the first gradients of a layer may be from PyTorch's, over its largest: sums in another order, then
# rounded. The CPU's own float16 products may be summed in float16.
ROUNDING = {
    "float32": 8 * 2.0**-23,
    "unscaled": 2.0**-6,  # what is small has few bits
    "scaled": 2.0**-9,
    "bfloat16": 2.0**-6,
    "native": 2.0**-5,
}

# Over PyTorch's loss at the first step. JAX rounds a product before the bias is added, PyTorch after that.
FIRST_LOSS = {"float32": 1e-6, "unscaled": 5e-5, "scaled": 5e-5, "bfloat16": 2e-4, "native": 2e-4}
# Weights' gradients that are sums of float16's smallest numbers, some of which one of the two rounds to zero.
SMALLEST = {"unscaled": 128 * 2.0**-24}


class Recorded:
    """A run, and the gradients of the weights at its first step: not scaled, of shape (in, out)."""

    def __init__(self, framework: str, name: str) -> None:
        precision, policy, emulate = RUNS[name]
        self.gradients: list = []

        def make(*arguments):
            loop = find_loop(framework)(*arguments, emulate=emulate)
            original = loop.train_on

            def train_on(*of_step):
                step = original(*of_step)
                if not self.gradients:
                    scale = POLICY.init_scale if policy and framework == "jax" else 1.0
                    self.gradients = [
                        (gradient.numpy().T.copy() if framework == "torch" else np.asarray(gradient)) / scale
                        for gradient in step.gradients
                    ]
                return step

            loop.train_on = train_on
            return loop

        problem = replace(autoencoder(digits(), epochs=5), batch_size=479)  # the same shape at every step
        plan = Plan(precision, policy, seed=0)
        self.run = train(problem, plan, make_loop=make, trace=Trace(), on_step=lambda step: None)
        self.losses = [step.loss for step in self.run.trace]
        self.skipped = any(step.skipped for step in self.run.trace)


@pytest.fixture(scope="module")
def pairs():
    return {name: (Recorded("jax", name), Recorded("torch", name)) for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_the_first_gradients_are_those_of_torch(pairs, name):
    mine, theirs = pairs[name]
    for ours, other in zip(mine.gradients, theirs.gradients, strict=True):
        finite = np.isfinite(other)
        assert (np.isfinite(ours) == finite).all()
        far = np.abs(ours[finite] - other[finite]).max(initial=0.0)
        assert far <= ROUNDING[name] * np.abs(other[finite]).max(initial=0.0) + SMALLEST.get(name, 0.0)


@pytest.mark.parametrize("name", RUNS)
def test_every_step_has_the_peak_of_the_scaled_gradients(pairs, name):
    """On a step that overflows, of what is finite; in JAX the gradients of weights are float32."""
    for one, largest in zip(pairs[name], (np.inf, 65504.0), strict=True):
        amaxes = [step.amax for step in one.run.trace]
        first = max(np.abs(layer).max() for layer in one.gradients)
        assert amaxes[0] == pytest.approx(first * one.run.trace[0].scale, rel=1e-6)
        assert 0.0 < min(amaxes) <= max(amaxes) <= largest


def test_what_vanishes_without_scaling_is_the_gradient_of_the_same_layers(pairs):
    gone = {
        name: [not np.any(layer) for layer in pairs[name][0].gradients]
        for name in ("unscaled", "scaled", "native")
    }
    assert gone == {"unscaled": [True] * 3 + [False] * 5, "scaled": [False] * 8, "native": [False] * 8}
    for mine, theirs in pairs.values():
        assert mine.run.trace[0].zeros == pytest.approx(theirs.run.trace[0].zeros, abs=1e-2)


@pytest.mark.parametrize(("name", "bits"), [("unscaled", 11), ("bfloat16", 8), ("float32", 24)])
def test_rehearsed_gradients_have_the_bits_of_the_precision(pairs, name, bits):
    """A compiler may leave out a rounding between two operations; here none may be left out."""
    of_jax, of_torch = (
        np.frexp(np.concatenate([np.ravel(layer) for layer in one.gradients]))[0] for one in pairs[name]
    )
    fits = lambda mantissas, width: (mantissas * 2.0**width % 1.0 == 0.0).all()  # noqa: E731
    assert fits(of_torch, bits)
    assert not fits(of_torch, bits - 1)
    assert fits(of_jax, 24)
    assert not fits(of_jax, min(bits, 23))  # the gradients of weights leave their products in float32


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_answers_are_those_of_torch(pairs, name):
    mine, theirs = pairs[name]
    assert mine.losses[0] == pytest.approx(theirs.losses[0], rel=FIRST_LOSS[name])
    if not theirs.skipped:  # fewer gradients overflow in JAX, as those of weights are float32
        assert mine.losses == pytest.approx(theirs.losses, rel=2e-3)
        assert mine.run.test_error == pytest.approx(theirs.run.test_error, rel=1e-3)
        assert np.abs(mine.run.outputs - theirs.run.outputs).max() < 0.01
    for one in (mine, theirs):
        assert one.losses[-1] < 0.9 * one.losses[0]


def test_values_are_rounded_as_they_are_natively(pairs):
    first = {name: mine.losses[0] for name, (mine, _) in pairs.items()}
    assert first["unscaled"] == first["scaled"] == first["native"]
    assert len(set(first.values())) == 3


def test_a_policy_that_gives_up_ends_the_run_after_the_same_step():
    policy = Dynamic(init_scale=2.0**32, min_scale=2.0**30, at_floor="raise")
    plan, problem = Plan("float16", policy, seed=0), autoencoder(digits(), epochs=1)
    for framework in ("jax", "torch"):
        make = find_loop(framework)
        result = train(problem, plan, make_loop=make, trace=Trace(), on_step=lambda step: None)
        assert [step.skipped for step in result.trace] == [True] * 3
        assert "gives up" in result.trace.stopped


def test_the_output_the_summary_and_the_report_name_the_framework_and_its_release(here, tmp_path):
    done = here("train", "--framework", "jax", "--steps", "2", "--precision", "float16", "--out", "o")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "o/summary.json").read_text())
    assert summary["release"] == f"JAX {version('jax')}"
    assert f"\nTrained with JAX {version('jax')}.\n" in done.stdout
    report = (tmp_path / "o/report.html").read_text()
    assert f"trained with JAX {version('jax')}." in report
    assert report.count("<svg") == 3 + 2 * 3  # and three kinds of values of each run


WITHOUT = """
import sys
from preamp.cli.app import run

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
sys.exit(run(["train", "--framework", "jax", "--epochs", "1"]))
"""


@pytest.mark.parametrize("absent", ["optax", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_missing_package_is_one_line_with_the_remedy(tmp_path, absent):
    command = [sys.executable, "-c", WITHOUT, absent]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = f"preamp: {absent} is missing. Run: pip install 'preamp[jax]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
