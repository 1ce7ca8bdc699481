"""Run a user's function in each precision and compare the losses: `preamp check --model MODULE:FUNCTION`.

Each precision has a process of its own that imports the module with the same seed. So what the function
changes, such as weights, the state of an optimizer and random numbers, does not reach the next precision.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from preamp.cli.lab.inspected import find_function
from preamp.errors import MissingExtra, PreampError, UsageError
from preamp.machine import MachineReport
from preamp.machine.measurements import first_line, timed

SEED = 0


@dataclass
class PrecisionRun:
    """The calls of a function in one precision.

    Attributes:
        precision: "float32" runs without autocast.
        emulate: whether autocast rounded in float32 instead of casting.
        losses: what the function returned, call by call.
        seconds: how long each call took.
        device: the device type of the loss; "" if it is a plain number.
        problem: why the run ended early, in one line.
        refused: what is wrong with the target itself.
    """

    precision: str
    emulate: bool = False
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    device: str = ""
    problem: str = ""
    refused: str = ""

    @property
    def name(self) -> str:
        """The precision, and whether it is emulated."""
        return f"{self.precision}, emulated" if self.emulate else self.precision

    @property
    def usual_seconds(self) -> float:
        """The median of all calls but the first, which may compile and allocate."""
        return median(self.seconds[1:] or self.seconds)


def run_in_float32(target: str, framework: str, calls: int) -> PrecisionRun:
    """Run a function without autocast in a process of its own.

    Args:
        target: "MODULE:FUNCTION", called without arguments; it returns the loss.
        framework: "torch" or "jax".
        calls: how often to call it.

    Raises:
        PreampError: for a target that does not exist, or a function that raises or returns no loss.
    """
    found = _run_apart(PrecisionRun("float32"), target, framework, "", calls)
    if found.refused:
        raise PreampError(found.refused)
    if found.problem:
        raise PreampError(
            f"{target} fails in float32, without autocast: {found.problem}. Write a function that runs by "
            "itself and returns the loss."
        )
    return found


def run_in_low_precision(
    reference: PrecisionRun, target: str, framework: str, report: MachineReport
) -> list[PrecisionRun]:
    """Run a function under autocast in bfloat16 and float16, each in a process of its own.

    float16 is emulated where the machine has no fast one.

    Args:
        reference: the run in float32.
        target: as in `run_in_float32`.
        framework: as in `run_in_float32`.
        report: what the machine can do.
    """
    device = reference.device or report.rows[0].device
    native = {
        row.precision
        for row in report.rows
        if row.device == device and all(one.verdict == "native" for one in row.products.values())
    }
    runs = [PrecisionRun("bfloat16"), PrecisionRun("float16", emulate="float16" not in native)]
    return [_run_apart(run, target, framework, device, len(reference.losses)) for run in runs]


def table(runs: Sequence[PrecisionRun]) -> list[dict[str, str]]:
    """Return a row for each precision, the first of which is what the others are compared with."""
    return [_row(run, runs[0]) for run in runs]


def _row(run: PrecisionRun, reference: PrecisionRun) -> dict[str, str]:
    done = len(run.losses) == len(reference.losses)
    last, expected = (run.losses[-1] if done else math.nan), reference.losses[-1]
    return {
        "precision": run.name,
        "first loss": f"{run.losses[0]:.6g}" if run.losses else "-",
        "last loss": f"{last:.6g}" if done else "-",
        "difference": "-" if run is reference or not done else _difference(last, expected),
        "time": f"{run.usual_seconds / reference.usual_seconds:.2f}x" if done else "-",
    }


def _difference(loss: float, expected: float) -> str:
    if not math.isfinite(loss):
        return "not finite"
    if not math.isfinite(expected):
        return "-"
    return f"{abs(loss - expected) / abs(expected):.2%}" if expected else f"{abs(loss):.2g}"


def sentences(runs: Sequence[PrecisionRun]) -> list[str]:
    """Return what the table cannot say: what was raised, and from which call on losses are not finite."""
    found = [f"{run.name}: {run.problem}." for run in runs if run.problem]
    for run in runs:
        bad = next((n for n, loss in enumerate(run.losses, 1) if not math.isfinite(loss)), None)
        if bad:
            found.append(f"{run.name}: the loss is {run.losses[bad - 1]} in call {bad}.")
    if any(run.emulate for run in runs):
        found.append("Emulated: products round to float16 and compute in float32, so the time says nothing.")
    return found


def _run_apart(run: PrecisionRun, target: str, framework: str, device: str, calls: int) -> PrecisionRun:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        asked = json.dumps([asdict(run), target, framework, device, calls, str(path)])
        done = subprocess.run(
            [sys.executable, "-m", __name__, asked],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": str(SEED)},
            check=False,
        )
        if path.exists():
            return PrecisionRun(**json.loads(path.read_text()))
    run.problem = f"its process ended with status {done.returncode} before it was done"
    return run


def _measure(run: PrecisionRun, target: str, framework: str, device: str, calls: int) -> None:
    """Call a function in a precision and write down what it returns, in the process that is for it."""
    call = (_prepare_torch if framework == "torch" else _prepare_jax)(run, target, device)
    for _ in range(calls):
        returned: list[Any] = []
        taken = timed(lambda returned=returned: returned.append(call()))  # type: ignore[misc]
        run.losses.append(returned[0])
        run.seconds.append(taken)


def _prepare_torch(run: PrecisionRun, target: str, device: str) -> Callable[[], float]:
    try:
        import torch

        from preamp.torch import autocast
    except ImportError as error:
        raise MissingExtra.of(error, "preamp[torch]") from error
    torch.manual_seed(SEED)
    function = find_function(target)
    region: AbstractContextManager[object] = nullcontext()
    if run.precision != "float32":
        region = autocast(device, getattr(torch, run.precision), emulate=run.emulate)

    def call() -> float:
        with region:
            loss = function()
        if isinstance(loss, torch.Tensor):
            run.device = loss.device.type
            loss = loss.detach()
        return _number(target, loss)

    return call


def _prepare_jax(run: PrecisionRun, target: str, device: str) -> Callable[[], float]:
    try:
        import jax
    except ImportError as error:
        raise MissingExtra.of(error, "preamp[jax]") from error
    from preamp.jax import autocast

    function = find_function(target)
    if run.precision != "float32":
        function = autocast(function, dtype=run.precision, emulate=run.emulate)
    run.device = jax.default_backend()
    return lambda: _number(target, function())


def _number(target: str, loss: Any) -> float:
    if getattr(loss, "size", 1) == 0 or isinstance(loss, (bool, str)):
        loss = None
    try:
        return float(loss)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(loss).__name__
        raise UsageError(
            f"{target} returned {'no number' if loss is None else f'a {kind}'}. Write a function that "
            "returns the loss: a number, or a tensor with one element."
        ) from error


def _main(asked: str) -> None:
    settings, target, framework, device, calls, path = json.loads(asked)
    run = PrecisionRun(**settings)
    random.seed(SEED)
    with suppress(ImportError):
        import numpy

        numpy.random.seed(SEED)
    try:
        _measure(run, target, framework, device, calls)
    except PreampError as error:
        run.refused = str(error)
        run.problem = first_line(error)
    except Exception as error:  # a user's function raises anything
        if run.precision == "float32":
            traceback.print_exc()
        run.problem = first_line(error)
    Path(path).write_text(json.dumps(asdict(run)))


if __name__ == "__main__":
    _main(sys.argv[1])
