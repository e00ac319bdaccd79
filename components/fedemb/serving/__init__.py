"""Releases: bundle, marker, card, verification, registries, and use by their users."""
