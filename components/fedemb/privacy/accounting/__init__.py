"""Prices of DP events."""
