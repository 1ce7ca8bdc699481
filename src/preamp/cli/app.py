"""The command line: train, simulate, report, doctor, inspect, blame, tune, rehearse, check, dialects."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypedDict

from cyclopts import App, CycloptsError, Group, Parameter, Token
from cyclopts.validators import Number

from preamp import __version__
from preamp.blaming.blame import for_json
from preamp.cli import comparison
from preamp.cli.casting_file import read_casting
from preamp.cli.comparison import events, footer, scale_row, spikes, stops
from preamp.cli.flags import (
    GUARDS,
    SHORT_INTERVAL,
    Given,
    guard_flags,
    guards_of,
    precisions_and_rule,
    rules,
    setting_flags,
    without_limits,
)
from preamp.cli.lab import Framework, Task
from preamp.cli.terminal import (
    Row,
    Unboxed,
    out,
    print_diagnosis,
    print_lines,
    print_open,
    print_table,
    read_trace,
    train_all,
    until_done,
)
from preamp.errors import MissingExtra, PreampError
from preamp.policy import Dynamic
from preamp.policy.registry import RULES
from preamp.record.files import naming
from preamp.record.formatting import kebab
from preamp.record.trace import Trace
from preamp.record.trace_ranks import paths_of_ranks
from preamp.scaling import Step
from preamp.simulation.processes import Process
from preamp.systems.dialects import ALL

if TYPE_CHECKING:
    from preamp.cli.lab.problem import Problem
    from preamp.cli.lab.runs import Run
    from preamp.machine import MachineReport
    from preamp.report import Curve

__all__ = [
    "app",
    "blame",
    "check",
    "dialects",
    "doctor",
    "inspect",
    "rehearse",
    "report",
    "run",
    "simulate",
    "train",
    "tune",
]


def _above_zero(flag: str, value: float | None, example: str) -> None:
    if value is not None and not 0 < value < math.inf:
        raise PreampError(f"{flag} {value:g} is not a number above 0. Write {flag} {example}.")


def _whole(_: object, tokens: Sequence[Token]) -> int:
    """Read a whole number; cyclopts itself would round 1.5."""
    text = tokens[0].value
    with suppress(ValueError):
        if float(text).is_integer():
            return int(float(text))
    raise ValueError(f"{text} is not a whole number. Write one, such as 100.")


def _refusing_fractions(kind: Any) -> Any:
    """Return the type of a setting for cyclopts, with `_whole` to read its whole numbers."""
    if kind is int:
        return Annotated[int, Parameter(converter=_whole)]
    return kind


Count: TypeAlias = Annotated[int, Parameter(validator=Number(gte=1, lte=10_000_000), converter=_whole)]
Seed: TypeAlias = Annotated[int, Parameter(validator=Number(gte=0, lt=2**32))]
Share: TypeAlias = Annotated[float, Parameter(validator=Number(gte=0, lte=1))]
# One Literal, because cyclopts lists the choices of one in its error, and the types of a union.
PrecisionOrAll: TypeAlias = Literal["float32", "float16", "bfloat16", "all"]
LowPrecision: TypeAlias = Literal["float16", "bfloat16"]
Simulated: TypeAlias = Literal["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]

POLICY = Group("Policy for the loss scale", sort_key=0)
NAMES = f"{', '.join(map(kebab, RULES))}, or another system's (see preamp dialects)"
FIRST = "If only settings are given: the first of these that has all of them."
SHORT = f"The default growth interval of {Dynamic.growth_interval} is {SHORT_INTERVAL} here."
NAME = Parameter(name=["--policy", "--rule"], group=POLICY, show_default=False)
GUARD = Group("Guard against spikes", sort_key=50)
GUARD_NAME = Parameter(
    name="--guard",
    group=GUARD,
    show_default=False,
    help=f'{", ".join(GUARDS)}, or "all"; can be repeated.',
)
if TYPE_CHECKING:
    _Settings: TypeAlias = Given
    _GuardSettings: TypeAlias = Given
else:
    _GuardSettings = TypedDict(
        "_GuardSettings",
        {
            name: Annotated[
                _refusing_fractions(flag.type),
                Parameter(help=flag.help, group=GUARD, show_default=False, show=bool(flag.heading)),
            ]
            for name, flag in guard_flags().items()
        },
        total=False,
    )
    headings = dict.fromkeys(flag.heading for flag in setting_flags().values())
    GROUPS = {heading: Group(heading, sort_key=1 + n) for n, heading in enumerate(headings)}
    _Settings = TypedDict(
        "_Settings",
        {
            name: Annotated[
                _refusing_fractions(flag.type),
                Parameter(help=flag.help, group=GROUPS[flag.heading], show_default=False),
            ]
            for name, flag in setting_flags().items()
        },
        total=False,
    )
NO_DEFAULT = Parameter(show_default=False)  # help would show it as ()
SETTINGS = Parameter(name="--policy", show_default=False)
GUARD_SETTINGS = Parameter(name="--guard", show_default=False)

CUT_OFF, BAD_INPUT, INTERRUPTED = 1, 2, 130
LISTED = 8  # files that an error names
TITLES: dict[Task, str] = {"autoencoder": "Redrawing {}", "classify": "Telling {} apart"}
ARITHMETIC = {
    True: "rehearsed as on a GPU: values are stored in it, and products sum in float32",
    False: "the CPU's own",
}
COLORS = {  # by precision and whether the loss was scaled
    ("float32", False): "#b0b0b0",
    ("float16", False): "#d55e00",
    ("float16", True): "#0072b2",
    ("bfloat16", False): "#009e73",
}

app: App = App(
    name="preamp",
    help="Loss scaling that tells you what it did.",
    version=f"preamp {__version__}",
    result_action="return_value",
    default_parameter=Parameter(negative=()),
    help_formatter=Unboxed(),
)


def run(arguments: Sequence[str]) -> int:
    """Run a command. A user's mistake is one line on stderr and status 2.

    Args:
        arguments: the words after `preamp`.

    Returns:
        The exit status: 0, 1 if nothing reads the output any more, 2 for bad input, 130 after Ctrl-C.
    """
    warnings.showwarning = lambda message, *_: print(f"preamp: {message}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # a stream that was replaced may have no encoding
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        status = app(arguments, exit_on_error=False, print_error=False) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # what read the output, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again when it exits
        return CUT_OFF
    except (CycloptsError, PreampError) as error:
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
    task: Task | None = None,
    data: Path | None = None,
    framework: Framework | None = None,
    precision: Annotated[tuple[PrecisionOrAll, ...], NO_DEFAULT] = (),
    emulate: Annotated[bool, Parameter(negative="--native", show_default=False)] = True,
    rule: Annotated[str | None, NAME, Parameter(help=f"{NAMES}. {FIRST} {SHORT}")] = None,
    policy: Annotated[_Settings | None, SETTINGS] = None,
    dialect: str | None = None,
    config: Path | None = None,
    seed: Seed = 0,
    seeds: Count = 1,
    epochs: Count | None = None,
    steps: Count | None = None,
    out_dir: Annotated[Path, Parameter(name="--out")] = Path("runs/train"),
) -> int:
    """Train a small real model in several precisions, side by side, and see what loss scaling did.

    Args:
        task: what to learn. [autoencoder; classify with --data]
        data: a CSV file of numbers with labels in the last column, to use instead of handwritten digits.
        framework: whose training loop to use. [the first installed of torch, jax]
        precision: float16 runs twice, without and with loss scaling; can be repeated. [float32, and float16
            or that of the configuration]
        emulate: rehearse a GPU: values are in low precision, and products compute in float32. This is the
            default; --native computes as this device does.
        rule: the name of a policy.
        policy: the settings of the policy.
        dialect: another system's policy; see preamp dialects.
        config: a DeepSpeed configuration; only its precision and its policy are used.
        seed: the seed of the first run.
        seeds: how many seeds to run.
        epochs: passes over the data. [as many as the task takes]
        steps: how many steps to train, instead of --epochs.
        out_dir: the folder for report.html, summary.json and, in a folder for each run, its trace.jsonl.
    """
    import preamp.report  # noqa: F401  # report a missing extra before the work, not after
    from preamp.cli.lab import data as tables
    from preamp.cli.lab.results import grouped, row
    from preamp.cli.lab.runs import TASKS, choose_framework, find_loop, plans, release_of, write_summary

    if epochs is not None and steps is not None:
        raise PreampError(f"--epochs {epochs} and --steps {steps} are both given. Write one of them.")
    framework = framework or choose_framework()
    make_loop = partial(find_loop(framework), emulate=emulate)
    precisions, chosen = precisions_and_rule(precision, rule, policy, dialect, config)
    table = tables.read_csv(data) if data else tables.digits()
    problem = TASKS[task or ("classify" if data else "autoencoder")](table, epochs)
    if steps is not None:
        problem = problem.with_steps(steps)
    todo = plans(precisions, chosen, seeds, seed)

    out_dir.mkdir(parents=True, exist_ok=True)
    runs = train_all(problem, todo, make_loop, framework, out_dir)
    interrupted = len(runs) < len(todo) or runs[-1].interrupted
    if not runs:
        out.print("Interrupted before the first step. Nothing was written.")
        return INTERRUPTED
    with until_done():
        rows = [row(group) for group in grouped(runs)]
        write_summary(out_dir / "summary.json", problem, framework, runs)
        _write_training_report(out_dir / "report.html", problem, runs, rows, emulate, release_of(framework))
    print_table(rows)
    if seeds > 1:
        out.print(f"Median and range of {seeds} seeds; steps, skipped steps and seconds are sums.")
    out.print(f"Trained with {release_of(framework)}.")
    print_lines(stops((f"{run.plan.name}, seed {run.plan.seed}", run.trace) for run in runs))
    print_open(out_dir / "report.html")
    return INTERRUPTED if interrupted else 0


@app.command
def simulate(
    *,
    rule: Annotated[
        tuple[str, ...], NAME, Parameter(help=f'{NAMES}, or "all"; can be repeated. {FIRST}')
    ] = (),
    policy: Annotated[_Settings | None, SETTINGS] = None,
    dialect: Annotated[tuple[str, ...], NO_DEFAULT] = (),
    config: Annotated[tuple[Path, ...], NO_DEFAULT] = (),
    guard: Annotated[tuple[str, ...], GUARD_NAME] = (),
    guard_settings: Annotated[_GuardSettings | None, GUARD_SETTINGS] = None,
    trace: Path | None = None,
    process: Annotated[comparison.SomeName | None, Parameter(show_choices=False)] = None,
    dtype: Simulated | None = None,
    ranks: Count | None = None,
    overflow_rate: Share | None = None,
    steps: Count | None = None,
    seed: Seed | None = None,
    out_file: Annotated[Path, Parameter(name="--out")] = Path("runs/simulate.html"),
) -> int:
    """Simulate policies on gradients or overflows, and guards on losses.

    With --process, or a trace with amaxes (see docs/policies.md), each policy's own scale decides what
    overflows and what is flushed to zero. Otherwise the same steps overflow for every policy. With --guard,
    each guard gets losses and norms.

    Args:
        rule: the names of policies.
        policy: the settings of the policy.
        dialect: another system's policy, or "all"; can be repeated.
        config: the policy of a DeepSpeed configuration; can be repeated.
        guard: the names of guards.
        guard_settings: the settings of the guards.
        trace: a recorded run to replay.
        process: gradients to draw, such as stationary, or losses, such as resting-loss; see
            preamp.processes.
        dtype: the low precision that overflows and flushes. [that of the trace, or float16]
        ranks: how many ranks; the largest gradient counts. [1]
        overflow_rate: instead of gradients, draw overflows with this chance at each step. [0.0005]
        steps: how many steps to draw. [20,000]
        seed: the seed of what is drawn. [0]
        out_file: the report.
    """
    import preamp.report  # noqa: F401  # report a missing extra before the work, not after

    if trace is not None:
        _refuse_together(
            "trace", process=process, ranks=ranks, overflow_rate=overflow_rate, steps=steps, seed=seed
        )
        _refuse_to_overwrite([trace], out_file)
    if guard or guard_settings is not None or process in comparison.LOSSES:
        if process is not None:
            _refuse_together("process", overflow_rate=overflow_rate)
        if dtype is not None or ranks is not None:
            raise PreampError("A guard reads losses, which have neither --dtype nor --ranks. Leave them out.")
        losses = comparison.losses(trace, process, steps=steps, seed=seed)
        chosen = rules(rule, policy, dialect, config)
        guards = guards_of(guard, guard_settings)
        comparison.compare_guards(guards, chosen, losses, out_file, without_limits(guard, guards))
        return 0
    if trace is not None:
        played = comparison.recorded(trace, dtype)
    elif process is not None:
        _refuse_together("process", overflow_rate=overflow_rate)
        played = comparison.process(process, dtype=dtype, ranks=ranks, steps=steps, seed=seed)
    else:
        played = comparison.random_overflows(steps, overflow_rate, seed)
    if not isinstance(played.steps, Process):
        _refuse_without_gradients(dtype=dtype, ranks=ranks)
    comparison.compare(rules(rule, policy, dialect, config), played, out_file)
    return 0


def _read(path: Path) -> Trace:
    """Return the trace in a file.

    Raises:
        PreampError: for a folder, with the traces in it.
    """
    if not path.is_dir():
        return read_trace(path)
    found = sorted(str(one) for one in path.rglob("*.jsonl"))
    if not found:
        raise PreampError(
            f"{path} is a folder, and there is no trace in it. Write the path of a file, such as run.jsonl."
        )
    more = f", or one of {len(found) - LISTED} more" if len(found) > LISTED else ""
    raise PreampError(f"{path} is a folder. Write its traces: {' '.join(found[:LISTED])}{more}")


@app.command
def report(
    traces: Annotated[tuple[Path, ...], Parameter(consume_multiple=True)],
    /,
    *,
    out_file: Annotated[Path, Parameter(name="--out")] = Path("runs/report.html"),
) -> int:
    """Draw recorded traces in one HTML file.

    Args:
        traces: files that a Trace was written to, or "run.{rank}.jsonl" for the ranks of one job.
        out_file: the report to write.
    """
    from preamp.report import write_report

    _refuse_to_overwrite(traces, out_file)
    named = _named(traces, list(map(_read, traces)))
    rows = [scale_row(name, one) for name, one in named.items()]
    said = [*spikes(named.items()), *events(named.items())]
    write_report(
        out_file,
        title="What loss scaling did",
        lead=said,
        curves=[_curve(name, one) for name, one in named.items()],
        table=rows,
        footer=footer(map(str, traces)),
    )
    print_table(rows)
    print_lines(said)
    print_open(out_file)
    return 0


def _write_json(path: Path, text: str) -> None:
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")


@app.command
def doctor(
    traces: Annotated[tuple[Path, ...], Parameter(consume_multiple=True)],
    /,
    *,
    explain: bool = False,
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
) -> int:
    """Say what is wrong with recorded runs, and what to write instead.

    Args:
        traces: files that a Trace was written to, or "run.{rank}.jsonl" for the ranks of one job.
        explain: show every cause that was compared, with what speaks for it and against it.
        json_file: where to write the same as JSON, by the names of the runs.
    """
    from preamp.doctor import diagnose

    found = {}
    for name, one in _named(traces, list(map(_read, traces))).items():
        found[name] = diagnose(one)
        print_diagnosis(name, found[name], explain=explain)
        print_lines(f" {said}" for said in events([(name, one)]))
    if json_file:
        _write_json(json_file, json.dumps({name: one.to_json() for name, one in found.items()}, indent=1))
    return 0


@app.command
def inspect(
    target: str,
    /,
    *,
    framework: Literal["torch", "jax"] = "torch",
    device: str | None = None,
    dtype: LowPrecision | None = None,
    emulate: bool = False,
    casting_file: Annotated[Path | None, Parameter(name="--casting")] = None,
    compiled: Annotated[bool, Parameter(name="--compile")] = False,
    out_file: Annotated[Path, Parameter(name="--out")] = Path("runs/inspect.html"),
) -> int:
    """Run a function under autocast and show which operator ran in which precision, and what was cast.

    JAX functions are only traced; nothing is computed.

    Args:
        target: MODULE:FUNCTION, such as train.py:step; it is called without arguments.
        framework: whose operators are cast.
        device: the device type whose tensors are cast, for PyTorch. Default: cpu.
        dtype: the low precision. Default: bfloat16; for PyTorch on GPUs float16.
        emulate: rehearse a GPU: its table, and products that compute in float32.
        casting_file: edits of operators and modules, in JSON, TOML or YAML, as Casting.to_dict writes them.
        compiled: show what torch.compile makes of the function: its graphs, operator by operator, with
            source lines.
        out_file: the report with all rows.
    """
    from preamp.cli.lab.inspected import inspect_function
    from preamp.report import write_report

    found = inspect_function(
        target, framework, device, dtype, emulate=emulate, compiled=compiled, casting_file=casting_file
    )
    write_report(
        out_file,
        title=f"What autocast did in {target}",
        lead=[found.summary(), *found.warnings],
        curves=[],
        table=found.table(),
        footer=footer([f"{device or framework}, {dtype or 'default precision'}"]),
    )
    print(found)
    print_open(out_file)
    return 0


@app.command
def blame(
    target: str,
    /,
    *,
    framework: Literal["torch", "jax"] = "torch",
    dtype: LowPrecision | None = None,
    casting_file: Annotated[Path | None, Parameter(name="--casting")] = None,
    recipe: str | None = None,
    loss_scale: float | None = None,
    by: Literal["operator", "module"] = "operator",
    out_file: Annotated[Path, Parameter(name="--out")] = Path("runs/blame.html"),
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
) -> int:
    """Run one training step in low precision and in float32, and say which operator loses the accuracy.

    The step runs as on a GPU: values have the dtypes that autocast gives them there. Each call of an
    operator, and its backward pass, is compared with float32 on the very same inputs. A
    difference counts by its effect on the gradients and the loss. A star marks the operators that lose more
    than is expected in this precision.

    Args:
        target: MODULE:FUNCTION, such as train.py:loss; it is called without arguments. With PyTorch it
            returns the loss; a whole training step runs only up to backward(). With JAX it returns a loss
            function, its parameters and its other arguments.
        framework: the framework of the function.
        dtype: the low precision. Default: bfloat16.
        casting_file: edits of operators and modules, in JSON, TOML or YAML, as Casting.to_dict writes them.
        recipe: a recipe of preamp.recipes, such as MXFP8, in which linear layers run. Each of their products
            has a row, with its effect in the high precision alone beside it.
        loss_scale: what the loss is multiplied by. Default: the scale of the step's GradScaler, or what
            dynamic loss scaling would arrive at.
        by: show a row for each operator and line, or for each module and pass; "+2" means that a row stands
            for its worst call and two others.
        out_file: the report with all rows.
        json_file: where to write all rows as JSON.
    """
    from preamp.cli.lab.blamed import blame_function
    from preamp.report import effects_figure, write_report

    _above_zero("--loss-scale", loss_scale, "65536")

    found = blame_function(
        target, framework, dtype, recipe=recipe, casting_file=casting_file, loss_scale=loss_scale
    )
    found = found.by_module() if by == "module" else found
    write_report(
        out_file,
        title=f"What {target} loses in {found.precision}",
        lead=[found.summary(), *found.notes],
        curves=[],
        figures=[effects_figure(found)] if found.rows else [],
        table=found.table(),
        footer=footer([f"{framework}, {found.precision}"]),
    )
    if json_file:
        _write_json(json_file, found.to_json())
    print(found)
    print_open(out_file)
    return 0


@app.command
def tune(
    target: str,
    /,
    *,
    framework: Literal["torch", "jax"] = "torch",
    dtype: LowPrecision | None = None,
    recipe: str | None = None,
    export: str | None = None,
    casting_file: Annotated[Path | None, Parameter(name="--casting")] = None,
    loss_scale: float | None = None,
    error: float | None = None,
    calls: Count | None = None,
    out_file: Annotated[Path, Parameter(name="--out")] = Path("casting.json"),
) -> int:
    """Find a small set of operators and modules of a training step to keep in float32.

    It runs preamp blame on the step and adds to the set what loses more than expected, preferring what takes
    the fewest products out of low precision. It repeats this, in at most twenty runs. The table is written to
    a file, for casting.Casting.from_dict and for the --casting flag of other commands.

    Args:
        target: MODULE:FUNCTION, as for preamp blame.
        framework: the framework of the function.
        dtype: the low precision. Default: bfloat16.
        recipe: a recipe of preamp.recipes, such as MXFP8. The table then keeps layers, or single products of
            them, in the recipe's high precision.
        export: print the lines to write for the recipe and the table elsewhere: torchao, torchtitan, te
            (Transformer Engine), megatron, maxtext or qwix. Layers are then kept high as a whole.
        casting_file: the table to begin with, in JSON, TOML or YAML. Default: autocast's.
        loss_scale: as for preamp blame.
        error: stay below this predicted relative error of the loss and the gradients. Default: 8 unit
            roundoffs, which is 3e-2 in bfloat16 and 4e-3 in float16; with a recipe 0.125, in NVFP4 0.5.
        calls: train with this many calls of the function in float32, with the initial table and with the
            tuned one, and compare the losses. PyTorch only. Default: off.
        out_file: where to write the table, as JSON.
    """
    from preamp.cli.lab.tuned import sentences, table, train_with, tune_function

    _above_zero("--loss-scale", loss_scale, "65536")
    _above_zero("--error", error, "0.01")
    if calls is not None and framework == "jax":
        raise PreampError("--calls is for PyTorch. Leave it out, and train with the table that is written.")
    if calls is not None and recipe:
        raise PreampError(f"--calls is without --recipe. Write preamp rehearse {target} --recipes {recipe}.")
    if export and not recipe:
        raise PreampError(f"--export {export} is of a recipe. Write --recipe MXFP8 as well.")
    found, use = tune_function(
        target,
        framework,
        dtype,
        recipe=recipe,
        whole_layers=export is not None,
        casting_file=casting_file,
        loss_scale=loss_scale,
        error=error,
    )
    lines = found.export(export) if export else ""
    with naming(out_file):
        out_file.parent.mkdir(parents=True, exist_ok=True)
        out_file.write_text(json.dumps(found.casting.to_dict(), indent=1) + "\n", encoding="utf-8")
    print(found)
    if calls is not None:
        before = read_casting(casting_file) if casting_file else None
        runs = train_with(target, framework, found, before, calls)
        out.print(f"\n{calls} calls of {target}, the mean loss of the last tenth:", soft_wrap=True)
        print_table(table(runs))
        print_lines(sentences(runs))
    if lines:
        out.print(f"The table is in {out_file}. For {export}:\n")
        print(lines)
        return 0 if found.solved else 1
    out.print(f"The table is in {out_file}. To train with it:\n")
    print("import json\nfrom pathlib import Path\n" + "\nimport torch\n" * (framework == "torch"))
    print(f"from preamp import casting{', recipes' if recipe else ''}")
    print(f"from preamp.{framework} import autocast\n")
    print(f'table = casting.Casting.from_dict(json.loads(Path("{out_file}").read_text()))')
    print(use)
    return 0 if found.solved else 1


@app.command
def rehearse(
    target: str,
    /,
    *,
    recipes: Annotated[tuple[str, ...], Parameter(consume_multiple=True, show_default=False)] = ("all",),
    steps: Count = 200,
    seeds: Count = 3,
    casting_file: Annotated[Path | None, Parameter(name="--casting")] = None,
    out_file: Annotated[Path, Parameter(name="--out")] = Path("runs/rehearse.html"),
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
) -> int:
    """Train in FP8, MXFP8 and NVFP4 recipes without a GPU, and compare them with bfloat16.

    Each recipe trains in a process of its own, from the same weights and batches as bfloat16. At the end it
    says which products of linear layers lose most, and which layers to keep high. PyTorch only.

    Args:
        target: MODULE:FUNCTION, such as train.py:step; it is called without arguments, trains a step and
            returns the loss.
        recipes: names of preamp.recipes, such as MXFP8, or "all"; can be repeated.
        steps: how many times to call the function in each run.
        seeds: how many runs there are of each recipe.
        casting_file: modules to keep high, in JSON, TOML or YAML, as preamp tune --recipe writes them.
        out_file: the report.
        json_file: where to write all losses and what was found as JSON.
    """
    from preamp.cli.lab.rehearsed import named_recipes, results, sentences, table
    from preamp.cli.lab.rehearsed import rehearse as run_all
    from preamp.report import Curve, loss_figure, write_report

    casting = read_casting(casting_file) if casting_file else None
    runs = run_all(target, named_recipes(recipes), steps, seeds, casting, partial(out.print, style="dim"))
    rows, said = table(runs), list(sentences(runs))
    curves = [
        Curve(run.name, Trace(Step(at, 1.0, True, False, loss=loss) for at, loss in enumerate(run.losses)))
        for run in runs
        if run.seed == 0 and run.losses
    ]
    write_report(
        out_file,
        title=f"{target} in recipes",
        lead=[f"The same weights and batches in every run of a seed, of {steps:,} calls.", *said],
        curves=[],
        figures=[loss_figure(curves)],
        table=rows,
        footer=footer(["rehearsed, losses of seed 0"]),
    )
    if json_file:
        _write_json(json_file, json.dumps(for_json(results(runs)), indent=1))
    print_table(rows)
    print_lines(said)
    print_open(out_file)
    return 0


@app.command
def check(
    *,
    framework: Literal["torch", "jax"] = "torch",
    device: Annotated[tuple[str, ...], NO_DEFAULT] = (),
    model: str | None = None,
    calls: Count | None = None,
) -> int:
    """Measure what this machine can do in each precision, and say which one to use.

    It compares matrix products in each precision with float32, and trains a small model with autocast and
    loss scaling, a fused optimizer and the compiler, in about ten seconds for each type of device. With
    --model it also runs your own step in each precision, each in a new process from the same seed, and
    compares the losses.

    Args:
        framework: whose arithmetic to check.
        device: a device type, such as cuda; can be repeated. Default: the CPU and the accelerator, if any.
        model: MODULE:FUNCTION, such as train.py:step; it is called without arguments and returns the loss.
        calls: how many times to call it in each precision. Default: 5.
    """
    from preamp.cli.lab.compared import run_in_float32, run_in_low_precision, sentences, table

    if calls is not None and model is None:
        raise PreampError(f"--calls {calls} has no effect without --model. Write --model MODULE:FUNCTION.")
    reference = run_in_float32(model, framework, calls or 5) if model else None
    found = _check_machine(framework, device)
    print(found)
    if model and reference:
        runs = [reference, *run_in_low_precision(reference, model, framework, found)]
        done = len(reference.losses)
        out.print(f"\n{model} in each precision, {done} call{'s' * (done > 1)}:", soft_wrap=True)
        print_table(table(runs))
        print_lines(sentences(runs, model, framework, found))
    return 0


@app.command
def dialects() -> int:
    """Show the systems whose policies preamp reproduces, and what is odd about each."""
    print_table([{"dialect": name.lower(), "system": d.system, "oddity": d.odd} for name, d in ALL.items()])
    return 0


def _check_machine(framework: str, devices: Sequence[str]) -> MachineReport:
    measure: Callable[[Sequence[str] | None], MachineReport]
    try:
        if framework == "torch":
            from preamp.torch import check as check_torch

            measure = check_torch
        else:
            from preamp.jax import check as check_jax

            measure = check_jax
    except MissingExtra:
        raise
    except ImportError as error:
        raise MissingExtra.of(error, f"preamp[{framework}]") from error
    return measure(devices or None)


def _refuse_together(with_flag: str, **flags: object) -> None:
    for name, value in flags.items():
        if value is not None:
            raise PreampError(f"{_flag(name)} has no effect with {_flag(with_flag)}. Write one of them.")


def _refuse_without_gradients(**flags: object) -> None:
    for name, value in flags.items():
        if value is not None:
            raise PreampError(
                f"{_flag(name)} needs gradients. Write --process stationary, or --trace of a run with amaxes."
            )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse_to_overwrite(traces: Sequence[Path], out_file: Path) -> None:
    read = [os.path.realpath(one) for path in traces for _, one in paths_of_ranks(path)]
    if os.path.realpath(out_file) in read:  # Path.resolve raises for a link to itself
        raise PreampError(
            f"--out {out_file} is one of the traces to read. Choose another name, such as report.html."
        )


def _named(paths: Sequence[Path], traces: Sequence[Trace]) -> dict[str, Trace]:
    """Return the traces by their recorded name, or by their path where that name is not unique."""
    names = [str(one.about.get("name", path)) for path, one in zip(paths, traces, strict=True)]
    unique = [str(path) if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)]
    return dict(zip(unique, traces, strict=True))


def _write_training_report(
    path: Path, problem: Problem, runs: list[Run], rows: list[Row], emulate: bool, release: str
) -> None:
    from preamp.cli.lab.results import grouped, sentence
    from preamp.report import Strip, write_picture, write_report

    strips = []
    if problem.table.picture and problem.task == "autoencoder":
        shown = [int((problem.table.test_labels == label).argmax()) for label in range(problem.table.classes)]
        answers = {"original": problem.table.test, **{g[0].plan.name: g[0].outputs for g in grouped(runs)}}
        shape = (-1, *problem.table.picture)
        strips = [Strip(name, images[shown].reshape(shape)) for name, images in answers.items()]
    write_report(
        path,
        title=f"{TITLES[problem.task].format(problem.table.name)} in each precision",
        lead=[
            f"The same network, initial weights and batches in every run, trained with {release}. "
            f"Low precision is {ARITHMETIC[emulate]}.",
            *map(sentence, grouped(runs)),
        ],
        strips=strips,
        strips_title="Test digits as each run redraws them",
        curves=[_curve(run.plan.name, run.trace) for run in runs],
        table=rows,
        footer=footer(f"{run.plan.name}: {run.plan.policy!r}" for run in runs if run.plan.policy),
    )
    scaled = next((run for run in reversed(runs) if run.plan.policy and len(run.trace)), None)
    if strips and scaled:
        write_picture(path.with_suffix(".png"), strips, _curve(scaled.plan.name, scaled.trace))


def _curve(name: str, trace: Trace) -> Curve:
    """Return a curve in the color of its precision."""
    from preamp.report import Curve

    precision = str(trace.about.get("precision"))
    color = COLORS.get((precision, bool(trace.about.get("policy"))))
    return Curve(name, trace, color, is_reference=precision == "float32")
