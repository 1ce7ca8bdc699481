"""A loss scale for every layer."""
