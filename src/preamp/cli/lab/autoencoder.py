"""The default problem: a deep sigmoid autoencoder, which has to redraw each digit from 16 numbers.

Every sigmoid multiplies the gradient by at most 1/4, and there are eight: what reaches the first layers is
about 1e-8, below float16's smallest number. Without scaling they get exactly zero and stay as they were
drawn, and the network answers every digit with the same average blot.
"""

from __future__ import annotations

from preamp.cli.lab.data import Table
from preamp.cli.lab.problem import Problem

HIDDEN = (128, 64, 32, 16, 32, 64, 128)


def autoencoder(table: Table, epochs: int | None = None) -> Problem:
    """Return the problem of redrawing the rows of a table."""
    columns = table.train.shape[1]
    return Problem(
        task="autoencoder",
        table=table,
        sizes=(columns, *HIDDEN, columns),
        gain=1.0,
        loss="squared",
        learning_rate=3e-3,
        batch_size=128,
        epochs=250 if epochs is None else epochs,
    )
