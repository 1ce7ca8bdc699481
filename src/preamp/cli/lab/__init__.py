"""Small real trainings: what the command line runs and the documentation shows.

`problem` has the problems, `NAME_loop` the loop of a framework; `runs` runs the loops, and `results` reports
them in rows and sentences.

Low precision means what a tensor core does: operands, results and their gradients are stored in float16 or
bfloat16, products are summed in float32. Every loop can emulate it in float32, or compute in it natively.
"""

from typing import Final, Literal, TypeAlias

Framework: TypeAlias = Literal["torch", "jax", "keras", "tensorflow"]
Precision: TypeAlias = Literal["float32", "float16", "bfloat16"]
Task: TypeAlias = Literal["autoencoder", "classify"]

ADAM_EPSILON: Final = 1e-8
"""PyTorch's default for Adam. Keras's is 1e-7, ten times the gradients that reach the first layers."""

KERAS_BACKENDS: Final = ("jax", "torch", "tensorflow")
"""The backends on which Keras can train; the environment variable `KERAS_BACKEND` chooses one."""

SNAPSHOT_EVERY: Final = 200
"""Steps from one snapshot to the next."""
