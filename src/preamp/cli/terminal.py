"""What the terminal shows: help, tables, and the progress of trainings."""

from __future__ import annotations

import shutil
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from cyclopts.help import DefaultFormatter, DescriptionRenderer, HelpPanel, NameRenderer
from rich import box
from rich.console import Console, ConsoleOptions
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from preamp.record.formatting import power
from preamp.record.trace import Trace

if TYPE_CHECKING:
    from preamp.cli.lab.loop import Loop
    from preamp.cli.lab.problem import Problem
    from preamp.cli.lab.runs import Plan, Run
    from preamp.doctor import Diagnosis
    from preamp.scaling import Step

Row: TypeAlias = dict[str, str]
NARROWEST = 80  # in a narrower terminal lines wrap: cells that are cut would show wrong numbers

out = Console(
    highlight=False, markup=False, emoji=False, width=max(NARROWEST, shutil.get_terminal_size().columns)
)


class Unboxed(DefaultFormatter):
    """The help of cyclopts without boxes, so that the settings of all policies fit on two screens."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if not panel.entries:
            return
        console.print(panel.title, style="bold")
        table = Table.grid(padding=(0, 2, 0, 0))
        name, description = NameRenderer(max_width=console.width * 4 // 9), DescriptionRenderer()
        for entry in panel.entries:
            table.add_row(name(entry), description(entry))
        console.print(Padding(table, (0, 0, 0, 1)))


def print_table(rows: Sequence[Row]) -> None:
    """Print rows under their headings, numbers aligned to the right."""
    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in rows[0]:
        justify: Literal["left", "right"] = (
            "left" if name in ("run", "dialect", "system", "oddity", "precision") else "right"
        )
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name not in ("system", "oddity"))
    for row in rows:
        table.add_row(*map(_printable, row.values()))
    out.print(table)


def _printable(text: str) -> str:
    """Replace control characters: the names in a file are not trusted."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def print_lines(lines: Iterable[str]) -> None:
    """Print each line."""
    for line in lines:
        out.print(_printable(line))


def print_diagnosis(name: str, found: Diagnosis, *, explain: bool = False) -> None:
    """Print what a doctor found in a run, worst first, and with `explain` every cause that it considered."""
    out.print(f"\n{_printable(name)}", style="bold")
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 1))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for finding in found.findings:
        lines = [*finding.lines(), found.remedy(finding), *(finding.explained() if explain else ())]
        table.add_row(finding.severity, "\n".join(map(_printable, filter(None, lines))))
    if sum(bool(finding.settings) for finding in found.findings) > 1:
        table.add_row("all this", found.remedy())
    if rehearsal := found.rehearsal():
        table.add_row("then", rehearsal)
    if search := found.search():
        table.add_row("where", search)
    out.print(table)


def read_trace(path: Path) -> Trace:
    """Read the trace of a file, or of all ranks for "run.{rank}.jsonl", with a progress bar.

    Warnings of ranks that disagree are suppressed: `comparison.events` lists them.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with (
        warnings.catch_warnings(action="ignore", category=UserWarning),
        Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress,
    ):
        bar = progress.add_task(f"reading {_printable(path.name)}", total=None)
        return Trace.read(path, lambda done, size: progress.update(bar, completed=done, total=size))


def print_open(path: Path) -> None:
    """Say where the report is."""
    out.print(f"Open {path} in a browser.", soft_wrap=True)


def train_all(
    problem: Problem, todo: Sequence[Plan], make_loop: Callable[..., Loop], framework: str, folder: Path
) -> list[Run]:
    """Carry out the plans until they are done or Ctrl-C is pressed."""
    runs: list[Run] = []
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[last]:24}"),
        TimeRemainingColumn(),
    )
    with (
        suppress(KeyboardInterrupt),
        Progress(*columns, console=out, disable=not out.is_terminal) as progress,
    ):
        for plan in todo:
            runs.append(_train_one(problem, plan, make_loop, framework, folder, progress))
            if runs[-1].interrupted:
                break
    return runs


def _train_one(
    problem: Problem,
    plan: Plan,
    make_loop: Callable[..., Loop],
    framework: str,
    folder: Path,
    progress: Progress,
) -> Run:
    from preamp.cli.lab.runs import train

    bar = progress.add_task(f"{plan.name}, {plan.seed}", total=problem.steps, last="")

    def show(step: Step) -> None:
        if step.index % 20 == 19 or step.index == problem.steps - 1:
            last = f"loss {step.loss:.4f} scale {power(step.scale)}"
            progress.update(bar, completed=step.index + 1, last=last)

    path = folder / plan.file_name / "trace.jsonl"
    path.parent.mkdir(exist_ok=True)
    about: dict[str, Any] = {
        "command": "preamp train",
        "name": plan.name,
        "task": problem.task,
        "framework": framework,
        "precision": plan.precision,
        "seed": plan.seed,
        "policy": repr(plan.policy) if plan.policy else None,
    }
    with Trace(path=path, mode="replace", **about) as trace:
        return train(problem, plan, make_loop=make_loop, trace=trace, on_step=show)


@contextmanager
def until_done() -> Iterator[None]:
    """Ignore Ctrl-C, so that results are written in full."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
