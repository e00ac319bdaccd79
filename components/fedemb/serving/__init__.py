"""Use of released models: bundles, embedding, search, serving, export."""
