"""`blame`: which operation of a step loses the accuracy."""
