"""Which tests concern the backend of this process, and two CPU devices for what is distributed.

All run with PyTorch, where nothing waits for a compiler. The other backends run what is theirs alone and
what is marked `also_on` them, because it is compiled or computed by other code; `make test-slow` runs the
rest there, too, and `make matrix`, which has one backend in an environment, sets KERAS_IN_FULL.
"""

from __future__ import annotations

import os
from pathlib import Path

import keras
import pytest

HERE = Path(__file__).parent
BACKEND = keras.backend.backend()
IN_FULL = os.environ.get("KERAS_IN_FULL", "torch")
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
    """Leave what the other backends repeat to the slow tests; and let Keras turn variables into arrays.

    NumPy 2 finds what these answer old-fashioned.
    """
    old = pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
    )
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(old)
            marked = item.get_closest_marker("also_on")
            is_own = item.path.name == f"test_only_{BACKEND}.py"
            if not (is_own or BACKEND == IN_FULL or (marked and BACKEND in marked.args)):
                item.add_marker(pytest.mark.slow)
