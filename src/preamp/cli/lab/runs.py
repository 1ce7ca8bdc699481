"""Run the trainings of a comparison and record their traces."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from preamp.cli.lab import KERAS_BACKENDS, Framework, Precision, Task
from preamp.cli.lab.loop import Loop
from preamp.cli.lab.problem import Problem, autoencoder, classify
from preamp.errors import MissingExtra, PreampError, ScaleExhausted
from preamp.policy import Policy
from preamp.record.files import replacing
from preamp.record.trace import Trace
from preamp.scaling import Step

TASKS: dict[Task, Callable[..., Problem]] = {"autoencoder": autoencoder, "classify": classify}

# What each loop imports, the framework first, in the order of preference. TensorFlow's loop needs no
# KERAS_BACKEND, so it comes before Keras's.
PACKAGES: dict[Framework, tuple[str, ...]] = {
    "torch": ("torch",),
    "jax": ("jax", "optax"),
    "tensorflow": ("tensorflow", "keras"),
    "keras": ("keras",),
}
TITLES: dict[str, str] = {"torch": "PyTorch", "jax": "JAX", "tensorflow": "TensorFlow", "keras": "Keras"}

CHATTER = re.compile(rb"[IWE]\d{4} |WARNING: All log messages before absl::InitializeLog")


@dataclass(frozen=True)
class Plan:
    """A planned run. `policy=None` does not scale the loss."""

    precision: Precision
    policy: Policy[Any] | None
    seed: int

    @property
    def name(self) -> str:
        """What the run is called, without its seed."""
        if self.precision != "float16":
            return self.precision
        return "float16 + preamp" if self.policy else "float16, no scaling"

    @property
    def file_name(self) -> str:
        """What its folder is called."""
        scaled = ("-preamp" if self.policy else "-unscaled") if self.precision == "float16" else ""
        return f"{self.precision}{scaled}-seed{self.seed}"


@dataclass(frozen=True)
class Run:
    """A plan that was carried out.

    Attributes:
        plan: what was run.
        trace: every step.
        test_error: mean squared error, or the share of wrong labels.
        test_accuracy: the share of right labels, for tasks that have them.
        seconds: wall time of the training.
        outputs: the network's outputs for the test rows.
        interrupted: True when Ctrl-C ended the training.
    """

    plan: Plan
    trace: Trace
    test_error: float
    test_accuracy: float | None
    seconds: float
    outputs: NDArray[np.float32] = field(repr=False)
    interrupted: bool = False


def plans(precisions: list[Precision], policy: Policy[Any], seeds: int, first_seed: int) -> list[Plan]:
    """Return the runs of a comparison: float16 is run twice, without and with loss scaling."""
    policies: dict[Precision, list[Policy[Any] | None]] = {"float16": [None, policy]}
    return [
        Plan(precision, choice, seed)
        for seed in range(first_seed, first_seed + seeds)
        for precision in precisions
        for choice in policies.get(precision, [None])
    ]


def choose_framework() -> Framework:
    """Return the first framework in `PACKAGES` that can train here, without importing any.

    If none has everything that it needs, return the first that has a part: `find_loop` says what is missing.
    """
    found = [name for name, (framework, *_) in PACKAGES.items() if _is_installed(framework)]
    if not found:
        raise MissingExtra("No framework to train with is installed. Run: pip install 'preamp[jax]'")
    ready = [name for name in found if all(map(_is_installed, PACKAGES[name]))]
    return (ready or found)[0]


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # from a finder, or for a module that failed to load
        return False


def find_loop(framework: Framework) -> Callable[..., Loop]:
    """Return the `Loop` of a framework.

    Raises:
        PreampError: for a framework without a loop, or one that cannot work in this process.
        MissingExtra: for a framework that is not installed.
    """
    known = get_args(Framework)
    if framework not in known:
        raise PreampError(f"framework {framework!r} is unknown. Write one of {', '.join(known)}.")
    try:
        with _without_chatter():
            return import_module(f"preamp.cli.lab.{framework}_loop").LOOP  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{error.name} is missing. {_remedy(error.name, framework)}") from error


def release_of(framework: Framework) -> str:
    """Return a framework whose loop was found, with its release, such as "Keras 3.15.1 on JAX 0.10.2"."""
    names: list[str] = [framework]
    if framework == "keras":
        names.append(sys.modules["keras"].backend.backend())
    return " on ".join(f"{TITLES[name]} {sys.modules[name].__version__}" for name in names)


def _remedy(package: str | None, framework: Framework) -> str:
    """Say what to do about a missing package: install it, or let Keras run on another backend."""
    usable = {"keras": KERAS_BACKENDS, "tensorflow": ("tensorflow",)}.get(framework, ())
    others = " or ".join(name for name in usable if name != package)
    installed = [name for name in usable if name != package and _is_installed(name)]
    if installed and package in usable:
        return (
            f"Keras is set to run on it. Set KERAS_BACKEND={installed[0]}, which is installed, "
            f"or run: pip install {package}"
        )
    if others and package in usable:
        return f"Keras is set to run on it. Run: pip install {package}, or set KERAS_BACKEND to {others}."
    if others and package == os.environ.get("KERAS_BACKEND"):
        return f"This training cannot run on it anyway. Set KERAS_BACKEND to {others}."
    return f"Run: pip install 'preamp[{framework}]'"


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Drop the start-up messages of TensorFlow's libraries while they are loaded.

    They write to file descriptor 2 before they can be configured. Everything else is passed on.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # for later messages
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # it warns that each run traces again
    if sys.stderr is None:  # closed
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held, os.fdopen(os.dup(2), "wb") as stderr:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr.fileno(), 2)
            held.seek(0)
            stderr.writelines(line for line in held if not CHATTER.match(line))


def train(
    problem: Problem,
    plan: Plan,
    *,
    make_loop: Callable[..., Loop],
    trace: Trace,
    on_step: Callable[[Step], object],
) -> Run:
    """Carry out a plan. Ctrl-C and a policy that gives up end it early; `trace.stopped` says so."""
    loop = make_loop(problem, plan.precision, plan.policy, plan.seed)
    interrupted = False
    if hasattr(loop, "lens"):
        loop.lens.on_snapshot = trace.add_snapshot
    try:
        for step in loop.steps():
            trace(step)
            on_step(step)
    except ScaleExhausted as reason:
        trace.stop(str(reason))
    except KeyboardInterrupt:
        interrupted = True
        trace.stop("interrupted")
    outputs = loop.outputs()
    error, accuracy = problem.score(outputs)
    seconds = sum(step.seconds or 0.0 for step in trace)
    return Run(plan, trace, error, accuracy, seconds, outputs, interrupted)


def write_summary(path: Path, problem: Problem, framework: Framework, runs: list[Run]) -> None:
    """Write the results as JSON."""
    summary = {
        "task": problem.task,
        "framework": framework,
        "release": release_of(framework),
        "runs": [_entry(run) for run in runs],
    }
    with replacing(path) as file:
        file.write((json.dumps(summary, indent=2) + "\n").encode())


def _entry(run: Run) -> dict[str, Any]:
    summary = run.trace.summary()
    return {
        "name": run.plan.name,
        "precision": run.plan.precision,
        "scaled": run.plan.policy is not None,
        "policy": repr(run.plan.policy) if run.plan.policy else None,
        "seed": run.plan.seed,
        "test_error": run.test_error,
        "test_accuracy": run.test_accuracy,
        "seconds": round(run.seconds, 3),
        "stopped": run.trace.stopped,
        **summary._asdict(),
    }
