"""The command line: train, simulate, report, dialects.

This room turns flags into calls and results into tables. It decides nothing about scales. The flags of
the policies are made from their dataclasses.
"""

from __future__ import annotations

import difflib
import math
import random
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from cyclopts import App, CycloptsError, Parameter
from cyclopts.validators import Number
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from preamp import __version__
from preamp.dialects import ALL, Dialect
from preamp.errors import MissingExtra, PreampError
from preamp.policy import Dynamic, Policy, Static, Tolerant
from preamp.simulate import simulate as play
from preamp.trace import Trace

if TYPE_CHECKING:
    from preamp.lab.problem import Problem
    from preamp.lab.runs import Run

__all__ = ["app", "dialects", "report", "run", "simulate", "train"]

AnyPolicy: TypeAlias = Dynamic | Tolerant | Static | None
Count: TypeAlias = Annotated[int, Parameter(validator=Number(gte=1))]
Share: TypeAlias = Annotated[float, Parameter(validator=Number(gte=0, lte=1))]
Precision: TypeAlias = Literal["float32", "float16", "bfloat16", "all"]
Row: TypeAlias = dict[str, str]

BAD_INPUT, INTERRUPTED = 2, 130
SHORT_RUN = Dynamic(growth_interval=100)
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
TITLES = {"autoencoder": "Redrawing {}", "classify": "Telling {} apart"}
BLOCKS = "▁▂▃▄▅▆▇█"

app = App(
    name="preamp",
    help="Loss scaling that tells you what it did.",
    version=f"preamp {__version__}",
    result_action="return_value",
)
out = Console(highlight=False)


def run(arguments: Sequence[str]) -> int:
    """Run a command. A user's mistake is one line on stderr and status 2.

    Args:
        arguments: the words after `preamp`.

    Returns:
        The exit status: 0, 2 for bad input, 130 after Ctrl-C.
    """
    warnings.showwarning = lambda message, *_: print(f"preamp: {message}", file=sys.stderr)
    try:
        return app(arguments, exit_on_error=False, print_error=False) or 0
    except CycloptsError as error:
        problem = str(error)
    except MissingExtra as error:
        problem = str(error)
    except PreampError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    print("preamp: " + " ".join(problem.split()), file=sys.stderr)
    return BAD_INPUT


@app.command
def train(
    *,
    task: Literal["autoencoder", "classify"] | None = None,
    data: Path | None = None,
    framework: str = "torch",
    precision: tuple[Precision, ...] = ("float32", "float16"),
    policy: AnyPolicy = None,
    dialect: str | None = None,
    seed: int = 0,
    seeds: Count = 1,
    epochs: Count | None = None,
    out_dir: Annotated[Path, Parameter(name="--out")] = Path("runs/train"),
) -> int:
    """Train a small real model in several precisions, side by side, and see what loss scaling did.

    Args:
        task: what to learn; autoencoder for the digits, classify for a table of your own.
        data: a CSV file of numbers whose last column is a label, instead of handwritten digits.
        framework: whose training loop to use.
        precision: float16 runs twice, without and with loss scaling. Can be given several times.
        policy: the rule for the scale. Default: Dynamic with a growth interval of 100, as the run is short.
        dialect: use another system's rule; see preamp dialects.
        seed: of the first run.
        seeds: how many seeds to run.
        epochs: passes over the data.
        out_dir: the folder for report.html, summary.json and the traces.
    """
    from preamp.lab import data as tables
    from preamp.lab.runs import FRAMEWORKS, TASKS, plans, write_summary

    if framework not in FRAMEWORKS:
        raise PreampError(f"--framework {framework} is unknown. Write one of {', '.join(FRAMEWORKS)}.")
    chosen = _one_policy(policy, dialect) or SHORT_RUN
    table = tables.read_csv(data) if data else tables.digits()
    problem = TASKS[task or ("classify" if data else "autoencoder")](table, epochs)
    todo = plans(_precisions(precision), chosen, seeds, seed)

    out_dir.mkdir(parents=True, exist_ok=True)
    runs, interrupted = _train_all(problem, todo, framework, out_dir)
    write_summary(out_dir / "summary.json", problem, framework, runs)
    rows = _training_rows(runs)
    _write_training_report(out_dir / "report.html", problem, runs, rows)
    _print_table(rows)
    if seeds > 1:
        out.print(f"Median and range of {seeds} seeds; steps, skipped steps and seconds are sums.")
    for run in runs:
        if run.trace.stopped and not interrupted:
            out.print(f"{run.plan.name}, seed {run.plan.seed}, stopped: {run.trace.stopped}")
    out.print(f"{'Interrupted. ' if interrupted else ''}Open {out_dir / 'report.html'} in a browser.")
    return INTERRUPTED if interrupted else 0


@app.command
def simulate(
    *,
    policy: AnyPolicy = None,
    dialect: tuple[str, ...] = (),
    trace: Path | None = None,
    steps: Count = 20_000,
    overflow_rate: Share = 0.0005,
    seed: int = 0,
    out_file: Annotated[Path, Parameter(name="--out")] = Path("runs/simulate.html"),
) -> int:
    """Play overflows through policies and compare what they do to the scale.

    The same steps overflow for every policy, whatever its scale.

    Args:
        policy: a policy of ours.
        dialect: another system's rule; can be given several times, "all" for every one.
        trace: take the overflows from a recorded run instead of inventing them.
        steps: how many steps to invent.
        overflow_rate: the chance of each invented step to overflow.
        seed: of the invented overflows.
        out_file: the report with the picture of the scales.
    """
    overflows = _recorded(trace) if trace else _invented(steps, overflow_rate, seed)
    names = tuple(ALL) if "all" in dialect else dialect
    rules: dict[str, Policy[Any]] = {name.upper(): _dialect(name) for name in names}
    if policy or not rules:
        rules = {"preamp": policy or Dynamic(), **rules}
    traces = {name: play(rule, overflows) for name, rule in rules.items()}
    rows = [_scale_row(name, one) | {"trend": _sparkline(one)} for name, one in traces.items()]
    _print_table(rows)
    stops = [f"{name} stopped: {one.stopped}" for name, one in traces.items() if one.stopped]
    for line in stops:
        out.print(line)

    from preamp.report import Curve, write_report

    out_file.parent.mkdir(parents=True, exist_ok=True)
    source = f"recorded in {trace}" if trace else f"invented, each step with a chance of {overflow_rate:g}"
    write_report(
        out_file,
        title="The same overflows, other rules",
        lead=[f"{len(overflows):,} steps, {sum(overflows):,} of which overflow: {source}.", *stops],
        curves=[Curve(name, one) for name, one in traces.items()],
        table=[{key: cell for key, cell in row.items() if key != "trend"} for row in rows],
        footer=_footer(f"{name}: {rule!r}" for name, rule in rules.items()),
    )
    out.print(f"Open {out_file} in a browser for the picture.")
    return 0


@app.command
def report(
    traces: Annotated[tuple[Path, ...], Parameter(consume_multiple=True)],
    /,
    *,
    out_file: Annotated[Path, Parameter(name="--out")] = Path("report.html"),
) -> int:
    """Draw recorded traces in one HTML file.

    Args:
        traces: files that a Trace was written to.
        out_file: the report to write.
    """
    from preamp.report import Curve, write_report

    read = [Trace.read(path) for path in traces]
    names = [str(one.about.get("name", path)) for path, one in zip(traces, read, strict=True)]
    rows = [_scale_row(name, one) for name, one in zip(names, read, strict=True)]
    out_file.parent.mkdir(parents=True, exist_ok=True)
    write_report(
        out_file,
        title="What loss scaling did",
        lead=[
            f"{name}: stopped early: {one.stopped}"
            for name, one in zip(names, read, strict=True)
            if one.stopped
        ],
        curves=[Curve(name, one) for name, one in zip(names, read, strict=True)],
        table=rows,
        footer=_footer(map(str, traces)),
    )
    _print_table(rows)
    out.print(f"Open {out_file} in a browser.")
    return 0


@app.command
def dialects() -> int:
    """Show the systems whose rules preamp reproduces, and what is odd about each."""
    _print_table([{"dialect": name.lower(), "system": d.system, "oddity": d.odd} for name, d in ALL.items()])
    return 0


def _precisions(given: Sequence[str]) -> list[Any]:
    everything = ("float32", "float16", "bfloat16")
    return [name for name in everything if name in given or "all" in given]


def _one_policy(policy: AnyPolicy, dialect: str | None) -> Policy[Any] | None:
    if policy and dialect:
        raise PreampError(f"--dialect {dialect} and --policy flags are both given. Write one of them.")
    return _dialect(dialect) if dialect else policy


def _dialect(name: str) -> Dialect[...]:
    key = name.upper().replace("-", "_")
    if key not in ALL:
        near = difflib.get_close_matches(key, ALL, n=3) or list(ALL)
        raise PreampError(f"--dialect {name} is unknown. Write one of {', '.join(near).lower()}.")
    return ALL[key]


def _train_all(problem: Problem, todo: Sequence[Any], framework: str, folder: Path) -> tuple[list[Run], bool]:
    """Carry out the plans until they are done or Ctrl-C; return the runs and whether it was pressed."""
    from preamp.lab.runs import train as carry_out

    runs: list[Run] = []
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[seen]:24}"),
        TimeRemainingColumn(),
    )
    with (
        suppress(KeyboardInterrupt),
        Progress(*columns, console=out, disable=not out.is_terminal) as progress,
    ):
        for plan in todo:
            bar = progress.add_task(f"{plan.name}, {plan.seed}", total=problem.steps, seen="")

            def show(step: Any, bar: Any = bar) -> None:
                if step.index % 20 == 19 or step.index == problem.steps - 1:
                    seen = f"loss {step.loss:.4f} scale {_power(step.scale)}"
                    progress.update(bar, completed=step.index + 1, seen=seen)

            path = folder / plan.file_name / "trace.jsonl"
            path.parent.mkdir(exist_ok=True)
            about = {"name": plan.name, "task": problem.task, "framework": framework}
            about |= {"precision": plan.precision, "seed": plan.seed, "policy": repr(plan.policy)}
            with Trace(path=path, **about) as trace:
                runs.append(carry_out(problem, plan, framework=framework, trace=trace, on_step=show))
            if trace.stopped == "interrupted":
                return runs, True
    return runs, len(runs) < len(todo)


def _write_training_report(path: Path, problem: Problem, runs: list[Run], rows: list[Row]) -> None:
    from preamp.report import Curve, Strip, write_report

    strips = []
    if problem.table.picture and problem.task == "autoencoder":
        shown = [int((problem.table.test_labels == label).argmax()) for label in range(problem.table.classes)]
        images = {"original": problem.table.test} | {r.plan.name: r.outputs for r in reversed(runs)}
        shape = (-1, *problem.table.picture)
        strips = [Strip(name, images[name][shown].reshape(shape)) for name in ("original", *_names(runs))]
    write_report(
        path,
        title=f"{TITLES[problem.task].format(problem.table.name)} in each precision",
        lead=[
            "The same network, first weights and batches in every run. Low precision means what it does on "
            "a tensor core: values and gradients are stored in it, sums are made in float32.",
            *map(_sentence, _grouped(runs)),
        ],
        strips=strips,
        strips_title="Test digits as each run redraws them",
        curves=[Curve(run.plan.name, run.trace) for run in runs],
        table=rows,
        footer=_footer(
            f"{r.plan.name}, seed {r.plan.seed}: {r.plan.policy!r}" for r in runs if r.plan.policy
        ),
    )


def _sentence(runs: list[Run]) -> str:
    """Say in words what came of the runs of one name."""
    first = runs[0]
    steps = [step for run in runs for step in run.trace]
    zeros = [step.zeros for step in steps if step.zeros is not None]
    parts = [f"test error {_spread([r.test_error for r in runs])}"]
    if zeros:
        parts.append(f"{100 * median(zeros):.0f} % of the gradient entries of its weights are exactly zero")
    if first.plan.policy and steps:
        scales = [step.scale for step in steps]
        parts.append(
            f"{sum(step.skipped for step in steps):,} of {len(steps):,} steps skipped while the scale moved "
            f"between {_power(min(scales))} and {_power(max(scales))}"
        )
    if first.trace.stopped:
        parts.append(f"stopped early ({first.trace.stopped})")
    return f"{first.plan.name}: {', '.join(parts)}."


def _training_rows(runs: list[Run]) -> list[Row]:
    return [_training_row(group) for group in _grouped(runs)]


def _training_row(runs: list[Run]) -> Row:
    accuracies = [run.test_accuracy for run in runs if run.test_accuracy is not None]
    quality = (
        {"test accuracy": accuracies} if accuracies else {"test error": [run.test_error for run in runs]}
    )
    summaries, scaled = [run.trace.summary() for run in runs], runs[0].plan.policy is not None
    return {
        "run": runs[0].plan.name,
        **{name: _spread(values) for name, values in quality.items()},
        "steps": f"{sum(s.steps for s in summaries):,}",
        "skipped": f"{sum(s.skipped for s in summaries):,}",
        "scale": ", ".join(dict.fromkeys(_power(s.final_scale) for s in summaries)) if scaled else "-",
        "seconds": f"{sum(run.seconds for run in runs):.1f}",
    }


def _scale_row(name: str, trace: Trace) -> Row:
    summary = trace.summary()
    return {
        "run": name,
        "steps": f"{summary.steps:,}",
        "skipped": f"{summary.skipped:,}",
        "streak": f"{summary.longest_streak}",
        "lowest": _power(summary.min_scale),
        "highest": _power(summary.max_scale),
        "final": _power(summary.final_scale),
    }


def _names(runs: list[Run]) -> list[str]:
    return list(dict.fromkeys(run.plan.name for run in runs))


def _grouped(runs: list[Run]) -> list[list[Run]]:
    return [[run for run in runs if run.plan.name == name] for name in _names(runs)]


def _spread(values: list[float]) -> str:
    """Return the median and, of several values, the range."""
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def _power(scale: float | None) -> str:
    """Return a scale as a power of two where it is one."""
    if scale is None:
        return "-"
    if scale > 0 and math.frexp(scale)[0] == 0.5:
        return "2" + str(math.frexp(scale)[1] - 1).translate(SUPERSCRIPT)
    return f"{scale:.5g}" if 1.0 < scale < 1e5 else f"{scale:.3g}"


def _sparkline(trace: Trace, width: int = 8) -> str:
    """Return the scale's powers of two over time as a row of blocks."""
    exponents = [math.log2(step.scale) for step in trace if 0 < step.scale < math.inf]
    low, high = min(exponents, default=0.0), max(exponents, default=0.0)
    picked = [exponents[number * len(exponents) // width] for number in range(width)] if exponents else []
    return "".join(BLOCKS[round((e - low) / (high - low or 1.0) * (len(BLOCKS) - 1))] for e in picked)


def _recorded(path: Path) -> list[bool]:
    return [not step.finite for step in Trace.read(path)]


def _invented(steps: int, rate: float, seed: int) -> list[bool]:
    rng = random.Random(seed)
    return [rng.random() < rate for _ in range(steps)]


def _footer(lines: Iterable[str]) -> str:
    return f"preamp {__version__}. " + ". ".join(dict.fromkeys(lines))


def _print_table(rows: Sequence[Row]) -> None:
    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in rows[0]:
        justify: Literal["left", "right"] = (
            "left" if name in ("run", "dialect", "system", "oddity") else "right"
        )
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name not in ("system", "oddity"))
    for row in rows:
        table.add_row(*row.values())
    out.print(table)
