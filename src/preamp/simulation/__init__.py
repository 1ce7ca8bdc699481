"""Policies over recorded or synthetic gradients, without a model."""
