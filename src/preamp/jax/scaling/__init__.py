"""Loss scaling for JAX."""
