"""Eight devices, before anything runs: they cannot be divided later."""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 8)
