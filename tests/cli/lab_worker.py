"""A process of its own for one framework's training loop: Keras has one backend for life.

    python lab_worker.py FRAMEWORK FOLDER [ARGUMENT ...]

runs `preamp train --framework FRAMEWORK ARGUMENT ...` first, so that both streams are as a user sees them.
Then it writes to FOLDER/runs.json what each of `RUNS` came to.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from preamp import Dynamic, Trace
from preamp.cli.app import run as command_line

POLICY = Dynamic(init_scale=2.0**23, growth_interval=3)  # its first growth overflows
RUNS = {  # precision, policy and whether it is rehearsed
    "float32": ("float32", None, True),
    "unscaled": ("float16", None, True),
    "bfloat16": ("bfloat16", None, True),
    "scaled": ("float16", POLICY, True),
    "native": ("float16", POLICY, False),
}


class Recorded:
    """Makes a framework's loop and keeps the gradients of the weights at its first step, not scaled."""

    def __init__(self, make: Any, emulate: bool) -> None:
        self.make, self.emulate, self.gradients = make, emulate, []

    def __call__(self, problem: Any, precision: Any, policy: Any, seed: int) -> Any:
        loop = self.make(problem, precision, policy, seed, emulate=self.emulate)
        original = loop.train_on

        def train_on(*arguments: Any) -> Any:
            step = original(*arguments)
            if not self.gradients:
                self.gradients = [gradient.tolist() for gradient in first_gradients(loop, step.gradients)]
            return step

        loop.train_on = train_on
        return loop


def first_gradients(loop: Any, gradients: list[Any]) -> list[Any]:
    """Return the gradients after a first step, each with rows for inputs and columns for outputs."""
    if type(loop).__name__ == "TorchLoop":
        return [gradient.numpy().T for gradient in gradients]
    if type(loop).__name__ == "KerasLoop":
        import keras

        gradients = list(map(keras.ops.convert_to_numpy, gradients))
        if keras.backend.backend() == "torch":  # a parameter's gradient is unscaled in its place
            return gradients
    return [np.asarray(gradient) / (POLICY.init_scale if loop.policy else 1.0) for gradient in gradients]


def all_runs(framework: str) -> dict[str, Any]:
    """Carry out `RUNS` on batches of a third of the rows: the same shape at every step."""
    from preamp.cli.lab.data import digits
    from preamp.cli.lab.problem import autoencoder
    from preamp.cli.lab.runs import Plan, find_loop, train

    problem = replace(autoencoder(digits(), epochs=5), batch_size=479)
    found = {}
    for name, (precision, policy, emulate) in RUNS.items():
        make = Recorded(find_loop(framework), emulate)
        plan = Plan(precision, policy, seed=0)
        run = train(problem, plan, make_loop=make, trace=Trace(), on_step=lambda step: None)
        found[name] = {
            "steps": [(s.scale, s.finite, s.skipped, s.new_scale) for s in run.trace] if policy else [],
            "losses": [s.loss for s in run.trace],
            "peaks": [s.peak for s in run.trace],
            "zeros": run.trace[0].zeros,
            "test_error": run.test_error,
            "outputs": np.asarray(run.outputs).tolist(),
            "gradients": make.gradients,
        }
    return found


if __name__ == "__main__":
    framework, folder, *arguments = sys.argv[1:]
    status = command_line(["train", "--framework", framework, *arguments])
    if status == 0:
        (Path(folder) / "runs.json").write_text(json.dumps(all_runs(framework)))
    sys.exit(status)
