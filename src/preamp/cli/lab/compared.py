"""Run a user's function in each precision and compare the losses: `preamp check --model MODULE:FUNCTION`.

Each precision runs in a new process that imports the module with the same seed, so that changes to weights,
optimizer state and random numbers do not reach the next precision. A function of JAX is traced once and
compiled in every process, also in float32, so that times can be compared. Regions of autocast that the
function enters itself are off in float32, and have the precision of the row in the others.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import preamp
from preamp.autocasting.tables import Casting
from preamp.cli.lab.inspected import casting_region, find_function, model_of
from preamp.errors import MissingExtra, PreampError, UsageError
from preamp.machine import FASTER, SLOWER, MachineReport, PrecisionRow
from preamp.machine.measurements import first_line, timed
from preamp.recipes.values import named

SEED = 0
LAST = 0.1  # the part of the losses that are averaged
WORST = 3  # products that are named of each recipe
FEWEST_TIMED = 3  # calls, the first of which compiles and allocates
ABOUT = 1.1  # times as fast: less is about as fast
ITSELF = "Write a function that runs by itself and returns the loss."
IMPURE = (
    "A function of JAX is traced, so it must not read values, as float(loss) and if loss > 0 do, or write "
    "arrays to globals and objects. Return the loss of a pure function."
)


@dataclass
class PrecisionRun:
    """The calls of a function in one precision.

    Attributes:
        precision: "float32" runs without autocast.
        emulate: whether a GPU was rehearsed.
        losses: the returned loss of each call.
        seconds: how long each call took.
        device: the device type of the loss; "" if it is a plain number.
        problem: why the run ended early, in one line.
        advice: what to do about the problem; "" if that is not known.
        refused: what is wrong with the target itself.
        casting: the edits of autocast's table, as `Casting.to_dict` returns them; None for none.
        finds_model: whether the function is first run once, up to its backward pass, to find its model for
            the rules of modules.
        label: the name of the run, if it is more than its precision.
        widened: the dtype that weights of the model had before they were made float32; "" if none were.
        casts: the lines of the program that ask for low precision, in the run in float32.
        enters_regions: whether the function has regions of autocast itself.
        recipe: the name of the recipe to rehearse; "" for none.
        seed: of random numbers, with which weights and batches are drawn.
        tunes: whether to look for layers to keep high, after the last call.
        tuned: what was found.
    """

    precision: str
    emulate: bool = False
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    device: str = ""
    problem: str = ""
    advice: str = ""
    refused: str = ""
    casting: dict[str, Any] | None = None
    finds_model: bool = False
    label: str = ""
    widened: str = ""
    casts: list[str] = field(default_factory=list)
    enters_regions: bool = False
    recipe: str = ""
    seed: int = SEED
    tunes: bool = False
    tuned: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The precision, and whether it is rehearsed."""
        return self.label or (f"{self.precision}, rehearsed" if self.emulate else self.precision)

    @property
    def last_losses(self) -> float:
        """The mean of the last tenth of the losses; NaN if the run ended early."""
        if self.refused or self.problem or not self.losses:
            return math.nan
        return fmean(self.losses[-max(1, round(LAST * len(self.losses))) :])

    @property
    def usual_seconds(self) -> float:
        """The median of all calls but the first; NaN if there are too few."""
        return median(self.seconds[1:]) if len(self.seconds) >= FEWEST_TIMED else math.nan

    def speed_against(self, reference: PrecisionRun) -> float:
        """How many times as fast as the reference it is; NaN if it was rehearsed or not timed."""
        if self.emulate or len(self.losses) < len(reference.losses):
            return math.nan
        return reference.usual_seconds / max(self.usual_seconds, 1e-9)


def run_in_float32(target: str, framework: str, calls: int) -> PrecisionRun:
    """Run a function without autocast in a process of its own.

    Args:
        target: "MODULE:FUNCTION", called without arguments; it returns the loss.
        framework: "torch" or "jax".
        calls: how often to call it.

    Raises:
        PreampError: for a target that does not exist, or a function that raises or returns no loss.
    """
    found = run_in_process(PrecisionRun("float32"), target, framework, "", calls)
    if found.refused:
        raise PreampError(found.refused)
    if found.problem:
        raise PreampError(
            f"{target} fails in float32, without autocast: {found.problem}. {found.advice or ITSELF}"
        )
    return found


def run_in_low_precision(
    reference: PrecisionRun, target: str, framework: str, report: MachineReport
) -> list[PrecisionRun]:
    """Run a function under autocast in bfloat16 and float16, each in a process of its own.

    float16 is rehearsed where the hardware lacks it or is slower in it than in float32.

    Args:
        reference: the run in float32.
        target: as in `run_in_float32`.
        framework: as in `run_in_float32`.
        report: what the machine can do.
    """
    device = reference.device or report.rows[0].device
    half = _row_of(report, device, "float16")
    lacks = half is None or any(one.verdict in ("emulated", "missing") for one in half.products.values())
    is_fast = half is not None and not lacks and half.speed >= SLOWER
    runs = [PrecisionRun("bfloat16"), PrecisionRun("float16", emulate=not is_fast)]
    return [run_in_process(run, target, framework, device, len(reference.losses)) for run in runs]


def _row_of(report: MachineReport, device: str, precision: str) -> PrecisionRow | None:
    found = (row for row in report.rows if (row.device, row.precision) == (device, precision))
    return next(found, None)


def table(runs: Sequence[PrecisionRun]) -> list[dict[str, str]]:
    """Return a row for each precision, the first of which is what the others are compared with."""
    return [_row(run, runs[0]) for run in runs]


def _row(run: PrecisionRun, reference: PrecisionRun) -> dict[str, str]:
    done = len(run.losses) == len(reference.losses)
    speed = run.speed_against(reference)
    last, expected = (run.losses[-1] if done else math.nan), reference.losses[-1]
    return {
        "precision": run.name,
        "first loss": f"{run.losses[0]:.6g}" if run.losses else "-",
        "last loss": f"{last:.6g}" if done else "-",
        "difference": "-" if run is reference or not done else _difference(last, expected),
        "speed": "-" if math.isnan(speed) else f"{speed:.2f}x",
    }


def _difference(loss: float, expected: float) -> str:
    if not math.isfinite(loss):
        return "not finite"
    if not math.isfinite(expected):
        return "-"
    return f"{abs(loss - expected) / abs(expected):.2%}" if expected else f"{abs(loss):.2g}"


def sentences(runs: Sequence[PrecisionRun], target: str, framework: str, report: MachineReport) -> list[str]:
    """Return what the table cannot say: errors, losses that are not finite, and reasons for the speed.

    Args:
        runs: as in `table`.
        target: as in `run_in_float32`.
        framework: as in `run_in_float32`.
        report: what the machine can do.
    """
    reference, others = runs[0], runs[1:]
    found = [f"{run.name}: {f'{run.problem}. {run.advice}'.rstrip()}" for run in runs if run.problem]
    for run in runs:
        bad = next((n for n, loss in enumerate(run.losses, 1) if not math.isfinite(loss)), None)
        if bad:
            found.append(f"{run.name}: the loss is {run.losses[bad - 1]} in call {bad}.")
    if framework == "jax" and any(_is_off(run, reference) for run in others):
        found.append(
            "In JAX autocast casts all that the function computes, the optimizer too. Keep it in float32: "
            "autocast(update, enabled=False) around the function that calls the optimizer."
        )
    if any(run.enters_regions for run in runs):
        found.append(
            f"{target} uses autocast itself: that is off in float32, and in the other rows it has their "
            "precision."
        )
    found += casts_of(reference, framework)
    equal = [run for run in others if run.losses and run.losses == reference.losses]
    if equal:
        flag = "" if framework == "torch" else f" --framework {framework}"
        found.append(
            f"{' and '.join(run.precision for run in equal)}: every loss is exactly that of float32, so "
            f"probably nothing was cast. See what is cast: preamp inspect {target}{flag}"
        )
    for run in others:
        if run not in equal:
            found += _slower_than_products(run, reference, report)
    if any(run.emulate for run in runs):
        found.append(
            "Rehearsed: as on a GPU, but products compute in float32, so float16's speed is not measured."
        )
    if len(reference.losses) < FEWEST_TIMED:
        found.append(f"Speeds need {FEWEST_TIMED} calls or more: the first one warms up.")
    return found


def casts_of(reference: PrecisionRun, framework: str) -> list[str]:
    """Return a sentence about the casts of the program itself in the run in float32."""
    if not reference.casts:
        return []
    rest = f" and {len(reference.casts) - 3} more" if len(reference.casts) > 3 else ""
    what = "these lines gave float32" if framework == "torch" else "they are as in the program"
    return [
        f"The program itself casts to low precision, at {', '.join(reference.casts[:3])}{rest}. In the "
        f"float32 run {what}."
    ]


def _is_off(run: PrecisionRun, reference: PrecisionRun) -> bool:
    """Return whether a run ended with a loss that rounding alone does not explain."""
    if len(run.losses) < len(reference.losses) or not math.isfinite(reference.losses[-1]):
        return False
    return not abs(run.losses[-1] - reference.losses[-1]) <= 0.1 * abs(reference.losses[-1])  # NaN is off


def _slower_than_products(run: PrecisionRun, reference: PrecisionRun, report: MachineReport) -> list[str]:
    """Say so if large products are faster than in float32 on this machine, but the function is not."""
    row, speed = _row_of(report, reference.device, run.precision), run.speed_against(reference)
    if row is None or not (row.speed >= FASTER and speed < ABOUT):
        return []
    long = "about as long" if speed > 1 / ABOUT else f"{1 / speed:.2g} times as long"
    return [
        f"{run.precision}: the step takes {long} as in float32, though large products are {row.speed:.2g} "
        "times as fast: its own are too few or too small."
    ]


def run_in_process(run: PrecisionRun, target: str, framework: str, device: str, calls: int) -> PrecisionRun:
    """Call a function some times, in a process of its own, and return the run with its losses."""
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
    finish: Callable[[], None] = lambda: None  # noqa: E731
    if framework == "torch":
        call, finish = _prepare_torch(run, target, device)
    else:
        call = _prepare_jax(run, target, device)
    for _ in range(calls):
        returned: list[Any] = []
        taken = timed(lambda returned=returned: returned.append(call()))  # type: ignore[misc]
        run.losses.append(returned[0])
        run.seconds.append(taken)
    finish()


def _prepare_torch(
    run: PrecisionRun, target: str, device: str
) -> tuple[Callable[[], float], Callable[[], None]]:
    """Return what calls the function, and what is to be done in the end."""
    try:
        import torch

        from preamp.cli.lab.in_float32 import InFloat32, widen
        from preamp.torch import autocast
    except ImportError as error:
        raise MissingExtra.of(error, "preamp[torch]") from error
    torch.manual_seed(run.seed)
    function = _import(target)
    model: Any = None
    casts: InFloat32 | None = None
    region: AbstractContextManager[object] = nullcontext()
    if run.precision == "float32":
        region = casts = InFloat32()
        if run.finds_model:
            around = casting_region("bfloat16", device, emulate=True)  # the weights may still be low
            run.widened = widen(model_of(function, around, stops=True))
    else:
        table, recipe = _table_of(run), named(run.recipe) if run.recipe else None
        around = casting_region(run.precision, device, emulate=run.emulate, casting=table)
        model = model_of(function, around, stops=True) if run.finds_model else None
        device = device or _device_of(model)
        low = getattr(torch, run.precision)
        region = autocast(device, low, emulate=run.emulate, casting=table, model=model, recipe=recipe)
    _take_over_regions(run, region)

    def call() -> float:
        nonlocal region
        with region:
            loss = function()
        if casts is not None:
            run.casts = list(casts.lines)
            region = casts if casts.lines else nullcontext()  # which takes no time
        if isinstance(loss, torch.Tensor):
            run.device = loss.device.type
            loss = loss.detach()
        return _number(target, loss)

    def finish() -> None:
        if run.tunes:
            run.tuned = _tuned(run, function, model)

    return call, finish


def _device_of(model: Any) -> str:
    return next((parameter.device.type for parameter in model.parameters()), "cpu")


def _tuned(run: PrecisionRun, function: Callable[[], Any], model: Any) -> dict[str, Any]:
    """Return which layers a recipe loses most in at the weights of now, and which to keep high."""
    from preamp.torch import tune

    enters_regions = run.enters_regions
    found = tune(function, model=model, recipe=named(run.recipe), casting=_table_of(run), whole_layers=True)
    run.enters_regions = enters_regions  # blame's own are none of the function
    products = [row for row in found.before.rows if row.product]
    return {
        "gradient_error": found.before.gradient_error,
        "worst": [f"{row.product} of {row.module} ({row.effect:.3f})" for row in products[:WORST]],
        "kept": [each.name for each in found.kept],
        "lines": found.lines(),
        "solved": found.solved,
        "summary": found.summary(),
        "casting": found.casting.to_dict(),
        "blame": found.before.to_dict(),
    }


def _take_over_regions(run: PrecisionRun, ours: object) -> None:
    """Have all regions but ours that are entered in this process follow a run's precision."""
    import torch

    from preamp.torch.autocasting.region import EditedRegion, autocast

    low = None if run.precision == "float32" else getattr(torch, run.precision)

    def taken_over(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def entered(region: Any) -> Any:
            if region._enabled and region is not ours:
                run.enters_regions = True
                region._enabled = low is not None
                region.fast_dtype = region.fast_dtype if low is None else low
            return enter(region)

        return entered

    for kind in (torch.autocast, autocast, EditedRegion):
        kind.__enter__ = taken_over(kind.__enter__)  # type: ignore[method-assign]


def _prepare_jax(run: PrecisionRun, target: str, device: str) -> Callable[[], float]:
    try:
        import jax
    except ImportError as error:
        raise MissingExtra.of(error, "preamp[jax]") from error
    from preamp.jax import autocast

    _take_over_autocast(run)
    function = _import(target)
    if run.precision != "float32":
        function = autocast(function, dtype=run.precision, emulate=run.emulate, casting=_table_of(run))
    run.device = jax.default_backend()
    # Each lambda is traced, while JAX would not trace the function itself a second time. A value of the first
    # trace that was written to a Python object and is used in the second raises.
    jax.make_jaxpr(lambda: function())()
    program, shape = jax.make_jaxpr(lambda: function(), return_shape=True)()
    if run.precision == "float32":
        run.casts = list(dict.fromkeys(_lines_of_casts(program)))
    structure = jax.tree.structure(shape)
    # Arrays are arguments, because XLA computes with constants when it compiles. By default it leaves out
    # roundings where that is faster, so that bfloat16 on CPUs would be float32.
    compiled = jax.jit(
        lambda arrays: jax.core.eval_jaxpr(program.jaxpr, arrays),
        compiler_options={"xla_allow_excess_precision": False},
    )

    def call() -> float:
        loss = jax.tree.unflatten(structure, jax.block_until_ready(compiled(program.consts)))
        while isinstance(loss, tuple) and loss:  # as of jax.value_and_grad
            loss = loss[0]
        return _number(target, loss)

    return call


def _lines_of_casts(program: Any) -> Iterator[str]:
    """Yield the lines at which a program of JAX itself casts to low precision, such as "train.py:41"."""
    from preamp.jax.jaxprs import inner, source_line, subprograms

    for equation in inner(program).eqns:
        is_cast = equation.primitive.name == "convert_element_type"
        if is_cast and str(equation.params["new_dtype"]) in ("float16", "bfloat16"):
            yield Path(source_line(equation).partition(" (")[0]).name
        for part in subprograms(equation):
            yield from _lines_of_casts(part)


def _take_over_autocast(run: PrecisionRun) -> None:
    """Have the functions to which a module that is imported now applies autocast follow a run's precision."""
    import preamp.jax

    original = preamp.jax.autocast

    def autocast(fn: Any = None, dtype: Any = "bfloat16", **settings: Any) -> Any:
        if settings.get("enabled", True):
            run.enters_regions = True
            if run.precision == "float32":
                settings["enabled"] = False
            else:
                dtype, settings["emulate"] = run.precision, run.emulate
        return original(fn, dtype, **settings)

    preamp.jax.autocast = autocast  # of a process that ends with this run


def _table_of(run: PrecisionRun) -> Casting | None:
    return None if run.casting is None else Casting.from_dict(run.casting)


def _import(target: str) -> Callable[[], Any]:
    """Return the function that a target names; refuse a module that raises when it is imported."""
    try:
        return find_function(target)
    except PreampError:
        raise
    except Exception as error:  # a user's module raises anything
        _print_traceback(error)
        place = target.rpartition(":")[0]
        advice = _advice(error) or "Write a module that can be imported."
        raise PreampError(f"{place} cannot be imported: {first_line(error)}. {advice}") from error


def _advice(error: BaseException) -> str:
    """Return what to do about an error in a user's code; "" if it is not known."""
    if isinstance(error, ImportError):
        return "Install what is missing, or correct the import."
    if isinstance(error, FileNotFoundError):
        return f"Relative paths start in {Path.cwd()}."
    if {"JAXTypeError", "TraceContextError"} & {
        kind.__name__ for kind in type(error).__mro__
    }:  # JAX's, NNX's
        return IMPURE
    return ""


def _print_traceback(error: BaseException) -> None:
    """Print a traceback from the user's code on."""
    ours = str(Path(preamp.__file__).parent)
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename.startswith((ours, "<frozen ")):
        frames = frames.tb_next
    traceback.print_exception(error.with_traceback(frames))


def _number(target: str, loss: Any) -> float:
    if getattr(loss, "size", 1) == 0 or isinstance(loss, (bool, str)):
        loss = None
    try:
        return float(loss)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(loss).__name__
        noun = f"{'an' if kind[0] in 'AEIOaeio' else 'a'} {kind}"
        raise UsageError(
            f"{target} returned {'no number' if loss is None else noun}. Write a function that "
            "returns the loss: a number, or a tensor with one element."
        ) from error


def _main(asked: str) -> None:
    settings, target, framework, device, calls, path = json.loads(asked)
    run = PrecisionRun(**settings)
    random.seed(run.seed)
    with suppress(ImportError):
        import numpy

        numpy.random.seed(run.seed)
    try:
        _measure(run, target, framework, device, calls)
    except PreampError as error:
        run.refused = str(error)
        run.problem = first_line(error)
    except Exception as error:  # a user's function raises anything
        run.problem, run.advice = first_line(error), _advice(error)
        if run.advice == IMPURE:  # which says more than JAX's text
            run.problem = type(error).__name__
        elif run.precision == "float32":
            _print_traceback(error)
    Path(path).write_text(json.dumps(asdict(run)))


if __name__ == "__main__":
    _main(sys.argv[1])
