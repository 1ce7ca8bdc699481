"""Diagnose a recorded run: why it failed or lost steps, in plain sentences, and the line to write.

`evidence` counts what a trace shows, `history` finds where the run failed, and `first_nonfinite` finds the
first inf or NaN of a step in a lens's snapshot. From these `causes` follows the step in its own order: the
findings are worded in `batches`, `updates` (of weights), `forward` (with the loss) and `backward`.
`not_learning` covers runs that lose nothing and learn nothing; `skipped_steps` and `headroom` the loss scale;
`spikes` the steps that a guard skipped; `snapshots` what snapshots show by themselves. `advice` turns
settings into code, `frameworks` has the code that advice consists of in each framework, and `diagnosis`
combines the findings.
"""

from preamp.doctor.diagnosis import Diagnosis, diagnose
from preamp.doctor.finding import Finding, Severity
from preamp.doctor.snapshots import best_scale, lost_words

__all__ = ["Diagnosis", "Finding", "Severity", "best_scale", "diagnose", "lost_words"]
