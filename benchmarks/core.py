"""What the state machine costs on the host. Reports; asserts nothing. Run: python benchmarks/core.py."""

from __future__ import annotations

import platform
import random
import statistics
import time
from collections.abc import Callable

from preamp import Dynamic, Policy, Reading, Tolerant, dialects, simulate

ROUNDS = 5
STEPS = 1_000_000

POLICIES: dict[str, Policy] = {
    "Dynamic": Dynamic(),
    "Tolerant": Tolerant(),
    "dialects.TORCH": dialects.TORCH,
    "dialects.MEGATRON": dialects.MEGATRON,
}


def seconds(work: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def steps(policy: Policy, count: int) -> None:
    """Advance a policy on clean steps."""
    state, clean = policy.start(), Reading(finite=True)
    for _ in range(count):
        state = policy.step(state, clean)


def main() -> None:
    """Print one line per policy, rounds interleaved."""
    rng = random.Random(0)
    overflows = [rng.random() < 0.001 for _ in range(STEPS)]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in POLICIES}
    for _ in range(ROUNDS):
        for name, policy in POLICIES.items():
            one = seconds(lambda policy=policy: steps(policy, 100_000)) / 100_000
            times[name].append((one, seconds(lambda policy=policy: simulate(policy, overflows))))
    print(f"Python {platform.python_version()}, {platform.machine()}; medians of {ROUNDS} rounds")
    for name, rounds in times.items():
        step, whole = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{name:18}  step {step * 1e6:5.2f} us   simulate 1,000,000 steps {whole:5.2f} s")


if __name__ == "__main__":
    main()
