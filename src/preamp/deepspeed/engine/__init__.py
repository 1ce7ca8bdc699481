"""DeepSpeed's engine on plain PyTorch."""
