"""A loss that rose far while steps were taken, and its signs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Final

from preamp.doctor.evidence import Record
from preamp.doctor.first_nonfinite import updates_grew
from preamp.doctor.history import LATEST, SHORT, TENFOLD, TWOFOLD, Rise
from preamp.doctor.signs import Sign
from preamp.doctor.snapshots import norm_of

SUDDEN: Final = 5.0  # times the highest loss of the steps before
WINDOW: Final = 10
AHEAD: Final = 2.5
NOT_BELOW: Final = 0.9
SUMMED: Final = 3.0


class Risen:
    """A loss that rose far while steps were taken.

    Attributes:
        record: the run.
        loss: from where to where it rose; None if it did not.
        place: where it was highest.
        recovers: whether it fell again.
        losses: all finite losses.
        first: the loss at the beginning.
    """

    def __init__(self, record: Record) -> None:
        self.record, self.loss, self.recovers, self.place = record, None, False, 0
        self.losses = losses = record.loss.finite()
        if len(losses) < SHORT:
            return
        levels = [median(losses[n : n + LATEST]) for n in range(0, len(losses) - LATEST + 1, LATEST)]
        quarter = max(20, len(losses) // 4)
        late, began, grew = median(losses[-quarter:]), losses[0], updates_grew(record)
        self.first = min(began, levels[0])
        top = max(range(len(levels)), key=levels.__getitem__)
        best = min(levels[: top + 1])
        stays = Rise(best, late).ratio >= TENFOLD and late >= 2 * began
        never_fell = began > 0.0 and levels[top] >= TENFOLD * began and late >= NOT_BELOW * began
        if best > 0.0 and stays and grew is not False:
            self.loss = Rise(best, late)
        elif never_fell and grew is not False:
            self.loss = Rise(began, levels[top])
        elif best > 0.0 and _forgot(levels, top, late) and grew is not False:
            self.loss = Rise(best, levels[top])
        elif spike := _spike(losses):
            self.loss, self.recovers = spike, True
        finite = [
            n for n in range(len(record)) if record.loss.known[n] and math.isfinite(record.loss.values[n])
        ]
        self.place = max(finite, key=record.loss.values.__getitem__)

    def __bool__(self) -> bool:
        return self.loss is not None


def _forgot(levels: Sequence[float], top: int, late: float) -> bool:
    """Return whether a loss fell, rose far above where it began, and then stayed about where it began."""
    first, best = levels[0], min(levels[: top + 1])
    rose = Rise(best, levels[top]).ratio >= TENFOLD and Rise(first, levels[top]).ratio >= TWOFOLD
    return rose and 2 * late >= first and Rise(best, late).ratio >= TWOFOLD


SPIKE, SPIKE_STEPS, SPIKE_WINDOW = 10.0, 4, 50
HARMLESS: Final = 0.2  # times the first losses: a spike below this does little harm


def _spike(losses: Sequence[float]) -> Rise | None:
    """Return a loss that rose far for some steps and recovered."""
    if min(losses) <= 0.0:
        return None
    place = max(range(SPIKE_WINDOW // 2, len(losses)), key=losses.__getitem__)
    base = median(losses[max(0, place - SPIKE_WINDOW) : max(1, place - SPIKE_STEPS)])
    if losses[place] < max(SPIKE * base, HARMLESS * median(losses[:SPIKE_STEPS])):
        return None
    bound = max(3 * base, math.sqrt(base * losses[place]))
    low, high = place, place
    while low > 0 and losses[low - 1] > bound:
        low -= 1
    while high + 1 < len(losses) and losses[high + 1] > bound:
        high += 1
    after = losses[high + 1 :]
    lasts = high - low + 1 >= SPIKE_STEPS
    return Rise(base, losses[place]) if lasts and after and median(after) <= bound else None


def _sums(risen: Risen) -> bool | None:
    """Whether the gradient norm of late steps is several times what snapshots show of their passes."""
    record, ratios = risen.record, []
    for snapshot in record.sound:
        own = norm_of(snapshot)
        place = record.place_of(snapshot)
        norm = None if place is None else record.grad_norm[place]
        if own and norm and math.isfinite(norm):
            ratios.append(norm / own)
    return median(ratios[-LATEST:]) > SUMMED if ratios else None


def _is_sudden(risen: Risen) -> bool:
    """Whether the loss was calm, and then several times as high from one step to the next."""
    losses = risen.losses
    return any(
        median(losses[n : n + LATEST]) > SUDDEN * max(losses[n - WINDOW : n]) > 0.0
        for n in range(WINDOW, len(losses) - LATEST)
    )


def _norm_ahead(risen: Risen) -> bool | None:
    """Whether the gradient norm grew while the loss did not, as sums of gradients do."""
    losses, norms = risen.losses, risen.record.grad_norm.finite()
    rises = next((n for n, loss in enumerate(losses) if loss > 2 * risen.first), len(losses))
    lowest = min(range(rises), key=losses.__getitem__, default=0)
    if lowest < 2 or len(norms) < len(losses):
        return None
    return median(norms[lowest - 1 : lowest + 2]) > AHEAD * norms[0]


SIGNS: Final = {
    "recovers": Sign(lambda risen: risen.recovers, "it recovered", "it did not recover", usual=0.3),
    "weights grew": Sign(
        lambda risen: updates_grew(risen.record),
        "updates made weights or outputs far larger",
        "no weight grew",
        "lens",
    ),
    "sums": Sign(
        _sums, "gradients are far larger than one pass makes them", "they are those of one pass", "lens", 0.1
    ),
    "sudden": Sign(_is_sudden, "it rose from one step to the next", "it rose gradually"),
    "norm ahead": Sign(
        _norm_ahead,
        "the gradient norm grew before the loss rose",
        "the gradient norm did not grow before the loss rose",
        "norms",
        0.3,
    ),
}
