"""The same training in JAX, in Keras on each backend and in TensorFlow: what PyTorch's loop does, they do.

Each peer has a process of its own (`lab_worker.py`): it runs the command line, then looks into its loop.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

PEERS = {
    "jax": ("jax", "jax"),
    "keras-jax": ("keras", "jax"),
    "keras-torch": ("keras", "torch"),
    "keras-tensorflow": ("keras", "tensorflow"),
    "tensorflow": ("tensorflow", "tensorflow"),
}
SMALL = ["--data", "table.csv", "--epochs", "3", "--precision", "float16"]
GIVES_UP = ["--policy.init-scale", str(2.0**32), "--policy.max-consecutive-overflows", "2"]

# How far the first gradients of a layer may be from PyTorch's, over its largest: sums in another order, then
# rounded. The CPU's own float16 products may be summed in float16.
ROUNDING = {
    "float32": 8 * 2.0**-23,
    "unscaled": 2.0**-9,
    "scaled": 2.0**-9,
    "bfloat16": 2.0**-6,
    "native": 2.0**-5,
}

# Over PyTorch's loss at the first step. Rounding moves it by 1e-5 in float16, by 1e-4 in bfloat16.
FIRST_LOSS = {"float32": 1e-6, "unscaled": 1e-6, "scaled": 1e-6, "bfloat16": 1e-5, "native": 2e-4}

# Over PyTorch's loss at every step: Keras's Adam adds its epsilon to a root that is not corrected yet.
LOSS = 1e-3


@dataclass
class Peer:
    """What a process of a framework printed and wrote."""

    stdout: str
    stderr: str
    summary: dict
    report: str
    runs: dict
    name: str


def environment(backend: str) -> dict[str, str]:
    quick = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # to compile; rounds the same
    return {**quick, **os.environ, "COLUMNS": "80", "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"}


def start(name: str, folder: Path) -> Peer:
    framework, backend = PEERS.get(name, (name, name))
    rows = [f"{x / 125},{(x * 7 % 125) / 125},{'high' if x > 62 else 'low'}" for x in range(125)]
    (folder / "table.csv").write_text("\n".join(rows))
    worker = str(Path(__file__).with_name("lab_worker.py"))
    command = [sys.executable, worker, framework, str(folder), *SMALL, *GIVES_UP, "--out", "out"]
    done = subprocess.run(
        command, cwd=folder, env=environment(backend), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "out/summary.json").read_text())
    report = (folder / "out/report.html").read_text()
    runs = json.loads((folder / "runs.json").read_text())
    return Peer(done.stdout, done.stderr, summary, report, runs, name)


@pytest.fixture(scope="module")
def torch_peer(tmp_path_factory):
    return start("torch", tmp_path_factory.mktemp("torch"))


ALSO = ("keras-jax", "keras-tensorflow")  # the loop of keras-torch again
EACH = [pytest.param(name, marks=[pytest.mark.slow] * (name in ALSO)) for name in PEERS]


@pytest.fixture(scope="module", params=EACH)
def peer(request, tmp_path_factory):
    return start(request.param, tmp_path_factory.mktemp(request.param))


RELEASES = {
    "torch": {"torch": "PyTorch"},
    "jax": {"jax": "JAX"},
    "keras-jax": {"keras": "Keras", "jax": "JAX"},
    "keras-torch": {"keras": "Keras", "torch": "PyTorch"},
    "keras-tensorflow": {"keras": "Keras", "tensorflow": "TensorFlow"},
    "tensorflow": {"tensorflow": "TensorFlow"},
}


def table(printed: str) -> list[list[str]]:
    """Return the cells of the table, but for the seconds, and the lines under it but for the framework's."""
    lines = [line.rstrip() for line in printed.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Trained with ")]
    return [line.split()[:-1] if number < 4 else [line] for number, line in enumerate(lines)]


def test_the_command_line_prints_what_it_does_for_torch(peer, torch_peer):
    assert table(peer.stdout) == table(torch_peer.stdout)
    assert max(map(len, peer.stdout.splitlines())) <= 80
    assert peer.stderr == ""


def test_the_output_the_summary_and_the_report_name_the_framework_and_its_release(peer, torch_peer):
    for one in (peer, torch_peer):
        release = one.summary["release"]
        assert f"\nTrained with {release}.\n" in one.stdout
        said = dict(part.split() for part in release.split(" on "))
        # PyTorch's __version__ has more than its metadata: 2.13.0+cu130.
        assert {name: number.partition("+")[0] for name, number in said.items()} == {
            name: version(package).partition("+")[0] for package, name in RELEASES[one.name].items()
        }
        assert f"trained with {release}." in one.report


def test_the_summary_and_the_report_are_those_of_torch(peer, torch_peer):
    def without_time(summary):
        return [{k: v for k, v in run.items() if k != "seconds"} for run in summary["runs"]]

    unscaled, scaled = without_time(peer.summary)
    their_unscaled, their_scaled = without_time(torch_peer.summary)
    assert scaled == their_scaled
    assert (scaled["skipped"], "gives up" in scaled["stopped"]) == (3, True)
    assert unscaled == {**their_unscaled, "test_error": unscaled["test_error"]}
    seen = {"jax": 3}.get(peer.name, 0)  # kinds of values, in each of two runs
    assert peer.report.count("<svg") == 3 + 2 * seen
    assert torch_peer.report.count("<svg") == 3 + 2 * 3


@pytest.mark.parametrize("run", ROUNDING)
def test_the_first_gradients_are_those_of_torch(peer, torch_peer, run):
    pairs = zip(peer.runs[run]["gradients"], torch_peer.runs[run]["gradients"], strict=True)
    for mine, theirs in ((np.array(a), np.array(b)) for a, b in pairs):
        finite = np.isfinite(theirs)
        assert (np.isfinite(mine) == finite).all()
        far = np.abs(mine[finite] - theirs[finite]).max(initial=0.0)
        assert far <= ROUNDING[run] * np.abs(theirs[finite]).max(initial=0.0)


@pytest.mark.parametrize("run", ROUNDING)
def test_every_step_has_the_peak_of_the_scaled_gradients(peer, run):
    """On a step that overflows, of what is finite: in float16 at most its largest number.

    In JAX the gradients of weights leave their products in float32.
    """
    first = max(np.abs(layer).max() for layer in peer.runs[run]["gradients"])
    scale = peer.runs[run]["steps"][0][0] if peer.runs[run]["steps"] else 1.0
    peaks = peer.runs[run]["peaks"]
    assert peaks[0] == pytest.approx(first * scale, rel=1e-6)
    assert len(peaks) == len(peer.runs[run]["losses"])
    assert 0.0 < min(peaks) <= max(peaks) <= (np.inf if peer.name == "jax" else 65504.0)


def test_what_vanishes_without_scaling_is_the_gradient_of_the_same_layers(peer, torch_peer):
    gone = {
        run: [not np.any(layer) for layer in peer.runs[run]["gradients"]]
        for run in ("unscaled", "scaled", "native")
    }
    assert gone == {"unscaled": [True] * 3 + [False] * 5, "scaled": [False] * 8, "native": [False] * 8}
    for run in ROUNDING:
        assert peer.runs[run]["zeros"] == pytest.approx(torch_peer.runs[run]["zeros"], abs=1e-3)


@pytest.mark.parametrize(("run", "bits"), [("unscaled", 11), ("bfloat16", 8), ("float32", 24)])
def test_rehearsed_gradients_have_the_bits_of_the_precision(peer, run, bits):
    """A compiler may leave out a rounding between two operations; here none may be left out."""
    mantissas, _ = np.frexp(np.concatenate([np.ravel(layer) for layer in peer.runs[run]["gradients"]]))
    fits = lambda width: (mantissas * 2.0**width % 1.0 == 0.0).all()  # noqa: E731
    if peer.name == "jax" and bits < 24:  # the gradients of weights leave their products in float32
        assert not fits(bits)
        return
    assert fits(bits)
    assert not fits(bits - 1)


@pytest.mark.parametrize("run", ["scaled", "native"])
def test_the_scale_moves_as_in_torch(peer, torch_peer, run):
    scales, _, skipped, new = zip(*peer.runs[run]["steps"], strict=True)
    if peer.name != "jax":  # where fewer gradients overflow, as those of weights are float32
        assert peer.runs[run]["steps"] == torch_peer.runs[run]["steps"]
        assert 0 < sum(skipped) < len(skipped)
    assert any(after > before for before, after in zip(scales, new, strict=True))


@pytest.mark.parametrize("run", ROUNDING)
def test_losses_and_answers_are_those_of_torch(peer, torch_peer, run):
    mine, theirs = peer.runs[run], torch_peer.runs[run]
    assert mine["losses"][0] == pytest.approx(theirs["losses"][0], rel=FIRST_LOSS[run])
    if peer.name != "jax" or not any(step[2] for step in theirs["steps"]):  # other steps are skipped there
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=LOSS)
        assert mine["test_error"] == pytest.approx(theirs["test_error"], rel=LOSS)
        assert np.abs(np.subtract(mine["outputs"], theirs["outputs"])).max() < 0.01
    assert theirs["losses"][-1] < 0.9 * theirs["losses"][0]
    assert mine["losses"][-1] < 0.9 * mine["losses"][0]


def test_values_are_rounded_and_natively_in_a_way_of_their_own(peer):
    first = {run: peer.runs[run]["losses"][0] for run in ROUNDING}
    assert first["unscaled"] == first["scaled"]
    assert len(set(first.values())) == 4


WITHOUT = """
import sys
from preamp.cli.app import run

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
sys.exit(run(sys.argv[2:]))
"""


def refusal(tmp_path: Path, framework: str, backend: str, absent: str = "") -> str:
    """Return what the command says where a package is absent."""
    arguments = ["train", "--framework", framework, "--epochs", "1"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, absent, *arguments],
        cwd=tmp_path,
        env={**environment(backend), "KERAS_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


def slow(*values: str) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("framework", "backend", "absent", "said"),
    [
        ("jax", "", "optax", "optax is missing. Run: pip install 'preamp[jax]'"),
        slow("jax", "", "jax", "jax is missing. Run: pip install 'preamp[jax]'"),
        slow("keras", "jax", "keras", "keras is missing. Run: pip install 'preamp[keras]'"),
        slow("tensorflow", "", "tensorflow", "tensorflow is missing. Run: pip install 'preamp[tensorflow]'"),
        (
            "keras",
            "jax",
            "jax",
            "jax is missing. Keras is set to run on it. Set KERAS_BACKEND=torch, which is installed, "
            "or run: pip install jax",
        ),
        slow(
            "keras",
            "",
            "tensorflow",
            "tensorflow is missing. Keras is set to run on it. Set KERAS_BACKEND=jax, which is installed, "
            "or run: pip install tensorflow",
        ),
        slow(
            "keras",
            "openvino",
            "openvino",
            "openvino is missing. This training cannot run on it anyway. "
            "Set KERAS_BACKEND to jax or torch or tensorflow.",
        ),
        slow(
            "tensorflow",
            "jax",
            "jax",
            "jax is missing. This training cannot run on it anyway. Set KERAS_BACKEND to tensorflow.",
        ),
    ],
)
def test_a_missing_package_is_one_line_with_the_remedy(tmp_path, framework, backend, absent, said):
    assert refusal(tmp_path, framework, backend, absent) == f"preamp: {said}\n"


@pytest.mark.parametrize(
    ("framework", "backend", "said"),
    [
        slow("keras", "abacus", "abacus. Set KERAS_BACKEND to one of jax, torch, tensorflow."),
        (
            "keras",
            "numpy",
            "Keras cannot train on numpy. Set KERAS_BACKEND to one of jax, torch, tensorflow.",
        ),
        slow("tensorflow", "jax", "KERAS_BACKEND=jax, but the optimizers of tf.keras are Keras's."),
    ],
)
def test_a_backend_that_cannot_train_is_one_line(tmp_path, framework, backend, said):
    printed = refusal(tmp_path, framework, backend)
    assert said in printed
    assert printed.startswith("preamp: ")
    assert printed.count("\n") == 1
