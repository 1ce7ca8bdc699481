"""A policy inside a real DeepSpeed engine."""
