"""Writes docs/benchmarks.md: what the rows of all recorded runs come to, in one table for each area."""

from __future__ import annotations

import json
import os
import platform
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rows import Row, markdown

__all__ = ["RECORDED", "Run", "machine", "page", "read", "record", "versions"]

RECORDED = Path(__file__).parent / "recorded"
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
GUARDED = "preamp without a guard"


@dataclass(frozen=True)
class Run:
    """One run of benchmarks.

    Attributes:
        rows: the rows that the benchmarks yielded.
        failed: the benchmarks that did not run to the end.
        began: the date, as 2026-11-22.
        minutes: how long the run took.
        busy: the load of the machine before the run: how many processes wanted a core.
        machine: the processor, its cores and the CUDA device, if any.
        versions: of Python and the packages that are compared.
        quick: whether the run only tried the machinery.
    """

    rows: Sequence[Row]
    failed: Sequence[str]
    began: str
    minutes: float
    busy: float
    machine: str
    versions: str
    quick: bool = False


@dataclass(frozen=True)
class Section:
    """One area of the page.

    Attributes:
        title: the heading.
        about: what the numbers are, in a sentence or two.
        commands: what produces them, below `benchmarks/`.
        areas: the areas whose rows it shows. With several, each row says which it is from.
        guards: whether it shows the rows that compare with and without a guard. No other section shows these.
    """

    title: str
    about: str
    commands: tuple[str, ...] = ()
    areas: tuple[str, ...] = ()
    guards: bool = False

    def shows(self, row: Row) -> bool:
        """Return whether a row belongs here."""
        return (row.against == GUARDED) == self.guards and (self.guards or row.area in self.areas)


SECTIONS = (
    Section(
        "PyTorch: GradScaler",
        "Scale, unscale, check, clip, step and update, on gradients without a network.",
        ("torch_scaler.py",),
        ("torch GradScaler",),
    ),
    Section(
        "PyTorch: autocast",
        "An operator, entering a region, and a training step, on one thread. All that loses to casts by hand "
        "is a region with edits, mostly on 8 x 8 tensors.",
        ("torch_autocast.py",),
        ("torch autocast",),
    ),
    Section(
        "PyTorch: Lens",
        "A training step with a lens. It costs most on the steps of which it takes a snapshot.",
        ("lens.py",),
        ("torch Lens",),
    ),
    Section(
        "Keras",
        "A training step of a 784-512-512-10 network with Adam and 128 rows, and what is counted in it.",
        ("keras_optimizer.py",),
        ("keras on torch", "keras on jax", "keras on tensorflow"),
    ),
    Section(
        "JAX: loss scaling",
        "A whole compiled step of AdamW, and the bytes that it accesses as XLA counts them.",
        ("jax_step.py",),
        ("jax step",),
    ),
    Section(
        "JAX: autocast",
        "The time to trace, the casts in the jaxpr, the bytes kept for backward, and the FLOPs and bytes of "
        "the compiled program.",
        ("jax_autocast.py",),
        ("jax autocast",),
    ),
    Section(
        "DeepSpeed",
        "The overflow check and `update_scale`, on one thread. The sum of DeepSpeed's document is "
        "`float(x.float().sum())`.",
        ("deepspeed_overflow.py",),
        ("deepspeed",),
    ),
    Section(
        "Policies",
        "The share of gradient entries that `Headroom` flushes to zero in small training runs. "
        "`benchmarks/recorded/policies.md` has longer runs with constant scales.",
        ("policies.py",),
        ("policies",),
    ),
    Section(
        "Guards",
        "What a `SpikeGuard` adds to a step. [Skipping spikes](guards.md#what-was-measured) shows which "
        "spikes guards miss.",
        ("torch_scaler.py", "keras_optimizer.py", "jax_step.py"),
        guards=True,
    ),
    Section(
        "Core and simulation",
        "One step of a policy in plain Python, and simulating seven rules on drawn gradients.",
        ("core.py", "simulate.py"),
        ("core", "simulate"),
    ),
)
OPENING = (
    "`make bench` times these jobs and writes this page. A **ratio** is preamp's figure divided by the "
    "other's: below 1, preamp takes less. Both run in turn in one process, and a row's ratio is the "
    "median over the rounds. Preamp **wins** or **loses** a row if both quartiles of every run are on "
    "one side of 1; otherwise it is **even**. **cost** rows compare with something that does less. Each "
    "line below counts the rows of one peer, with the range of their ratios and the job that preamp "
    "loses by most. What it loses comes first. All rows are in `benchmarks/recorded`."
)


def page(runs: Sequence[Run]) -> str:
    """Return the page as Markdown.

    Args:
        runs: from the oldest to the newest.
    """
    parts = list(_head(runs))
    for section in SECTIONS:
        parts += _section(section, runs)
    return "\n\n".join(parts) + "\n"


def _head(runs: Sequence[Run]) -> Iterator[str]:
    yield "# Benchmarks"
    yield _filled(OPENING)
    if runs[-1].quick:
        yield "**It was made with `--quick`: small sizes and two rounds. These are not measurements.**"
    if runs[-1].failed:
        yield f"**Did not run to the end: {'; '.join(runs[-1].failed)}.**"
    for machine in dict.fromkeys(one.machine for one in runs):
        days = " and ".join(one.began for one in runs if one.machine == machine)
        yield f"Measured on {days}, on {machine}."
    yield _filled(f"{runs[-1].versions}.")


def _section(section: Section, runs: Sequence[Run]) -> Iterator[str]:
    lines = list(_lines(section, runs))
    if not lines:
        return
    commands = ", ".join(f"`{one}`" for one in section.commands)
    yield f"## {section.title}"
    yield _filled(f"{section.about} ({commands})")
    yield "\n".join(markdown(lines))


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _key(row: Row) -> tuple[str, ...]:
    return row.area, row.device, row.what, row.against, row.unit


def _lines(section: Section, runs: Sequence[Run]) -> Iterator[tuple[Row, ...]]:
    """Yield the rows of a section, each with the same row of older runs before it."""
    found: dict[tuple[str, ...], list[Row]] = {}
    mark = section.guards or len(section.areas) > 1
    for run in runs:
        for row in filter(section.shows, run.rows):
            against = row.against.partition(":")[0]
            against = f"{row.area}: {against}" if mark else against
            found.setdefault(_key(row), []).append(replace(row, against=against))
    newest = set(map(_key, runs[-1].rows))
    yield from (tuple(rows) for key, rows in found.items() if key in newest)


def record(run: Run) -> Path:
    """Keep a run, as JSON lines: what is known of it, then its rows. A second one of a day gets a number."""
    taken = len(list(RECORDED.glob(f"{run.began}*.jsonl")))
    path = RECORDED / f"{run.began}{f'-{taken + 1}' if taken else ''}.jsonl"
    about = {name: value for name, value in vars(run).items() if name != "rows"}
    path.write_text("".join(json.dumps(line) + "\n" for line in (about, *map(asdict, run.rows))))
    return path


def read() -> list[Run]:
    """Return the runs that are kept, from the oldest to the newest."""
    return [
        _read(path.read_text().splitlines())
        for path in sorted(RECORDED.glob("*.jsonl"), key=lambda path: path.stem)
    ]


def _read(lines: Iterable[str]) -> Run:
    about, *dicts = map(json.loads, lines)
    return Run(rows=[Row(**row) for row in dicts], **about)


def machine(gpu: str | None) -> str:
    """Return the processor, where Linux tells its name, its cores, and the CUDA device."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    cores = len(os.sched_getaffinity(0))
    return f"{next(names, platform.machine())}, {cores} cores, {gpu or 'no CUDA device'}"


def versions() -> str:
    """Return the versions of Python and of what is compared."""
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
