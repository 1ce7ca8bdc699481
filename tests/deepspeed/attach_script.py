"""What the ranks of `attach_worker.py` play, and what `test_attach.py` knows of it.

In a script "1" is a step whose gradients overflow.
"""

from __future__ import annotations

from typing import Any

from preamp import Dynamic, Policy, Static, Tolerant, dialects

STAGE_0 = ("0", "0 fused")
ZERO = ("1", "2", "3", "1 offloaded", "2 in float32", "3 offloaded")
KINDS = (*STAGE_0, *ZERO)
ESSENTIAL = ("0", "0 fused", "1", "2", "3")
ON_TWO_RANKS = ("0", "1", "3")

SCRIPT = "0010110001000"
FP16: dict[str, Any] = {
    "enabled": True,
    "initial_scale_power": 4,
    "loss_scale_window": 2,
    "hysteresis": 3,
}
CONFIGURED = dialects.DEEPSPEED(init_scale=2.0**4, scale_window=2, hysteresis=3)
FOREIGN: dict[str, Policy[Any]] = {
    "backoff": Dynamic(
        init_scale=2.0**9, growth_interval=3, hysteresis=2, hysteresis_reset="growth", backoff_factor=0.25
    ),
    "tolerant": Tolerant(init_scale=2.0**9, growth_interval=3, tolerance=0.4),
    "static": Static(2.0**7),
}
