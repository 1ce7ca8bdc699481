"""preamp for DeepSpeed users: DeepSpeed's loss scalers and engine under its names, on plain PyTorch.

DeepSpeed itself is not needed, except for `attach`.
"""

from preamp.errors import MissingExtra

try:
    import torch as _  # noqa: F401  # only to say what is missing
except ImportError as error:
    raise MissingExtra.of(error, "preamp[torch]") from error

from preamp.deepspeed.attaching.attached import Attached, attach
from preamp.deepspeed.engine.engine import Engine
from preamp.deepspeed.engine.initialize import initialize
from preamp.deepspeed.overflow_log import OverflowLog
from preamp.deepspeed.scalers import CreateLossScaler, DynamicLossScaler, LossScaler, LossScalerBase

__all__ = [
    "Attached",
    "CreateLossScaler",
    "DynamicLossScaler",
    "Engine",
    "LossScaler",
    "LossScalerBase",
    "OverflowLog",
    "attach",
    "initialize",
]
