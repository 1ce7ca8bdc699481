"""Whether trainings that low precision spoils end as in float32, with tables that tune found and with others.

Run: python benchmarks/tune_cases/run.py [--quick] [--only NAME] [--seed 0] [--json FILE]

Each of eight models is trained in float32, and in rehearsed float16 and bfloat16 with each table:

    CUDA        PyTorch's table for CUDA
    JAX         the nearest table to JAX's
    low         every operator in low precision
    tune low    what `preamp.torch.tune` makes of "low", from one batch before training
    tune        what it makes of the default table
    greedy      what is found from "low" by keeping one more operator or module in float32 at a time, the one
                that leaves the smallest error of the gradients, until the error is at most that of "tune low"
                or 400 steps were rehearsed

The final loss is the mean, over the last tenth of the steps, of the loss of a fixed batch in float32. The
noise of a model is the standard deviation of its final loss in float32 over seeds, which decide the weights
and the order of the data. A run is within the noise if it ends at most two of these deviations from the run
in float32 with the same seed. A star marks tables with which it does, which have at least 90 % of the FLOPs
of the products in low precision, and for which at most 20 steps were rehearsed; other rows say what the first
of these is that they miss: "loss", "low" or "steps".
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

# The package's modules import each other by its name, so the imports after this line cannot come before it.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from preamp import casting  # noqa: E402
from preamp.autocasting.tables import Casting  # noqa: E402
from preamp.blaming.blame import for_json  # noqa: E402
from preamp.torch import GradScaler, autocast  # noqa: E402
from tune_cases import Batch, Loss, Problem  # noqa: E402
from tune_cases.models import PROBLEMS  # noqa: E402
from tune_cases.tables import (  # noqa: E402
    CUDA,
    EVERYTHING_LOW,
    JAX,
    Exact,
    gradients,
    greedy,
    low_share,
)

DTYPES = (torch.float16, torch.bfloat16)
SEEDS = 4  # of the noise
NOISE = 2.0  # standard deviations
LOW_ENOUGH = 0.9
MOST = 20  # rehearsals of tune
MOST_GREEDY = 400
QUICK = ("norm", "contrast")
QUICK_STEPS, QUICK_GREEDY = 60, 60
FIRST_SCALE, SMALLEST_SCALE = 2.0**16, 2.0**-14


@dataclass(frozen=True)
class Trained:
    """How a training ended.

    Attributes:
        loss: the final loss.
        skipped: the number of steps that were skipped.
        seconds: how long it took.
    """

    loss: float
    skipped: int
    seconds: float


@dataclass(frozen=True)
class Found:
    """A table.

    Attributes:
        casting: the table; None if there is none, for the reason in `failure`.
        rehearsals: the number of steps that were rehearsed to find it.
        kept: what it keeps in float32, in words.
        seconds: how long it took to find it.
        failure: why there is none.
    """

    casting: Casting | None
    rehearsals: int = 0
    kept: str = ""
    seconds: float = 0.0
    failure: str = ""


@dataclass(frozen=True)
class Row:
    """One table on one model in one precision.

    Attributes:
        problem: the model's name.
        dtype: the low precision.
        table: the table's name.
        loss: the final loss; NaN if it is not finite or there is no table.
        difference: from the loss in float32, in standard deviations of the noise.
        skipped: the number of steps that were skipped.
        low_share: the share of the products' FLOPs in low precision.
        rehearsals: the number of steps that were rehearsed to find the table.
        gradient_error: of one step before training; the share of values that are not finite, and the error of
            the others.
        kept: what the table keeps in float32, where it was searched for.
        search_seconds: how long the search took.
        seconds: how long the training took.
        failure: why there is no table.
    """

    problem: str
    dtype: str
    table: str
    loss: float
    difference: float
    skipped: int
    low_share: float
    rehearsals: int
    gradient_error: tuple[float, float]
    kept: str
    search_seconds: float
    seconds: float
    failure: str = ""

    @property
    def within_noise(self) -> bool:
        """Whether the run ended as in float32."""
        return abs(self.difference) <= NOISE

    @property
    def reached(self) -> bool:
        """Whether the row is what is hoped for of tune."""
        return self.within_noise and self.low_share >= LOW_ENOUGH and self.rehearsals <= MOST

    @property
    def missed(self) -> str:
        """The first thing that is missing to that."""
        missed = {
            "loss": not self.within_noise,
            "low": self.low_share < LOW_ENOUGH,
            "steps": self.rehearsals > MOST,
        }
        return next((name for name, is_missed in missed.items() if is_missed), "")


def main() -> None:
    """Run the models and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}, 60 steps each")
    parser.add_argument("--only", choices=PROBLEMS, help="the name of a model")
    parser.add_argument("--seed", type=int, default=0, help="of the runs that are compared")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of gradients in float16 that underflow, which is the point
    chosen = [options.only] if options.only else QUICK if options.quick else PROBLEMS
    problems = [PROBLEMS[name] for name in chosen]
    if options.quick:
        problems = [replace(problem, steps=QUICK_STEPS) for problem in problems]
    start, rows, noises = time.perf_counter(), [], []
    print(" ".join(title.rjust(width) for title, width in COLUMNS.items()))
    for problem in problems:
        losses = [train(problem, seed).loss for seed in _seeds(options.seed)]
        noise = statistics.stdev(losses)
        noises.append({"problem": problem.name, "losses": losses, "noise": noise})
        print(f"\n{problem.name}: {problem.about}. Float32 {losses[0]:.4g}, noise {noise:.2g}")
        for dtype in DTYPES:
            for row in compare(problem, dtype, options.seed, losses[0], noise, _most_greedy(options.quick)):
                rows.append(row)
                print(_line(row), flush=True)
    _print_summary(rows)
    print(f"It took {time.perf_counter() - start:.0f} s.")
    if options.json:
        written = {"float32": noises, "rows": [asdict(row) | {"reached": row.reached} for row in rows]}
        options.json.write_text(json.dumps(for_json(written), indent=1) + "\n")


def _seeds(first: int) -> list[int]:
    return list(range(first, first + SEEDS))


def _most_greedy(quick: bool) -> int:
    return QUICK_GREEDY if quick else MOST_GREEDY


def train(
    problem: Problem, seed: int, dtype: torch.dtype | None = None, table: Casting | None = None
) -> Trained:
    """Train a model; in float32 without a dtype."""
    model, loss_fn = problem.build(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), problem.learning_rate, eps=problem.epsilon, weight_decay=0.0, fused=True
    )
    scaler = GradScaler("cpu", init_scale=FIRST_SCALE, enabled=dtype is torch.float16)
    region = autocast("cpu", dtype, casting=table, model=model, emulate=True) if dtype else None
    evaluation, losses, skipped = problem.evaluation(), [], 0
    start = time.perf_counter()
    for step, batch in enumerate(problem.batches(seed, problem.steps)):
        optimizer.zero_grad()
        if region is None:
            loss = loss_fn(batch)
        else:
            with region:
                loss = loss_fn(batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.last_step is not None and scaler.last_step.skipped
        if step >= problem.steps - problem.steps // 10:
            with torch.no_grad():
                losses.append(loss_fn(evaluation).item())
    return Trained(statistics.fmean(losses), skipped, time.perf_counter() - start)


def compare(
    problem: Problem, dtype: torch.dtype, seed: int, reference: float, noise: float, most_greedy: int
) -> Iterator[Row]:
    """Yield a row for each table."""
    model, loss_fn = problem.build(seed)
    batch = problem.batches(seed, 1)[0]
    exact = Exact(model, loss_fn, batch)
    aim = CUDA  # without tune

    def error_of(table: Casting) -> tuple[float, float]:
        scale = loss_scale(model, loss_fn, batch, dtype, table)
        return exact.error(gradients(model, loss_fn, batch, dtype, table, scale))

    def search() -> Found:
        scale = loss_scale(model, loss_fn, batch, dtype, aim)
        result = greedy(model, loss_fn, batch, dtype, error_of(aim), exact, scale, most_greedy)
        return Found(result.casting, result.rehearsals, ", ".join(result.kept))

    ways: dict[str, Callable[[], Found]] = {
        "CUDA": lambda: Found(CUDA),
        "JAX": lambda: Found(JAX),
        "low": lambda: Found(EVERYTHING_LOW),
        "tune low": partial(_tuned, problem, seed, dtype, EVERYTHING_LOW),
        "tune": partial(_tuned, problem, seed, dtype, casting.DEFAULT),
        "greedy": search,
    }
    for name, way in ways.items():
        start = time.perf_counter()
        try:
            found = way()
        except Exception as error:  # one row, and no reason to stop
            found = Found(None, failure=_shown_error(error))
        found = replace(found, seconds=time.perf_counter() - start)
        if found.casting is None:
            ended, error, share = Trained(math.nan, 0, 0.0), (math.nan, math.nan), math.nan
        else:
            ended = train(problem, seed, dtype, found.casting)
            error = error_of(found.casting)
            share = low_share(model, loss_fn, batch, dtype, found.casting)
        if name == "tune low" and found.casting is not None:
            aim = found.casting
        difference = (ended.loss - reference) / noise
        yield Row(
            problem.name,
            str(dtype).removeprefix("torch."),
            name,
            ended.loss,
            difference if math.isfinite(difference) else math.inf,
            ended.skipped,
            share,
            found.rehearsals,
            error,
            found.kept,
            found.seconds,
            ended.seconds,
            found.failure,
        )


def loss_scale(model: nn.Module, loss_fn: Loss, batch: Batch, dtype: torch.dtype, table: Casting) -> float:
    """Return the loss scale that GradScaler comes to in the first steps, 2**16 if no scale helps."""
    scale = FIRST_SCALE if dtype is torch.float16 else 1.0
    while dtype is torch.float16 and scale >= SMALLEST_SCALE:
        if all(each.isfinite().all() for each in gradients(model, loss_fn, batch, dtype, table, scale)):
            return scale
        scale /= 2
    return FIRST_SCALE if dtype is torch.float16 else 1.0


def _tuned(problem: Problem, seed: int, dtype: torch.dtype, table: Casting) -> Found:
    from preamp.torch import tune  # the other rows run without it

    model, loss_fn = problem.build(seed)
    batch = problem.batches(seed, 1)[0]
    tuned: Any = tune(loss_fn, batch, model=model, dtype=dtype, casting=table)
    return Found(tuned.casting, tuned.rehearsals, _difference(tuned.casting, table))


def _difference(table: Casting, before: Casting) -> str:
    edits = [edit for edit in table.edits if edit not in before.edits]
    return ", ".join(edit.name if edit.rule == "float32" else f"{edit.name} {edit.rule}" for edit in edits)


def _shown_error(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"


COLUMNS = {
    "precision": 9,
    "table": 9,
    "final loss": 11,
    "deviations": 11,
    "skipped": 8,
    "low": 7,
    "rehearsed": 10,
    "search s": 9,
    "reached": 8,
}


def _line(row: Row) -> str:
    if row.failure:
        return f"{row.dtype:>9} {row.table:>9}  {row.failure}"[:110]
    cells = [
        row.dtype,
        row.table,
        f"{row.loss:.4g}",
        f"{row.difference:+.1f}" if abs(row.difference) < 1000 else f"{row.difference:+.0e}",
        str(row.skipped),
        f"{row.low_share:.1%}",
        str(row.rehearsals) if row.rehearsals else "-",
        f"{row.search_seconds:.1f}" if row.rehearsals else "-",
        "*" if row.reached else row.missed,
    ]
    return " ".join(cell.rjust(width) for cell, width in zip(cells, COLUMNS.values(), strict=True))


def _print_summary(rows: Sequence[Row]) -> None:
    print()
    for name in dict.fromkeys(row.table for row in rows):
        mine = [row for row in rows if row.table == name]
        within = sum(row.within_noise for row in mine)
        reached = sum(row.reached for row in mine)
        print(f"{name:>9}: {within} of {len(mine)} within the noise of float32, {reached} as hoped for.")
    print()
    for row in rows:
        if row.kept and row.table in ("tune low", "tune", "greedy"):
            print(f"{row.problem}, {row.dtype}, {row.table}: {row.kept}"[:110])


if __name__ == "__main__":
    main()
