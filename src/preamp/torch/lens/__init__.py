"""A lens on a model: how large its weights, activations and gradients are."""
