"""What is wrong with the scale of a recorded run, in plain sentences with numbers, and what to write instead.

`record` counts what a trace shows, `skipping` and `room` say what that means for the scale, `values` what
a lens saw, `advice` how a rule is written, `diagnosis` puts them together. This room reads traces. It refuses
to know who trained what, and prints nothing.
"""

from preamp.doctor.diagnosis import Diagnosis, diagnose
from preamp.doctor.finding import Finding, Severity
from preamp.doctor.values import best_scale, lost_words

__all__ = ["Diagnosis", "Finding", "Severity", "best_scale", "diagnose", "lost_words"]
