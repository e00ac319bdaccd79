"""Schemas of all documents that steps exchange, by kind and version."""
