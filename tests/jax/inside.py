"""What tests of this folder take from inside of preamp: no page of docs/api shows it."""

from __future__ import annotations

from preamp.arrays import jax as arrays
from preamp.jax.autocasting.transform import region
from preamp.jax.blaming import step as steps
from preamp.jax.blaming.operations import Operation
from preamp.jax.blaming.rows import key_of, owners_of
from preamp.jax.blaming.tape import Tape, Variable

__all__ = [
    "Operation",
    "Tape",
    "Variable",
    "arrays",
    "key_of",
    "owners_of",
    "region",
    "steps",
]
