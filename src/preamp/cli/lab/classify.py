"""A deep sigmoid classifier: eight layers, as many as it takes for float16 to fail without scaling."""

from __future__ import annotations

from preamp.cli.lab.data import Table
from preamp.cli.lab.problem import Problem

HIDDEN = (64,) * 7


def classify(table: Table, epochs: int | None = None) -> Problem:
    """Return the problem of naming the label of each row of a table."""
    return Problem(
        task="classify",
        table=table,
        sizes=(table.train.shape[1], *HIDDEN, table.classes),
        gain=3**-0.5,  # the variance of PyTorch's own first weights
        loss="cross_entropy",
        learning_rate=3e-3,
        batch_size=100,
        epochs=120 if epochs is None else epochs,
    )
