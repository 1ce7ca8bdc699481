"""Run the trainings of a comparison and record their traces."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preamp.cli.lab import Framework, Precision, Task
from preamp.cli.lab.loop import Loop
from preamp.cli.lab.problem import Problem, autoencoder, classify
from preamp.errors import MissingExtra, ScaleExhausted
from preamp.policy import Policy
from preamp.record.files import replacing
from preamp.record.trace import Trace
from preamp.scaling import Step

TASKS: dict[Task, Callable[..., Problem]] = {"autoencoder": autoencoder, "classify": classify}

TITLES: dict[Framework, str] = {"torch": "PyTorch", "jax": "JAX"}


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
    """Return the first framework in `TITLES` that is installed, without importing any."""
    for framework in TITLES:
        if _is_installed(framework):
            return framework
    raise MissingExtra("No framework to train with is installed. Run: pip install 'preamp[jax]'")


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # from a finder, or for a module that failed to load
        return False


def find_loop(framework: Framework) -> Callable[..., Loop]:
    """Return the `Loop` of a framework.

    Raises:
        MissingExtra: for a framework that is not installed.
    """
    try:
        if framework == "torch":
            from preamp.cli.lab.torch_loop import TorchLoop

            return TorchLoop
        from preamp.cli.lab.jax_loop import JaxLoop

        return JaxLoop
    except ModuleNotFoundError as error:
        raise MissingExtra.of(error, f"preamp[{framework}]") from error


def release_of(framework: Framework) -> str:
    """Return a framework whose loop was found, with its release, such as "JAX 0.10.2"."""
    return f"{TITLES[framework]} {sys.modules[framework].__version__}"


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
