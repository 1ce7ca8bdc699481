"""Why a recorded run failed or lost steps, in plain sentences with numbers, and what to write instead.

`record` counts what a trace shows, `history` finds where a run failed and what came before, `causes` names
what no loss scale mends. `skipping` and `room` say what the trace means for the scale, `values` what a lens
saw, `advice` how a rule is written, `diagnosis` puts them together. Nothing is printed here.
"""

from preamp.doctor.diagnosis import Diagnosis, diagnose
from preamp.doctor.finding import Finding, Severity
from preamp.doctor.values import best_scale, lost_words

__all__ = ["Diagnosis", "Finding", "Severity", "best_scale", "diagnose", "lost_words"]
