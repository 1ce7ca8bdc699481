"""Results of runs as rows of a table and as sentences. Runs of one name and different seeds are one row."""

from __future__ import annotations

from statistics import median

from preamp.cli.lab.runs import Run
from preamp.record.formatting import power, spread


def sentence(runs: list[Run]) -> str:
    """Return a sentence on the runs of one name."""
    steps = [step for run in runs for step in run.trace]
    zeros = [step.zeros for step in steps if step.zeros is not None]
    parts = [f"{name} {value}" for name, value in quality(runs).items()]
    if zeros:
        parts.append(f"{100 * median(zeros):.0f} % of the gradient entries of its weights are exactly zero")
    if runs[0].plan.policy and steps:
        low, high = (power(pick(step.scale for step in steps)) for pick in (min, max))
        moved = f"stayed at {low}" if low == high else f"moved between {low} and {high}"
        skipped = sum(step.skipped for step in steps)
        parts.append(f"{skipped:,} of {len(steps):,} steps skipped while the scale {moved}")
    if any(run.trace.stopped for run in runs):
        parts.append("stopped early")
    return f"{runs[0].plan.name}: {', '.join(parts)}."


def quality(runs: list[Run]) -> dict[str, str]:
    """Return the test accuracy of runs of one name, or their test error, by its name."""
    accuracies = [run.test_accuracy for run in runs if run.test_accuracy is not None]
    if accuracies:
        return {"test accuracy": spread(accuracies)}
    return {"test error": spread([run.test_error for run in runs])}


def row(runs: list[Run]) -> dict[str, str]:
    """Return the runs of one name as a row of a table."""
    summaries = [run.trace.summary() for run in runs]
    scales = ", ".join(dict.fromkeys(power(summary.final_scale) for summary in summaries))
    return {
        "run": runs[0].plan.name,
        **quality(runs),
        "steps": f"{sum(summary.steps for summary in summaries):,}",
        "skipped": f"{sum(summary.skipped for summary in summaries):,}",
        "scale": scales if runs[0].plan.policy else "-",
        "seconds": f"{sum(run.seconds for run in runs):.1f}",
    }


def grouped(runs: list[Run]) -> list[list[Run]]:
    """Return the runs of each name."""
    names = dict.fromkeys(run.plan.name for run in runs)
    return [[run for run in runs if run.plan.name == name] for name in names]
