"""Two CPU devices, for `tf.distribute`."""

from __future__ import annotations

from contextlib import suppress

import tensorflow as tf

# Before anything runs: devices cannot be divided later. The tests of Keras divide them alike.
with suppress(RuntimeError):
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
