"""What overflow costs on many ranks, on paper: the numbers of docs/distributed.md. Asserts nothing.

Run: python benchmarks/at_scale.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist

from preamp import Dynamic, dialects, processes
from preamp.record.formatting import percent

A_YEAR = 365.25 * 24 * 3600 / 2  # steps, of two seconds
RATE = 1e-3
RANKS = (1, 8, 64, 512, 4096, 10_000)
JITTER, TAIL = 0.5, 1.5

RULES = {
    "Dynamic": Dynamic(),
    "dialects.TORCH": dialects.TORCH,
    "dialects.DEEPSPEED": dialects.DEEPSPEED,
    "dialects.MEGATRON": dialects.MEGATRON,
}


def distance_needed(tail: str, ranks: int) -> float:
    """Return how many powers of two below overflow the typical peak must stay to skip one step in 1000."""
    p = -math.expm1(math.log1p(-RATE) / ranks)
    return -JITTER * NormalDist().inv_cdf(p) if tail == "normal" else -math.log2(p) / TAIL


def distance_table() -> Iterator[str]:
    """Yield the distance from overflow at which one step in 1000 is skipped, and what is flushed there."""
    process = processes.Stationary()
    yield "| ranks | log-normal: distance | flushed | power law: distance | flushed |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for ranks in RANKS:
        distances = [distance_needed(tail, ranks) for tail in ("normal", "power law")]
        lost = [percent(process.flushed(process.top * 2.0**-distance)) for distance in distances]
        yield f"| {ranks:,} | {distances[0]:.1f} | {lost[0]} | {distances[1]:.1f} | {lost[1]} |"


def skipped_share(name: str) -> float:
    """Return the share of steps that a rule skips if every growth ends in an overflow and a backoff."""
    rule = RULES[name]
    rule = getattr(rule, "policy", rule)
    return rule.hysteresis / (rule.growth_interval + rule.compat.growth_delay + rule.hysteresis)


def main() -> None:
    """Print the numbers."""
    print("\n".join(distance_table()))
    for name in RULES:
        print(f"{name}: {A_YEAR * skipped_share(name):,.0f} steps skipped in a year")


if __name__ == "__main__":
    main()
