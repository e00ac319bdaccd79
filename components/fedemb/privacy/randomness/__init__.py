"""Noise and coins from ciphers, and the samplers that use them."""
