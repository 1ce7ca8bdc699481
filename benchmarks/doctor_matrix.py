"""How often the doctor is right, unsure or wrong about runs that it was not written for.

Run: python benchmarks/doctor_matrix.py [--seeds 0 1] [--only torch] [--all]

The runs of doctor_runs were written by people who had not seen the doctor. Each is broken in one way, or
healthy, and is recorded in all ways of its framework. The first finding of a broken run is "right" if it
names the cause that was built in, "among three" if it names it among two or three, "unsure" if it says that
the record cannot tell, "not seen" if it only says that the scale is fine, and else "wrong". A healthy run is
right if it has no problem and no warning. With `--all` every answer but a right one is listed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections import Counter
from collections.abc import Iterator

from preamp import Trace
from preamp.doctor import Diagnosis, diagnose

WAYS = {
    "torch": ("plain", "norms", "lens", "both"),
    "jax": ("plain", "snapshots"),
    "keras": ("plain", "snapshots"),
}
OUTCOMES = ("right", "among three", "unsure", "not seen", "wrong")
CAUSES = {
    "learning_rate": "learning rate",
    "optimizer_settings": "optimizer",
    "zero_grad_missing": "gradients not cleared",
    "bad_batch": "bad inputs",
    "bad_targets": "bad targets",
    "leftovers": "poisoned buffers, poisoned average, gradients not cleared",
    "forward_overflow": "forward overflow",
    "forward_nan": "forward NaN",
    "loss_function": "loss function",
    "backward_nan": "NaN in backward",
    "gradients_too_large": "gradient overflow, data changed",
    "another_rank": "another rank",
    "clipped_while_scaled": "clipped while scaled",
    "too_small_rate": "learning rate zero, stopped learning",
    "other_parameters": "other parameters",
    "dead_units": "dead units",
    "detached_or_constant": "cut off",
    "scale_too_high": "scale too high, too high",
    "wrong_start": "wrong start",
    "grows_too_often": "oscillating",
    "backs_off_wrong": "backs off too far, slow to back off",
    "lost_scale": "lost scale",
    "not_scaled": "not scaled",
    "scale_too_low": "too low, vanished",
    "poisoned_ema": "poisoned average",
    "loss_spike": "loss spike",
}
"""The findings that name a cause, by the cause's name in doctor_runs."""


def outcome(cause: str, found: Diagnosis) -> str:
    """Return how good the first finding is."""
    if cause == "healthy":
        return "right" if found.healthy else "wrong"
    first, named = found.findings[0], set(CAUSES[cause].split(", "))
    if named & {*first.kinds}:
        return "right" if first.verdict == "cause" else "among three"
    if first.is_bad:
        return "unsure" if first.verdict == "unknown" else "wrong"
    is_unsure = first.kind in ("not measured", "too few") or any(
        one.kind == "no progress" for one in found.findings
    )
    return "unsure" if is_unsure else "not seen"


def recorded(framework: str, seeds: list[int]) -> Iterator[tuple[str, str, str, Trace]]:
    """Yield the name, the cause, the way of recording and the trace of every run."""
    for name, (cause, make) in importlib.import_module(f"doctor_runs.{framework}_runs").RUNS.items():
        for way in WAYS[framework]:
            for seed in seeds:
                yield name, cause, way, make(seed, way)


def main() -> None:
    """Print the matrix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", choices=WAYS)
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    counts: dict[tuple[str, str], Counter[str]] = {}
    healthy: Counter[str] = Counter()
    for framework in [given.only] if given.only else WAYS:
        for name, cause, way, trace in recorded(framework, given.seeds):
            found = diagnose(trace)
            is_right = outcome(cause, found)
            if cause == "healthy":
                healthy[is_right] += 1
            else:
                counts.setdefault((framework, way), Counter())[is_right] += 1
            if is_right == "wrong" or (given.all and is_right != "right"):
                kinds = " or ".join(found.findings[0].kinds) or found.findings[0].kind
                print(f"{is_right}: {name} ({framework}, {way}): {cause}; {kinds}", file=sys.stderr)
    print(f"| recorded | {' | '.join(OUTCOMES)} |\n| --- |{' ---: |' * len(OUTCOMES)}")
    for (framework, way), row in counts.items():
        print(f"| {framework}, {way} | {' | '.join(str(row[one]) for one in OUTCOMES)} |")
    print(f"\nHealthy runs: {healthy['right']} of {healthy.total()} have no problem and no warning.")


if __name__ == "__main__":
    main()
