"""Rounds on JAX."""
