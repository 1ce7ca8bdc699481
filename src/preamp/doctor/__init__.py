"""Why a recorded run failed or lost steps, in plain sentences with numbers, and what to write instead.

`record` counts what a trace shows, `history` finds where a run failed and what came before, and `chain` where
in the step the first inf or NaN was, by what a lens saw. `causes` follows the step with them; `data`,
`updates` (weights), `forward`, `losses` and `backward` hold what is said of each. `idle` finds runs in which
nothing is lost and nothing is learned. `skipping` and `room` say what the trace means for the scale, `values`
what a lens saw, `advice` how a rule is written, `diagnosis` puts them together. Nothing is printed here.
"""

from preamp.doctor.diagnosis import Diagnosis, diagnose
from preamp.doctor.finding import Finding, Severity
from preamp.doctor.snapshots import best_scale, lost_words

__all__ = ["Diagnosis", "Finding", "Severity", "best_scale", "diagnose", "lost_words"]
