"""Loss scaling for PyTorch."""
