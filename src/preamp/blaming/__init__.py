"""What the blames and tunes of PyTorch and JAX share."""
