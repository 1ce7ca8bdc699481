"""What tests of the doctor take from inside of it: how rules and findings are written and read."""

from __future__ import annotations

from preamp.cli.flags import rules
from preamp.doctor import causes, lost, risen, stuck
from preamp.doctor.advice import as_code, as_flags, recorded_policy
from preamp.doctor.causes import Cause, rates
from preamp.doctor.diagnosis import _consistent as consistent
from preamp.doctor.frameworks import CODE, Code, framework_of
from preamp.doctor.signs import Sign
from preamp.doctor.snapshots import lost as lost_at
from preamp.doctor.verdict import weigh
from preamp.record.formatting import power

of_trouble = (
    (causes.OF_LOST_STEPS, lost.SIGNS),
    (causes.OF_RISEN_LOSS, risen.SIGNS),
    (causes.OF_NO_PROGRESS, stuck.SIGNS),
)


def signs(**found: bool | None) -> dict[str, Sign]:
    """Return signs that are present, absent or unknown."""
    return {
        name: Sign(lambda _, present=present: present, f"there is {name}", f"there is no {name}", "lens")
        for name, present in found.items()
    }


__all__ = [
    "CODE",
    "Cause",
    "Code",
    "as_code",
    "as_flags",
    "consistent",
    "framework_of",
    "lost_at",
    "of_trouble",
    "power",
    "rates",
    "recorded_policy",
    "rules",
    "signs",
    "weigh",
]
