"""What tests of the doctor take from inside of it: how rules and findings are written and read."""

from __future__ import annotations

from preamp.cli.flags import rules
from preamp.doctor.advice import as_code, as_flags, recorded_policy
from preamp.doctor.diagnosis import _consistent as consistent
from preamp.doctor.frameworks import CODE, Code, framework_of
from preamp.doctor.snapshots import lost
from preamp.record.formatting import power

__all__ = [
    "CODE",
    "Code",
    "as_code",
    "as_flags",
    "consistent",
    "framework_of",
    "lost",
    "power",
    "recorded_policy",
    "rules",
]
