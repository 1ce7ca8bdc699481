"""Small trainings with each rule for the loss scale, and what the rule flushed and skipped.

Every gradient with respect to a parameter, and to the output of a layer that has parameters, is rounded to
the low precision, as a tensor core stores it. `flushed` is the share of nonzero entries that this rounding
turns into zero, averaged over the steps that were not skipped. `preamp.torch.GradScaler` takes the steps.
Where the loss is divided, Adam's epsilon is divided too, so that the training is the same with smaller
gradients.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from policy_problems import PROBLEMS, Problem
from torch import Tensor, nn

from preamp import Dynamic, Headroom, Policy, Static
from preamp.torch import GradScaler

__all__ = ["LARGEST", "OURS", "RULES", "SETTLED", "Cell", "Job", "Outcome", "cells", "run"]

SETTLED = 50  # skipped steps are counted from here on
LARGEST = {torch.float16: 65504.0, torch.float8_e5m2: 57344.0}

RULES: dict[str, Callable[[float], Policy[Any]]] = {
    "backoff, 50": lambda largest: Dynamic(growth_interval=50),
    "backoff, 2000": lambda largest: Dynamic(),
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
    """The outcome of one training, or the mean of several.

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


def cells(problems: Iterable[str], divisors: Iterable[int]) -> list[Cell]:
    """Return what is trained, in every low precision."""
    return [Cell(*parts) for parts in itertools.product(problems, LARGEST, divisors)]


def run(todo: Sequence[Job], processes: int, kept: Path | None = None) -> dict[Job, Outcome]:
    """Return the outcome of every job. Jobs in the file `kept` are not run again."""
    lines = kept.read_text().splitlines() if kept and kept.exists() else []
    done = {name: Outcome(*numbers) for name, *numbers in map(json.loads, lines)}
    left = [job for job in todo if str(job) not in done]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for job, one in zip(left, pool.imap(train, left), strict=True):
            done[str(job)] = one
            if kept:
                with kept.open("a") as file:
                    print(json.dumps([str(job), *vars(one).values()]), file=file)
    return {job: done[str(job)] for job in todo}
