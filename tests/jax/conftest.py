"""Eight devices for all tests, and a quick compiler for those that ask for it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress

import jax
import pytest

with suppress(ImportError), warnings.catch_warnings(action="ignore", category=DeprecationWarning):
    import equinox as _  # noqa: F401  # it imports what JAX 0.8 has deprecated

# Before anything runs: devices cannot be divided later.
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="module")
def quick_compiler() -> Iterator[None]:
    """What runs once is compiled faster."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module", autouse=True)
def caches_are_cleared() -> Iterator[None]:
    """A worker that keeps what it compiled for every file takes 5 GB in the end."""
    yield
    jax.clear_caches()
