"""Two CPU devices, for `tf.distribute`; and what older releases of tf_keras warn of."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import tensorflow as tf

HERE = Path(__file__).parent

# Before anything runs: devices cannot be divided later. The tests of Keras divide them alike.
with suppress(RuntimeError):
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tf_keras 2.18 draw its seeds: the numbers that it gives to `random.randint` are floats."""
    seeds = pytest.mark.filterwarnings("ignore:non-integer arguments to randrange:DeprecationWarning")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(seeds)
