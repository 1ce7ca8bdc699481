"""Which operation loses the accuracy of a training step in low precision."""
