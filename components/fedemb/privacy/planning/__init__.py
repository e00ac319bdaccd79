"""Noise for a target, frontiers and projections."""
