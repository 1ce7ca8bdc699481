"""Diagnose a recorded run: why it failed or lost steps, in plain sentences, and the line to write.

`evidence` counts what a trace shows, `history` finds where the run failed, and `first_nonfinite` finds the
first inf or NaN of a step in a lens's snapshot. `lost`, `risen` and `stuck` detect the three troubles of a
run (steps that no scale saves, a loss that rose, weights that do not move), and test their signs. `causes` is
the table of what can be wrong, `verdict` compares it with the signs, and `answers` words the result. `scale`
and `spikes` are about the loss scale and guards, `snapshots` about what snapshots show alone. `advice`
turns settings into code, `frameworks` has the code of each framework, and `diagnosis` combines the findings.
"""

from preamp.doctor.diagnosis import Diagnosis, diagnose
from preamp.doctor.finding import Finding, Severity, Verdict, Weighed
from preamp.doctor.snapshots import best_scale, lost_words

__all__ = [
    "Diagnosis",
    "Finding",
    "Severity",
    "Verdict",
    "Weighed",
    "best_scale",
    "diagnose",
    "lost_words",
]
