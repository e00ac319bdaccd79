"""Gradients of single units (DP-SGD)."""
