"""A loss that is inf or NaN though all outputs are finite."""

from __future__ import annotations

from typing import Final

from preamp.doctor.finding import Finding
from preamp.doctor.history import Extent

FLOAT32: Final = "Compute the loss in float32: loss_fn(output.float(), target)."


def in_loss(extent: Extent, *, is_inf: bool) -> Finding:
    """Return the finding that the loss function makes inf or NaN of finite outputs.

    Args:
        extent: which steps.
        is_inf: whether the loss was ever inf, and not NaN alone.
    """
    cause = (
        "a sum or a power that leaves float16, the logarithm of 0, or targets that are inf or extreme"
        if is_inf
        else "a logarithm of 0 times 0, a division by zero, or targets that hold NaN"
    )
    return Finding(
        kind="loss function",
        severity=extent.severity,
        sentence=f"The loss is {'inf or NaN' if is_inf else 'NaN'} {extent.said}, but all outputs of modules "
        "are finite: it becomes so in the loss function. No loss scale helps.",
        advice=f"Look there for {cause}. {FLOAT32}",
        numbers=extent.numbers,
    )


def in_a_term(extent: Extent) -> Finding:
    """Return the finding that a loss that was negative is inf, and never NaN, where no look shows why."""
    return Finding(
        kind="loss function",
        severity=extent.severity,
        sentence=f"The loss is inf {extent.said}, never NaN, and it was negative before: so it is a "
        "difference of terms, of which one is inf. An inf in the outputs would most likely be in both, "
        "and give NaN. So a term of the loss function overflows, or an output in forward. No loss scale "
        "helps.",
        advice=f"Look there for an exponential, a power or a sum that leaves float16. {FLOAT32} If it stays, "
        "find the first layer whose output is inf and run that in float32.",
        numbers=extent.numbers,
    )


def seems_in_loss(extent: Extent, *, is_inf: bool) -> Finding:
    """Return the finding that a loss is lost more and more often, where no look shows what makes it so.

    Args:
        extent: which steps.
        is_inf: whether the loss was ever inf, and not NaN alone.
    """
    return Finding(
        kind="loss function",
        severity=extent.severity,
        sentence=f"The loss is {'inf' if is_inf else 'NaN'} {extent.said}, more and more often, and it fell "
        "before: as answers become certain, the loss function takes the logarithm of 0. Or an "
        "output overflows in forward. "
        "No loss scale helps.",
        advice=f"{FLOAT32} Keep what it takes the logarithm of away from 0: use log_softmax, "
        "cross_entropy or binary_cross_entropy_with_logits on the outputs themselves. If it stays, find the "
        "first layer whose output is inf (a preamp.torch.Lens names it) and run that in float32.",
        numbers=extent.numbers,
    )
