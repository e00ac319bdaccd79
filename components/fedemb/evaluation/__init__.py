"""Measures of embeddings and classifiers on held-out users, with bootstrap intervals."""
