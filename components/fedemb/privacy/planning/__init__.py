"""Noise for a target epsilon, and projections."""
