"""Small real trainings: what the command line runs and the documentation shows.

`problem` has the problems, `NAME_loop` the loop of a framework; `runs` runs the loops, and `results` reports
them in rows and sentences.

Low precision means what a tensor core does: operands, results and their gradients are stored in float16 or
bfloat16, products are summed in float32. Every loop can rehearse it, or compute in it natively.
"""

from typing import Final, Literal, TypeAlias

Framework: TypeAlias = Literal["torch", "jax"]
Precision: TypeAlias = Literal["float32", "float16", "bfloat16"]
Task: TypeAlias = Literal["autoencoder", "classify"]

SNAPSHOT_EVERY: Final = 200
"""Steps from one snapshot to the next."""
