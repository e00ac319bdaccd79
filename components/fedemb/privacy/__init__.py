"""Sampling, clipping, noise, and the price of what runs."""
