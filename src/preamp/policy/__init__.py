"""The rules for the loss scale: what the next one is, given what was measured in the gradients of a step.

A policy is Python operators plus an injected ``where(condition, a, b)``, so the same few lines run on Python
floats, NumPy, torch, JAX (under `jit` and `scan`), TensorFlow (inside `tf.function`) and `keras.ops`.

`Dynamic` is the rule of Micikevicius et al. 2018 (arXiv 1710.03740) with the refinements that systems have
added since:

```
on an overflow:   good = 0, bad += 1
                  if bad >= hysteresis:       scale = max(scale * backoff_factor, min_scale)
on a clean step:  good += 1, bad = 0
                  if good >= growth_interval: scale = min(scale * growth_factor, max_scale), good = 0
```

What other systems do differently is in `Compat`; their rules are in `preamp.dialects`.
"""

from preamp.policy.base import Policy, Reading, State, Where, choose, setting
from preamp.policy.dynamic import Dynamic
from preamp.policy.headroom import Headroom, HeadroomState
from preamp.policy.moving import Compat, Moving
from preamp.policy.static import Static
from preamp.policy.tolerant import Tolerant, TolerantState

__all__ = [
    "Compat",
    "Dynamic",
    "Headroom",
    "HeadroomState",
    "Moving",
    "Policy",
    "Reading",
    "State",
    "Static",
    "Tolerant",
    "TolerantState",
    "Where",
    "choose",
    "setting",
]
