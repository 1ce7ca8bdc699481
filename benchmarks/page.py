"""Writes the page of all rows, docs/benchmarks.md."""

from __future__ import annotations

import ast
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rows import Row, markdown

__all__ = ["Run", "page"]

HERE = Path(__file__).parent
PACKAGES = (
    "preamp",
    "torch",
    "jax",
    "optax",
    "jmp",
    "flax",
    "mixed_precision_for_JAX",
    "grampax",
    "keras",
    "tensorflow",
    "tensorflow-cpu",
    "deepspeed",
)
HOW_TO_READ = """\
What is compared takes turns in one process, in an order that changes every round. A ratio is preamp's
figure over the other's, the median of the rounds' ratios: below 1 preamp takes less. Their quartiles
stand beside it. What is counted (bytes, calls, casts) has none, and where there is "noise" the other's
figure cannot be told from nothing. Against something that does the same job preamp wins or loses if both
quartiles are on one side of 1, and is even otherwise. Beside something that does less, as the optimizer
alone or one reading of the memory, a row says what preamp costs."""
VERDICTS = ("wins", "even", "loses", "cost")


@dataclass(frozen=True)
class Run:
    """One run of benchmarks.

    Attributes:
        rows: what they yielded.
        scripts: the names of their files, without `.py`.
        failed: those that did not end well.
        gpu: the name of the CUDA device, if there is one.
        began: the day, as 2026-11-22.
        minutes: how long it took.
        busy: the machine's load before it began: processes that wanted a core.
        quick: whether nothing but the machinery was tried.
    """

    rows: Sequence[Row]
    scripts: Sequence[str]
    failed: Sequence[str]
    gpu: str | None
    began: str
    minutes: float
    busy: float
    quick: bool


def page(run: Run) -> str:
    """Return the page as Markdown."""
    rows = run.rows
    parts = _head(run), _machine(run), [HOW_TO_READ], _summary(rows), _scripts(run.scripts), _all(rows)
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _head(run: Run) -> Iterator[str]:
    yield "# Benchmarks\n\n`make bench` writes this page; nothing in it is written by hand."
    if run.quick:
        yield "**It was made with `--quick`: small sizes and two rounds. These are not measurements.**"
    if run.failed:
        yield f"**Did not run to the end: {'; '.join(run.failed)}.**"


def _machine(run: Run) -> Iterator[str]:
    yield f"- {run.began}, in {run.minutes:.0f} min; the load before was {run.busy:.1f} processes."
    yield f"- Machine: {_processor()}, {len(os.sched_getaffinity(0))} cores; {run.gpu or 'no CUDA device'}."
    yield f"- Versions: Python {platform.python_version()}, {', '.join(_versions())}."


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how many rows there are of each verdict."""
    yield f"| rows | {' | '.join(VERDICTS)} |\n| --- |{' ---: |' * len(VERDICTS)}"
    for area in dict.fromkeys(row.area for row in rows):
        found = [row.verdict for row in rows if row.area == area]
        yield f"| {area} | {' | '.join(str(found.count(verdict)) for verdict in VERDICTS)} |"


def _scripts(scripts: Iterable[str]) -> Iterator[str]:
    """Yield what each benchmark compares, in its own words, and its command."""
    yield "Each benchmark also runs alone:\n"
    yield "| command | compares |\n| --- | --- |"
    for script in dict.fromkeys(scripts):
        doc = ast.get_docstring(ast.parse((HERE / f"{script}.py").read_text())) or ""
        yield f"| `python benchmarks/{script}.py` | {doc.splitlines()[0]} |"


def _all(rows: Iterable[Row]) -> Iterator[str]:
    yield "## All rows\n"
    yield from markdown(rows)


def _versions() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def _processor() -> str:
    """Return the processor's name where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
