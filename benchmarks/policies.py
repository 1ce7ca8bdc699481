"""Which rule flushes fewest gradients, and at what price: the table of docs/policies.md.

Run: python benchmarks/policies.py --processes 2. Reports; asserts nothing.

Every gradient with respect to a parameter, and to the output of a layer that has parameters, is rounded to
the low precision, as a tensor core stores it. `flushed` is the share of the entries that are not zero before
that and zero after it, in the mean of the steps that were not skipped. The steps themselves are those of
`preamp.torch.GradScaler`. Where the loss is divided, Adam's epsilon is divided too: the same training, with
smaller gradients.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from policy_problems import PROBLEMS, Problem
from torch import Tensor, nn

from preamp import Dynamic, Headroom, Histogram, LogMax, Policy, Static
from preamp.torch import GradScaler

STEPS, SEEDS = 1100, 5
SETTLED = 50  # skipped steps are counted from here on
DIVISORS = (1, 4096)
SWEEP = (0, *range(12, 31, 2))  # powers of two; 0 does not scale
HOPELESS = 0.5  # a constant scale that skips more steps than this trains nothing worth comparing
QUIET = 1e-3
LARGEST = {torch.float16: 65504.0, torch.float8_e5m2: 57344.0}

RULES: dict[str, Callable[[float], Policy[Any]]] = {
    "backoff, 50": lambda largest: Dynamic(growth_interval=50),
    "backoff, 2000": lambda largest: Dynamic(),
    "LogMax": lambda largest: LogMax(log_max=math.log2(largest)),
    "Histogram": lambda largest: Histogram(largest=largest),
    "Headroom": lambda largest: Headroom(largest=largest),
}
OURS = "Headroom"


class Cell(NamedTuple):
    """What is trained: a problem, in a low precision, with its loss divided by a number."""

    problem: str
    dtype: torch.dtype
    divisor: int

    def __str__(self) -> str:
        divided = f" / {self.divisor}" if self.divisor > 1 else ""
        return f"{self.problem}, {str(self.dtype).removeprefix('torch.')}{divided}"


class Job(NamedTuple):
    """One training. `rule` is a name of `RULES`, or a power of two: a constant scale."""

    cell: Cell
    rule: str | int
    seed: int
    steps: int

    def __str__(self) -> str:
        return f"{self.cell}; {self.rule}; seed {self.seed}; {self.steps} steps"


@dataclass(frozen=True)
class Outcome:
    """What came of one training, or the mean of several.

    Attributes:
        flushed: the share of gradient entries, from 0 to 1.
        skipped: steps.
        late: skipped steps after `SETTLED`, over all steps after it.
        reached: steps until the scale is within a factor of two of its median after `SETTLED`.
        accuracy: on the test rows, from 0 to 1.
    """

    flushed: float
    skipped: float
    late: float
    reached: float
    accuracy: float

    @classmethod
    def mean(cls, outcomes: Iterable[Outcome]) -> Outcome:
        """Return the mean of each number."""
        columns = zip(*(vars(one).values() for one in outcomes), strict=True)
        return cls(*map(statistics.fmean, columns))


class Rounding:
    """Rounds every gradient of a model to a low precision, and counts what that flushes."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.pairs: list[tuple[Tensor, Tensor]] = []
        for module in model.modules():
            if list(module.parameters(recurse=False)):
                module.register_forward_hook(self._watch)
        for parameter in model.parameters():
            parameter.register_hook(self._round)

    def flushed(self) -> float:
        """Return the share that was flushed since the last call."""
        present, left = (
            torch.cat([one.flatten() for one in column]) for column in zip(*self.pairs, strict=True)
        )
        self.pairs.clear()
        return 1.0 - int(torch.count_nonzero(left)) / max(int(torch.count_nonzero(present)), 1)

    def _watch(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._round)

    def _round(self, gradient: Tensor) -> Tensor:
        rounded = gradient.to(self.dtype).to(gradient.dtype)
        self.pairs.append((gradient, rounded))
        return rounded


def train(job: Job) -> Outcome:
    """Carry out one training. A constant scale whose first hundred steps are skipped is given up."""
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    problem = PROBLEMS[job.cell.problem]
    model = problem.model()
    rounding = Rounding(model, job.cell.dtype)
    eps = 1e-8 / job.cell.divisor  # so that a divided loss is the same training
    optimizer = torch.optim.Adam(model.parameters(), lr=problem.learning_rate, eps=eps, fused=True)
    scaler = GradScaler("cpu", policy=policy_of(job))
    scales, skipped, flushed = [], [], []
    for inputs, labels in problem.batches(job.seed, job.steps):
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
        optimizer.zero_grad()
        scaler.scale(loss / job.cell.divisor).backward()
        scaler.step(optimizer)
        scaler.update()
        share, step = rounding.flushed(), scaler.last_step
        assert step is not None
        scales.append(step.scale)
        skipped.append(step.skipped)
        flushed += [] if step.skipped else [share]
        if len(skipped) == 100 and all(skipped):
            break
    return outcome(problem, model, scales, skipped, flushed)


def policy_of(job: Job) -> Policy[Any]:
    """Return the rule of a job."""
    return Static(2.0**job.rule) if isinstance(job.rule, int) else RULES[job.rule](LARGEST[job.cell.dtype])


def outcome(
    problem: Problem, model: nn.Module, scales: list[float], skipped: list[bool], flushed: list[float]
) -> Outcome:
    """Return what a training comes to."""
    settled = statistics.median(scales[SETTLED:])
    reached = next(step for step, scale in enumerate(scales) if settled / 2 <= scale <= settled * 2)
    late = statistics.fmean(skipped[SETTLED:])
    return Outcome(
        statistics.fmean(flushed or [1.0]), sum(skipped), late, reached, problem.accuracy(model)
    )  # fmt: skip


def jobs(cells: list[Cell], seeds: int, steps: int) -> list[Job]:
    """Return all trainings. Constant scales over a divided loss are smaller ones over the loss."""
    rules = [(cell, rule) for cell in cells for rule in RULES]
    sweep = [(cell, power) for cell in cells if cell.divisor == 1 for power in SWEEP]
    return [Job(cell, rule, seed, steps) for seed in range(seeds) for cell, rule in [*sweep, *rules]]


def run(todo: list[Job], processes: int, kept: Path | None) -> dict[tuple[Cell, str | int], Outcome]:
    """Return the mean over the seeds of every cell and rule. What `kept` holds is not run again."""
    lines = kept.read_text().splitlines() if kept and kept.exists() else []
    done = {name: Outcome(*numbers) for name, *numbers in map(json.loads, lines)}
    left = [job for job in todo if str(job) not in done]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for job, one in zip(left, pool.imap(train, left), strict=True):
            done[str(job)] = one
            if kept:
                with kept.open("a") as file:
                    print(json.dumps([str(job), *vars(one).values()]), file=file)
    groups: dict[tuple[Cell, str | int], list[Outcome]] = {}
    for job in todo:
        groups.setdefault((job.cell, job.rule), []).append(done[str(job)])
    return {key: Outcome.mean(group) for key, group in groups.items()}


def of_cell(results: dict[tuple[Cell, str | int], Outcome], cell: Cell) -> dict[str, Outcome]:
    """Return the outcomes of a cell by rule, the best constant scale and the best quiet one among them."""
    plain = cell._replace(divisor=1)
    constants = {
        f"{power + cell.divisor.bit_length() - 1}": results[plain, power] for power in SWEEP
    }  # fmt: skip
    found = {rule: results[cell, rule] for rule in RULES}
    trains = {name: one for name, one in constants.items() if one.late <= HOPELESS}
    quiet = {name: one for name, one in constants.items() if one.late <= QUIET}
    for heading, choice in (("best constant", trains), ("best quiet constant", quiet)):
        power = min(choice, key=lambda name: choice[name].flushed)
        found[f"{heading}|{power}"] = choice[power]
    return found


def print_tables(results: dict[tuple[Cell, str | int], Outcome], cells: list[Cell]) -> None:
    """Print the tables as Markdown."""
    found = {cell: of_cell(results, cell) for cell in cells}
    show: list[tuple[str, Callable[[str, Outcome], str]]] = [
        (
            "Flushed gradient entries, percent (skipped steps in 1000 after step 50)",
            lambda name, one: f"{one.flushed * 100:.2g} ({one.late * 1000:.1f}){_power(name)}",
        ),
        (
            "Steps until the scale is reached, and skipped steps in all",
            lambda _, one: f"{one.reached:.0f}, {one.skipped:.0f}",
        ),
        ("Test accuracy, percent", lambda _, one: f"{one.accuracy * 100:.1f}"),
    ]  # fmt: skip
    for title, text in show:
        names = [name.split("|")[0] for name in next(iter(found.values()))]
        print(f"\n{title}\n\n| | {' | '.join(names)} |\n|{' --- |' * (len(names) + 1)}")
        for cell, row in found.items():
            print(f"| {cell} | {' | '.join(text(name, one) for name, one in row.items())} |")
    print_verdict(found)


def _power(name: str) -> str:
    return f" at 2^{name.split('|')[1]}" if "|" in name else ""


def print_verdict(found: dict[Cell, dict[str, Outcome]]) -> None:
    """Print what Headroom flushes beside the best other rule, and beside the best that is as quiet."""
    print(f"\n{OURS}'s flushed entries over those of the best other rule\n")
    print("| | of all | of those with <= 1 skipped step in 1000 |\n| --- | --- | --- |")
    for cell, row in found.items():
        others = {name: one for name, one in row.items() if name != OURS and one.late <= HOPELESS}
        quiet = {name: one for name, one in others.items() if one.late <= QUIET}
        print(f"| {cell} | {_ratio(row[OURS], others)} | {_ratio(row[OURS], quiet)} |")


def _ratio(ours: Outcome, others: dict[str, Outcome]) -> str:
    name = min(others, key=lambda name: others[name].flushed)
    return f"{ours.flushed / others[name].flushed:.2f} ({name.split('|')[0]}{_power(name)})"


def main() -> None:
    """Run all trainings and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true", help="one seed, 300 steps, the loss as it is")
    parser.add_argument("--problem", choices=PROBLEMS, action="append")
    parser.add_argument("--kept", type=Path, help="a file of outcomes: what it holds is not run again")
    arguments = parser.parse_args()
    seeds, steps, divisors = (1, 300, (1,)) if arguments.quick else (arguments.seeds, STEPS, DIVISORS)
    cells = [
        Cell(problem, dtype, divisor)
        for problem in arguments.problem or PROBLEMS
        for dtype in LARGEST
        for divisor in divisors
    ]
    start = time.perf_counter()
    results = run(jobs(cells, seeds, steps), arguments.processes, arguments.kept)
    print(
        f"torch {torch.__version__}, {platform.machine()}; {steps} steps, means of {seeds} seeds; "
        f"{(time.perf_counter() - start) / 60:.0f} minutes in {arguments.processes} processes"
    )
    print_tables(results, cells)


if __name__ == "__main__":
    main()
