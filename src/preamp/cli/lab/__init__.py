"""Small real trainings: what the command line runs and the documentation shows.

One problem per file (`autoencoder`, `classify`), one loop per framework (`torch_loop`, `jax_loop`,
`keras_loop`, `tensorflow_loop`); `lens` says which steps to inspect, `runs` runs the loops, `results`
turns what they did into rows and sentences.

Low precision is what a tensor core does: operands, results and their gradients are stored in float16 or
bfloat16, products are summed in float32. Every loop can rehearse it, and can compute in it natively.
"""

from typing import Final, Literal, TypeAlias

Framework: TypeAlias = Literal["torch", "jax", "keras", "tensorflow"]
Precision: TypeAlias = Literal["float32", "float16", "bfloat16"]
Task: TypeAlias = Literal["autoencoder", "classify"]

ADAM_EPSILON: Final = 1e-8
"""PyTorch's. Keras's own is 1e-7, ten times what reaches the first layers."""

KERAS_BACKENDS: Final = ("jax", "torch", "tensorflow")
"""What Keras can train on. `KERAS_BACKEND` says which one it is, once in a process."""

ZEROS_EVERY: Final = 10
"""Steps from one count of the gradient entries that are zero to the next."""

LOOK_EVERY: Final = 200
"""Steps from one snapshot through the lens to the next."""
