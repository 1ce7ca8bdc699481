"""The same training in Keras on each backend and in TensorFlow: what PyTorch's loop does, they do.

Each peer has a process of its own, which runs the command line and then looks into its loop.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from preamp import Dynamic, Trace
from preamp.lab.autoencoder import autoencoder
from preamp.lab.data import digits
from preamp.lab.runs import FRAMEWORKS, Plan, find_loop, train
from preamp.lab.torch_loop import TorchLoop

PEERS = {
    "keras-jax": ("keras", "jax"),
    "keras-torch": ("keras", "torch"),
    "keras-tensorflow": ("keras", "tensorflow"),
    "tensorflow": ("tensorflow", "tensorflow"),
}
POLICY = Dynamic(init_scale=2.0**12, growth_interval=5)
FLAGS = ["--policy.init-scale", "4096", "--policy.growth-interval", "5", "--epochs", "2"]

# Beside halves of what float16 and bfloat16 can tell apart: least numbers, largest numbers.
HARD = [0.0, 1e-9, 2.9e-8, 3e-8, 1e-7, 6.1e-5, 1.0004, 1.0005, 1.003, 1.004, 65519.0, 65521.0, 1e-38, 3e38]


def look(framework: str, path: Path) -> None:
    """Write what the loop of a framework does to numbers, gradients and policies. Runs in the peer's process."""
    problem = autoencoder(digits(), epochs=1)
    gradients = {}
    for precision in ("float32", "float16", "bfloat16"):
        for scaled in (False, True):
            loop = find_loop(framework)(problem, precision, Dynamic() if scaled else None, 0)
            gradients[f"{precision} {scaled}"] = [g.tolist() for g in first_gradients(loop)]
    path.write_text(json.dumps({"gradients": gradients, "rounded": rounded(framework)}))


def first_gradients(loop):
    """Return the gradients of the weights at the first step."""
    inputs, rows = loop.problem.table.train, next(loop.problem.batches(0))
    if isinstance(loop, TorchLoop):
        next(loop.steps())
        return [weight.grad.numpy().T for weight in loop.weights]
    _, gradients = loop.train_step(inputs[rows], loop.problem.table.train_labels[rows])
    return gradients
