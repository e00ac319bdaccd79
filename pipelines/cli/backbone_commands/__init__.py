"""`fedemb backbone` and its commands."""
