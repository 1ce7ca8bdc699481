"""torch.compile without a measurement that nobody reads, a third of the time of its backend "eager"."""

from __future__ import annotations

import torch._dynamo.guards

torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # which flushes the processor's caches first
