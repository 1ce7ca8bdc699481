"""A published comparison of loss-scaling rules, repeated at the size of a CPU: which of its orderings hold?

Run: python benchmarks/published.py [--seeds 16] [--first-seed 0] [--steps 300] [--problem dense]

Zhao, Vogel and Ahmed (Adaptive Loss Scaling for Mixed Precision Training, arXiv 1910.12385) train a detector
(SSD512 on VOC, batches of 8) in float32 and in float16 with their adaptive layer-wise scales, static scales
of 8, 128 and 256, and dynamic scaling with a short interval of 10. Here the same rules train small networks
on scikit-learn's digits, batches of 8, with `autocast(emulate=True)`. The adaptive rule is `LayerwiseScale`
with the loss as it is. Rules share seeds: the initial weights and the batches.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from preamp import Dynamic, Policy, Static
from preamp.cli.lab.data import digits
from preamp.torch import GradScaler, LayerwiseScale, autocast

BATCH, LOOK_EVERY = 8, 25
DIVISOR = 2.0**16  # of the loss, as if it were a mean over a map of 256 x 256: float16 needs scaling
LEVEL = 0.05  # of significance, for all comparisons of a table together


class Rule(NamedTuple):
    """How a run is scaled; float32 where there is no policy."""

    policy: Policy[Any] | None
    layerwise: bool = False


RULES = {
    "float32": Rule(None),
    "adaptive": Rule(Static(1.0), layerwise=True),
    "static 8": Rule(Static(8.0)),
    "static 128": Rule(Static(128.0)),
    "static 256": Rule(Static(256.0)),
    "dynamic, interval 10": Rule(Dynamic(init_scale=2.0**16, growth_interval=10)),
    "none": Rule(Static(1.0)),
}
# The detector's mean average precision in the authors' repository; training without scaling is not listed.
PUBLISHED = {
    "adaptive": 79.27,
    "float32": 78.94,
    "static 8": 78.83,
    "static 128": 78.71,
    "static 256": 78.36,
    "dynamic, interval 10": 75.04,
}


@dataclass(frozen=True)
class Problem:
    """A network, and Adam's learning rate."""

    network: Callable[[], nn.Module]
    learning_rate: float


class Run(NamedTuple):
    """The outcome of a training.

    Attributes:
        loss: mean cross entropy of the test rows, not divided.
        accuracy: on the test rows.
        flushed: the share of the weights' gradient entries that are nonzero in float32 and arrive as zero.
        skips: steps skipped.
    """

    loss: float
    accuracy: float
    flushed: float
    skips: float


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    for number in range(6):
        stride = 2 if number in (2, 4) else 1
        layers += [nn.Conv2d(8 if number else 1, 8, 3, stride, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 10))


def _dense() -> nn.Module:
    sizes = (64,) * 6
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 10))


PROBLEMS = {"convolutions": Problem(_convolutions, 5e-3), "dense": Problem(_dense, 3e-3)}


@cache
def rows() -> tuple[Tensor, ...]:
    table = digits()
    return tuple(map(torch.from_numpy, (table.train, table.train_labels, table.test, table.test_labels)))


def train(problem: Problem, rule: Rule, seed: int, steps: int) -> Run:
    torch.manual_seed(seed)
    model = problem.network()
    optimizer = torch.optim.Adam(model.parameters(), problem.learning_rate, eps=1e-15, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    scaler = GradScaler("cpu", policy=rule.policy or Static(1.0))
    layerwise = LayerwiseScale(model) if rule.layerwise else None
    region: AbstractContextManager[Any] = nullcontext()
    if rule.policy:
        region = autocast("cpu", torch.float16, emulate=True)
    inputs, labels, *_ = rows()
    flushed, skips = [], 0
    for number, chosen in enumerate(torch.randint(len(inputs), (steps, BATCH)), start=1):
        with region:
            outputs = model(inputs[chosen])
        loss = scaler.scale(cross_entropy(outputs.float(), labels[chosen]) / DIVISOR)
        optimizer.zero_grad()
        (layerwise.backward if layerwise else Tensor.backward)(loss)
        if number % LOOK_EVERY == 0:
            flushed.append(_flushed(model, inputs[chosen], labels[chosen]))
        scaler.step(optimizer)
        skips += scaler.last_step.skipped  # type: ignore[union-attr]
        scaler.update()
        schedule.step()
    return Run(*_test(model, region), float(np.mean(flushed)), float(skips))


def _flushed(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Compare the present gradients with those of the undivided loss in float32."""
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    exact = torch.autograd.grad(cross_entropy(model(inputs), labels), weights)
    there = sum(int(one.count_nonzero()) for one in exact)
    pairs = zip(weights, exact, strict=True)
    lost = sum(int(((weight.grad == 0) & (one != 0)).sum()) for weight, one in pairs)
    return lost / there if there else 0.0


def _test(model: nn.Module, region: AbstractContextManager[Any]) -> tuple[float, float]:
    *_, inputs, labels = rows()
    with torch.no_grad(), region:
        outputs = model(inputs).float()
    return float(cross_entropy(outputs, labels)), float((outputs.argmax(1) == labels).float().mean())


def table(runs: dict[str, list[Run]]) -> None:
    print("| rule | test loss | accuracy, % | flushed, % | skipped steps |")
    print("| --- | --- | --- | --- | --- |")
    for name, found in runs.items():
        columns = np.array(found) * [1.0, 100.0, 100.0, 1.0]
        means, errors = columns.mean(0), columns.std(0, ddof=1) / math.sqrt(len(found))
        cells = (f"{m:.{d}f} ± {e:.{d}f}" for m, e, d in zip(means, errors, (3, 1, 2, 1), strict=True))
        print(f"| {name} | {' | '.join(cells)} |")


def orderings(runs: dict[str, list[Run]]) -> None:
    """Print, for every pair that the paper ranks, and with no scaling ranked last, what came out here.

    Wilcoxon's signed-rank test over the seeds: losses of runs that fail are far from normal.
    """
    ranked = sorted(PUBLISHED, key=lambda name: -PUBLISHED[name])
    pairs = [*combinations(ranked, 2), *((name, "none") for name in ranked)]
    losses = {name: np.array([run.loss for run in found]) for name, found in runs.items()}
    gaps = [losses[worse] - losses[better] for better, worse in pairs]
    chances = holm([float(stats.wilcoxon(gap).pvalue) for gap in gaps])
    print("\n| better | worse | difference of test loss | p | here |")
    print("| --- | --- | --- | --- | --- |")
    for (better, worse), gap, p in zip(pairs, gaps, chances, strict=True):
        verdict = "no difference seen" if p >= LEVEL else "as ranked" if gap.mean() > 0 else "reversed"
        error = gap.std(ddof=1) / math.sqrt(len(gap))
        print(f"| {better} | {worse} | {gap.mean():+.3f} ± {error:.3f} | {p:.2g} | {verdict} |")


def holm(chances: list[float]) -> list[float]:
    """Return p-values that hold for all comparisons together (Holm 1979)."""
    adjusted, largest = [1.0] * len(chances), 0.0
    for rank, index in enumerate(np.argsort(chances)):
        largest = max(largest, (len(chances) - rank) * chances[index])
        adjusted[index] = min(largest, 1.0)
    return adjusted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--problem", choices=PROBLEMS, action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    for name in arguments.problem or PROBLEMS:
        start = time.perf_counter()
        runs = {
            rule: [train(PROBLEMS[name], how, seed, arguments.steps) for seed in seeds]
            for rule, how in RULES.items()
        }
        print(f"\n{name}: {arguments.steps} steps, {len(seeds)} seeds: mean ± standard error\n")
        table(runs)
        orderings(runs)
        print(f"\n{time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
