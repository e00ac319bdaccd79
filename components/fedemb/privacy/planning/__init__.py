"""Noise for a target epsilon, frontiers and projections."""
