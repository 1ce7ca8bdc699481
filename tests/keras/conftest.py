"""Which files concern the backend of this process, and two CPU devices for what is distributed."""

from __future__ import annotations

from pathlib import Path

import keras
import pytest

HERE = Path(__file__).parent
BACKEND = keras.backend.backend()
collect_ignore = [f"test_only_{name}.py" for name in ("jax", "tensorflow", "torch") if name != BACKEND]

# Before anything runs: devices cannot be divided later.
if BACKEND == "jax":
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_disable_most_optimizations", True)  # programs that run once are compiled faster
if BACKEND == "tensorflow":
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let Keras turn variables into arrays: NumPy 2 finds what they answer old-fashioned."""
    old = pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
    )
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(old)
