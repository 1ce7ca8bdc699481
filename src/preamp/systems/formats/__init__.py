"""The formats in which known systems save their loss scale: entries by name, to a state and back.

Files are read and written in `convert`; the systems' policies are in `dialects`.
"""

from preamp.systems.formats.base import Format, backoff_factor, compat_of, entries_of, hysteresis
from preamp.systems.formats.deepspeed import DeepSpeedStage0, DeepSpeedZero
from preamp.systems.formats.jax import Flax, Jmp
from preamp.systems.formats.keras import Keras, TfKeras
from preamp.systems.formats.pytorch import Apex, Fairseq, Megatron, Nemo, Torch

__all__ = [
    "APEX",
    "DEEPSPEED",
    "DEEPSPEED_FUSED",
    "FAIRSEQ",
    "FLAX",
    "JMP",
    "KERAS",
    "MEGATRON",
    "NEMO",
    "TF_KERAS",
    "TORCH",
    "Format",
    "backoff_factor",
    "compat_of",
    "entries_of",
    "hysteresis",
]

TORCH = Torch()
NEMO = Nemo()
MEGATRON = Megatron()
APEX = Apex()
KERAS = Keras()
TF_KERAS = TfKeras()
FLAX = Flax()
JMP = Jmp()
FAIRSEQ = Fairseq()
DEEPSPEED = DeepSpeedZero()
DEEPSPEED_FUSED = DeepSpeedStage0()
