"""What the autocasts of PyTorch and JAX share: operator tables, and reports of what was cast."""
