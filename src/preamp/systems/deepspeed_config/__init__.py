"""Read precision, loss scale and clipping from a DeepSpeed configuration, and write them to one.

Keys and defaults are those of DeepSpeed 0.19.8. The names of its loss scaler's arguments are accepted too.

>>> settings = load({"fp16": {"enabled": True, "scale_window": 500, "min_scale": 1e-4}})
>>> settings.policy.growth_interval, settings.policy.min_scale, settings.max_norm
(500, 0.0001, 1.0)
"""

from preamp.systems.deepspeed_config.loading import load
from preamp.systems.deepspeed_config.settings import Precision, Settings

__all__ = ["Precision", "Settings", "load"]
