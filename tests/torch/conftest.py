"""torch.compile without a measurement that nobody reads, a third of the time of its backend "eager"."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch._dynamo.guards

from . import switches

torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # which flushes the processor's caches first


@pytest.fixture
def reads_cost() -> Iterator[None]:
    """Take the path of accelerators, where fused optimizers decide and nothing is read."""
    with switches.reads_are_free(False):
        yield
