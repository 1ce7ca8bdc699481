"""Writes docs/benchmarks.md: the rows of all recorded runs, in one table for each area.

Its text, and the longer tables that `make bench` does not measure, are copied from `recorded/*.md`.
"""

from __future__ import annotations

import json
import os
import platform
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rows import Row, markdown, number, summary

__all__ = ["RECORDED", "Run", "machine", "page", "read", "record", "versions"]

RECORDED = Path(__file__).parent / "recorded"
RELEASE_0_1 = RECORDED / "release_0.1"  # runs of its benchmarks, with the names that rows have now
CHANGED = 1.03  # a smaller change of a ratio is not called one
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
        kept: the names of files in `recorded`, without `.md`, to copy below the table.
    """

    title: str
    about: str
    commands: tuple[str, ...] = ()
    areas: tuple[str, ...] = ()
    guards: bool = False
    kept: tuple[str, ...] = ()

    def shows(self, row: Row) -> bool:
        """Return whether a row belongs here."""
        return (row.against == GUARDED) == self.guards and (self.guards or row.area in self.areas)


SECTIONS = (
    Section(
        "PyTorch: GradScaler",
        "The time of scale, unscale, check, clip, step and update, on gradients without a network; "
        'the rows named "backward and step" have one. "What it adds" leaves out the time of the '
        "optimizer itself.",
        ("torch_scaler.py",),
        ("torch GradScaler",),
    ),
    Section(
        "PyTorch: LossScaleOptimizer",
        "The same time, with `preamp.torch.LossScaleOptimizer` around the optimizer.",
        ("torch_scaler.py",),
        ("torch LossScaleOptimizer",),
    ),
    Section(
        "PyTorch: autocast",
        "The time of an operator, of entering a region, and of a training step, on one thread. 8 x 8 "
        'tensors show the time that Python and the dispatcher take. "Before the first of ours" is PyTorch\'s '
        "region before preamp's was entered.",
        ("torch_autocast.py",),
        ("torch autocast",),
    ),
    Section(
        "PyTorch: Lens",
        "The time of a training step with a lens, divided by the time of the same step without one.",
        ("lens.py",),
        ("torch Lens",),
    ),
    Section(
        "PyTorch: LayerwiseScale",
        "The time of forward and backward with `LayerwiseScale`, divided by the time without it. The "
        "loss is so small that most layers are raised. Below the table is a published comparison, repeated "
        "at a size that suits a CPU.",
        ("layerwise.py",),
        ("torch LayerwiseScale",),
        kept=("layerwise",),
    ),
    Section(
        "Keras on PyTorch and JAX",
        "The time of a training step of a 784-512-512-10 network with Adam and 128 rows, and what is "
        "counted in it.",
        ("keras_optimizer.py --backend torch", "keras_optimizer.py --backend jax"),
        ("keras on torch", "keras on jax"),
    ),
    Section(
        "Keras on TensorFlow",
        "The same on TensorFlow. `preamp.tensorflow` has no benchmark of its own.",
        ("keras_optimizer.py --backend tensorflow",),
        ("keras on tensorflow",),
    ),
    Section(
        "JAX: loss scaling",
        "The time of a whole compiled step of AdamW, and the bytes that it accesses as XLA counts "
        "them. All train the same network. jmp, flax, optax, mpx and the step without loss scaling "
        "clip with optax.",
        ("jax_step.py --model gpt", "jax_step.py --model mlp"),
        ("jax step",),
    ),
    Section(
        "JAX: autocast",
        "The time to trace, the casts in the jaxpr, the bytes kept for backward, and the FLOPs and "
        "bytes of the compiled program.",
        ("jax_autocast.py",),
        ("jax autocast",),
    ),
    Section(
        "DeepSpeed",
        "The time of the overflow check and of `update_scale`, for DeepSpeed's scaler and preamp's, "
        "on one thread. \"The document's sum\" is the check in DeepSpeed's documentation, "
        "`float(x.float().sum())`.",
        ("deepspeed_overflow.py",),
        ("deepspeed",),
    ),
    Section(
        "Policies",
        "The share of gradient entries that `Headroom` flushes to zero in small training runs, divided by "
        "another rule's share. Below the table are longer runs with every rule and with constant "
        "scales.",
        ("policies.py",),
        ("policies",),
        kept=("policies",),
    ),
    Section(
        "Guards",
        "What a `SpikeGuard` adds to a step, in time and in what is counted. "
        "[Skipping spikes](guards.md#what-was-measured) shows which spikes the guards of preamp and of "
        "other systems miss (`python benchmarks/guard_tables.py`).",
        ("torch_scaler.py", "keras_optimizer.py", "jax_step.py"),
        guards=True,
    ),
    Section(
        "Core and simulation",
        "The time of one step of a policy in plain Python, without an adapter, and of simulating ten "
        "rules on drawn gradients.",
        ("core.py", "simulate.py"),
        ("core", "simulate"),
    ),
)


def page(runs: Sequence[Run]) -> str:
    """Return the page as Markdown.

    Args:
        runs: from the oldest to the newest. If the newest is complete, the page also has the longer tables.
    """
    parts = [*_head(runs), _kept("reading"), "\n".join(_overview(runs)), *_since(runs), "## All rows"]
    full = not runs[-1].quick and all(any(map(one.shows, runs[-1].rows)) for one in SECTIONS)
    for section in SECTIONS:
        parts += _section(section, runs, full)
    return "\n\n".join([*parts, *([_kept("elsewhere")] if full else [])]) + "\n"


def _head(runs: Sequence[Run]) -> Iterator[str]:
    yield "# Benchmarks"
    yield _kept("opening")
    if runs[-1].quick:
        yield "**It was made with `--quick`: small sizes and two rounds. These are not measurements.**"
    if runs[-1].failed:
        yield f"**Did not run to the end: {'; '.join(runs[-1].failed)}.**"
    for versions in dict.fromkeys(one.versions for one in runs):
        same = [one for one in runs if one.versions == versions]
        lines = [
            f"- {one.began}, {one.minutes:.0f} minutes on {one.machine}; load before the run: {one.busy:.1f}."
            for one in same
        ]
        yield "\n".join([*lines, "", _filled(f"{versions}.")])


def _overview(runs: Sequence[Run]) -> Iterator[str]:
    """Yield how many rows of each verdict there are, area by area."""
    counts = {one.title: summary(list(_lines(one, runs))) for one in SECTIONS}
    heads = list(next(iter(counts.values())))
    yield f"| area | {' | '.join(heads)} |\n| --- |{' ---: |' * len(heads)}"
    for title, found in counts.items():
        if any(found.values()):
            yield f"| {title} | {' | '.join(map(str, found.values()))} |"


def _since(runs: Sequence[Run]) -> Iterator[str]:
    """Yield how the ratios changed since 0.1, if its benchmarks ran on the day of the newest run.

    They run as `PYTHONPATH=src python benchmarks/run.py --page FILE` in a worktree of commit ca8c6fd.
    """
    kept = RELEASE_0_1 / f"{runs[-1].began}.jsonl"
    if runs[-1].quick or not kept.exists():
        return
    old = {_key(row): row for row in _read(kept.read_text().splitlines()).rows}
    pairs = [(old[_key(row)], row) for row in runs[-1].rows if _key(row) in old]
    worse = [(was, now) for was, now in pairs if _is_higher(now, was)]
    better = sum(_is_higher(was, now) for was, now in pairs)
    same = len(pairs) - better - len(worse)
    yield "## Since 0.1"
    yield _filled(
        "The benchmarks of 0.1 were run again after the newest run, on the same machine. "
        f"{len(pairs)} rows are in both. A ratio counts as changed if it differs by more than "
        f"{CHANGED - 1:.0%} and the quartiles do not overlap: {better} are lower now, {same} are unchanged, "
        f"and {len(worse)} are higher:"
    )
    head = ["| | 0.1 | now | job | compared with | unit |", "| --- | ---: | ---: | --- | --- | --- |"]
    yield "\n".join([*head, *(_change(was, now) for was, now in worse)])
    yield _kept("since_0.1")


def _change(was: Row, now: Row) -> str:
    ratios = f"{number(was.ratio)} | {number(now.ratio)}"
    return f"| {now.verdict} | {ratios} | {now.area}: {now.what} | {now.against} | {now.unit} |"


def _is_higher(one: Row, other: Row) -> bool:
    return one.ratio > CHANGED * other.ratio and one.low > other.high


def _key(row: Row) -> tuple[str, ...]:
    return row.area, row.device, row.what, row.against, row.unit


def _section(section: Section, runs: Sequence[Run], full: bool) -> Iterator[str]:
    lines = list(_lines(section, runs))
    if not lines:
        return
    commands = ", ".join(f"`python benchmarks/{one}`" for one in section.commands)
    yield f"### {section.title}"
    yield f"{_filled(section.about)}\nMeasured by {commands}."
    yield "\n".join(markdown(lines))
    if full:
        for name in section.kept:
            yield _kept(name)


def _kept(name: str) -> str:
    return (RECORDED / f"{name}.md").read_text().strip()


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _lines(section: Section, runs: Sequence[Run]) -> Iterator[tuple[Row, ...]]:
    """Yield the rows of a section, each with the same row of older runs before it."""
    found: dict[tuple[str, ...], list[Row]] = {}
    mark = section.guards or len(section.areas) > 1
    for run in runs:
        for row in filter(section.shows, run.rows):
            found.setdefault(_key(row), []).append(
                replace(row, what=f"{row.area}: {row.what}") if mark else row
            )
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
    about, *rows = map(json.loads, lines)
    return Run(rows=[Row(**row) for row in rows], **about)


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
