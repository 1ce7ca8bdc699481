"""What the tests of the command line use of its inside."""

from preamp.cli import terminal
from preamp.cli.casting_file import read_casting
from preamp.cli.comparison import LOSSES, PROCESSES
from preamp.cli.flags import GUARDS, find_dialect, find_policy, guards_of
from preamp.cli.lab import compared, rehearsed, runs, tuned
from preamp.cli.lab.compared import PrecisionRun, run_in_process, sentences, table
from preamp.cli.lab.data import digits, read_csv
from preamp.cli.lab.jax_loop import JaxLoop
from preamp.cli.lab.problem import autoencoder, classify
from preamp.cli.lab.runs import Plan, choose_framework, find_loop, plans, train
from preamp.cli.lab.torch_loop import TorchLoop
from preamp.jax.machine import CODE, _kinds, _note
from preamp.policy.registry import RULES
from preamp.record.formatting import kebab, power
from preamp.systems.dialects import ALL

__all__ = [
    "ALL",
    "CODE",
    "GUARDS",
    "LOSSES",
    "PROCESSES",
    "RULES",
    "JaxLoop",
    "Plan",
    "PrecisionRun",
    "TorchLoop",
    "_kinds",
    "_note",
    "autoencoder",
    "choose_framework",
    "classify",
    "compared",
    "digits",
    "find_dialect",
    "find_loop",
    "find_policy",
    "guards_of",
    "kebab",
    "plans",
    "power",
    "read_casting",
    "read_csv",
    "rehearsed",
    "run_in_process",
    "runs",
    "sentences",
    "table",
    "terminal",
    "train",
    "tuned",
]
