"""preamp for PyTorch: `from preamp.torch import GradScaler, autocast` is the only line to change."""

from preamp.errors import MissingExtra
from preamp.load_order import before_torch as _before_torch

try:
    import torch as _torch
except ImportError as error:
    raise MissingExtra.of(error, "preamp[torch]") from error
else:
    MissingExtra.refuse_older("torch", _torch.__version__, "2.6")
    _before_torch()

from preamp.torch import amp, cpu, cuda
from preamp.torch.autocasting.custom import custom_bwd, custom_fwd
from preamp.torch.autocasting.delayed import load_recipe_state, recipe_state
from preamp.torch.autocasting.region import autocast
from preamp.torch.blaming.blame import blame
from preamp.torch.blaming.tune import tune
from preamp.torch.lens.lens import Lens
from preamp.torch.machine import check
from preamp.torch.quantizing import quantize
from preamp.torch.sampler_mismatch import mismatch
from preamp.torch.scaling.grad_scaler import GradScaler
from preamp.torch.scaling.master_weights import MasterWeights
from preamp.torch.scaling.sharded_grad_scaler import ShardedGradScaler

__all__ = [
    "GradScaler",
    "Lens",
    "MasterWeights",
    "ShardedGradScaler",
    "amp",
    "autocast",
    "blame",
    "check",
    "cpu",
    "cuda",
    "custom_bwd",
    "custom_fwd",
    "load_recipe_state",
    "mismatch",
    "quantize",
    "recipe_state",
    "tune",
]
