"""The place of `torch.cpu.amp`."""

from preamp.torch.cpu import amp

__all__ = ["amp"]
