"""Eight devices for all tests, and a quick compiler for those that ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

# Before anything runs: devices cannot be divided later.
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="module")
def quick_compiler() -> Iterator[None]:
    """What runs once is compiled faster."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
