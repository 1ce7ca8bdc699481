"""The names of `torch.amp`: `from preamp.torch import amp` in place of `from torch import amp`."""

from torch.amp import is_autocast_available

from preamp.torch.autocasting.custom import custom_bwd, custom_fwd
from preamp.torch.autocasting.region import autocast
from preamp.torch.scaling.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd", "is_autocast_available"]
