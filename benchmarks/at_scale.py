"""What overflow costs on many GPUs: the tables of docs/at_scale.md. Reports; asserts nothing.

Run: python benchmarks/at_scale.py [--ranks 10000] [--steps-per-second 0.5] [--hop 1e-5] [--gloo]

On paper: how far below overflow a scale has to stay so that few steps are skipped. In simulation: what rules
skip and flush when the largest gradient of all ranks counts. --gloo measures the agreement of real processes.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import NormalDist
from typing import Any

from preamp import Dynamic, Headroom, Histogram, LogMax, Policy, Static, dialects, processes, simulate
from preamp.record.formatting import percent

YEAR = 365.25 * 24 * 3600  # seconds
RATE = 1e-3
RANKS = (1, 8, 64, 512, 4096, 10_000)
STEPS, SETTLED = 100_000, 20_000
JITTER, TAIL = 0.5, 1.5
ROUNDS, CALLS = 9, 50

RULES: dict[str, Policy[Any]] = {
    "Dynamic": Dynamic(),
    "dialects.TORCH": dialects.TORCH,
    "dialects.DEEPSPEED": dialects.DEEPSPEED,
    "dialects.MEGATRON": dialects.MEGATRON,
    "LogMax": LogMax(),
    "Histogram": Histogram(),
    "Headroom": Headroom(),
}
WAYS = {"one of 2 numbers": (2,), "one of 282 numbers": (282,), "two of 1 number": (1, 1)}


def chance_of_step(p: float, ranks: int) -> float:
    """Return 1 - (1 - p)**N, the chance that one rank or more overflows."""
    return -math.expm1(ranks * math.log1p(-p))


def distance_needed(tail: str, ranks: int, rate: float = RATE) -> float:
    """Return how many powers of two below overflow the typical peak must stay for a share `rate` of skips."""
    p = -math.expm1(math.log1p(-rate) / ranks)
    return -JITTER * NormalDist().inv_cdf(p) if tail == "normal" else -math.log2(p) / TAIL


def flushed(powers: float, dtype: str) -> float:
    """Return the share of entries that are flushed at this distance from overflow."""
    process = processes.Stationary(dtype=dtype)
    return process.flushed(process.top * 2.0**-powers)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Return the lines of a table."""
    for cells in (heads, ["---"] + ["---:"] * (len(heads) - 1), *rows):
        yield f"| {' | '.join(cells)} |"


def distance_table() -> Iterator[str]:
    """Return the distance from overflow at which one step in 1000 is skipped, and what is flushed there."""
    dtypes = ("float16", "float8_e5m2")
    heads = [
        "ranks",
        *(f"{tail}: {what}" for tail in ("normal", "power law") for what in ("distance", *dtypes)),
    ]

    def row(ranks: int) -> list[str]:
        distances = [distance_needed(tail, ranks) for tail in ("normal", "power law")]
        lost = [[percent(flushed(distance, dtype)) for dtype in dtypes] for distance in distances]
        return [f"{ranks:,}", f"{distances[0]:.1f}", *lost[0], f"{distances[1]:.1f}", *lost[1]]

    return table(heads, [row(ranks) for ranks in RANKS])


def skip_table() -> Iterator[str]:
    """Return how often a step is skipped at the scale at which a single rank skips one in 1000."""
    return table(
        ["ranks", "skipped"], [[f"{ranks:,}", percent(chance_of_step(RATE, ranks))] for ranks in RANKS]
    )


def probing_table(steps_per_second: float, ranks: int) -> Iterator[str]:
    """Return what growing costs if every growth ends in an overflow and a backoff."""
    heads = ["rule", "skips", "clean steps between", "skipped a year", "hours", "GPU hours"]

    def row(name: str) -> list[str]:
        rule = RULES[name]
        rule = getattr(rule, "policy", rule)
        clean = rule.growth_interval + rule.compat.growth_delay
        lost = YEAR * steps_per_second * rule.hysteresis / (clean + rule.hysteresis)
        hours = lost / steps_per_second / 3600
        return [
            name,
            str(rule.hysteresis),
            f"{clean:,}",
            f"{lost:,.0f}",
            f"{hours:.1f}",
            f"{hours * ranks:,.0f}",
        ]

    return table(heads, [row(name) for name, rule in RULES.items() if not rule.needs])


def agreement_table(hop: float, steps_per_second: float) -> Iterator[str]:
    """Return what agreeing costs in a model where an all-reduce of a few bytes takes hop * ceil(log2(N))."""

    def row(ranks: int) -> list[str]:
        seconds = hop * math.ceil(math.log2(ranks))
        hours = seconds * YEAR * steps_per_second / 3600
        once, twice = (f"{n * seconds * 1e6:.0f} µs" for n in (1, 2))
        return [f"{ranks:,}", once, twice, f"{hours * 60:.0f} min", f"{hours * ranks:,.0f}"]

    heads = ["ranks", "one", "two", "the second one, a year", "GPU hours"]
    return table(heads, [row(ranks) for ranks in RANKS[1:]])


def kinds(ranks: int) -> dict[str, processes.Process]:
    """Return the processes to simulate. A spike hits one step in 2000, however many ranks there are."""
    settings: dict[str, Any] = {"steps": STEPS, "ranks": ranks}
    return {
        "sharp": processes.Stationary(jitter=0.01, **settings),
        "normal": processes.Stationary(jitter=JITTER, **settings),
        "drifting": processes.Drifting(jitter=JITTER, **settings),
        "spiky": processes.Spiky(jitter=JITTER, chance=0.0005 / ranks, **settings),
        "power law": processes.HeavyTailed(tail=TAIL, **settings),
    }


def rule_table(ranks: int, steps_per_second: float) -> Iterator[str]:
    """Return how many steps a year each rule skips once it has settled, and the share that it flushes."""
    year, drawn = YEAR * steps_per_second, kinds(ranks)
    best = [
        outcome(Static(process.best_scale), process, year) for process in drawn.values() if process.best_scale
    ]
    rows = [[name, *(outcome(rule, p, year) for p in drawn.values())] for name, rule in RULES.items()]
    return table(["rule", *drawn], [["best Static", *best], *rows])


def outcome(rule: Policy[Any], process: processes.Process, year: float) -> str:
    """Return the steps skipped in a year, and the share flushed."""
    late = simulate(rule, process)[SETTLED:]
    skipped = sum(step.skipped for step in late)
    lost = math.fsum(step.zeros or 0.0 for step in late) / max(len(late) - skipped, 1)
    return f"{skipped / len(late) * year:,.0f} / {percent(lost)}"


def measure(world: int) -> None:
    """Print how long an all-reduce of gloo takes on this machine."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (world, f"{folder}/meeting"), nprocs=world)


def work(rank: int, world: int, meeting: str) -> None:
    """In one of the processes, time the ways to agree. They take turns."""
    import torch
    import torch.distributed as dist
    from timing import Effort, interleaved, spread

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)

    def agree(tensors: list[torch.Tensor]) -> None:
        for tensor in tensors * CALLS:
            dist.all_reduce(tensor)

    sent = {name: [torch.zeros(size, dtype=torch.float64) for size in sizes] for name, sizes in WAYS.items()}
    works = {name: partial(agree, tensors) for name, tensors in sent.items()}
    alike = Effort(ROUNDS, seconds=math.inf)  # all ranks make as many rounds
    times = interleaved(works, alike, before=lambda _: dist.barrier())
    dist.destroy_process_group()
    if rank == 0:
        cells = [f"{name} {spread(taken).middle / CALLS * 1e6:.0f} µs" for name, taken in times.items()]
        print(f"{world} processes: " + ", ".join(cells), flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=RANKS[-1], help="GPUs that train one model")
    parser.add_argument("--steps-per-second", type=float, default=0.5)
    parser.add_argument("--hop", type=float, default=1e-5, help="seconds of one exchange between two ranks")
    parser.add_argument(
        "--gloo", action="store_true", help="measure all-reduces of 2 and 4 processes instead"
    )
    given = parser.parse_args()
    if given.gloo:
        for world in (2, 4):
            measure(world)
        return
    tables = {
        "Distance from overflow": distance_table(),
        "Skipped at one rank's scale": skip_table(),
        "Probing": probing_table(given.steps_per_second, given.ranks),
        "Agreement": agreement_table(given.hop, given.steps_per_second),
        f"{given.ranks:,} ranks, simulated": rule_table(given.ranks, given.steps_per_second),
    }
    for title, lines in tables.items():
        print(f"{title}\n\n" + "\n".join(lines) + "\n", flush=True)


if __name__ == "__main__":
    main()
