"""The finding about steps that a guard skipped."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Final

from preamp.doctor.evidence import Record
from preamp.doctor.finding import FEWEST, OFTEN, Finding
from preamp.doctor.history import first_of, number
from preamp.record.formatting import of_steps

LONG_RUN: Final = 10
"""So many spikes in a row are a new level of the loss rather than bad batches."""
NEARLY_ALL: Final = 0.8
"""The share of skipped steps from which on a run makes no progress."""
CAUSES: Final = {"loss": "loss", "grad_norm": "gradient norm"}


def spikes(record: Record) -> Finding | None:
    """Find steps that a guard skipped: many of them, many in a row, or only some."""
    places = sorted(record.spikes)
    if not places:
        return None
    count, share, run = len(places), len(places) / len(record), _longest_run(places)
    of = Counter[str](spike.of for spike in record.spikes.values())
    causes = " and the ".join(f"{word} ({of[name]:,})" for name, word in CAUSES.items() if of[name])
    sentence = (
        f"The guard skipped {of_steps(count, len(record))} because of the {causes}; "
        f"longest run: {len(run):,}; steps {first_of(record, places)}."
    )
    is_often, is_run = share >= OFTEN and count >= FEWEST, len(run) >= LONG_RUN
    is_last = is_run and run[-1] == len(record) - 1
    if is_run:
        sentence = f"{sentence} That run began at step {record.index[run[0]]:,}."
    is_problem = is_last or (share >= NEARLY_ALL and count >= LONG_RUN)
    return Finding(
        kind="a long run of spikes" if is_run else "many spikes" if is_often else "spikes",
        severity="problem" if is_problem else "warning" if is_run or is_often else "note",
        sentence=sentence,
        advice=_advice(record, run if is_run else places, is_run=is_run) if is_run or is_often else "",
        numbers={"spikes": count, "share": share, "longest_run": len(run)},
        steps=record.numbers_of(places),
    )


def _longest_run(places: Sequence[int]) -> list[int]:
    """Return the longest run of successive places."""
    runs = groupby(enumerate(places), key=lambda pair: pair[1] - pair[0])
    return max(([place for _, place in run] for _, run in runs), key=len)


def _advice(record: Record, places: Sequence[int], *, is_run: bool) -> str:
    found = [record.spikes[place] for place in places]
    if sum(math.isnan(spike.limit) for spike in found) > len(found) / 2:
        return (
            "A NaN entered the statistics of the guard, which skips every step until the NaN has left them. "
            "SpikeGuard keeps NaN out of its statistics."
        )
    finite = [spike for spike in found if math.isfinite(spike.value)]
    if len(finite) < len(found) / 2:
        return "Most of these values are inf or NaN: look at the data and the forward pass."
    guard = str(record.guard or "the guard")
    sooner = ", or lower `patience`" if is_run and "SpikeGuard" in guard else ""
    largest = " and ".join(
        f"the largest {word} is {number(max(values))}"
        for name, word in CAUSES.items()
        if (values := [spike.value for spike in finite if spike.of == name])
    )
    back = " If not, return to an earlier checkpoint." if is_run and places[0] > 0 else ""
    return (
        "Look at the data of these steps and at the learning rate. If they are ordinary, raise the limit of "
        f"{guard}{sooner}: {largest}.{back}"
    )
