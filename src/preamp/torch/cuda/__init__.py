"""The place of `torch.cuda.amp`."""

from preamp.torch.cuda import amp

__all__ = ["amp"]
