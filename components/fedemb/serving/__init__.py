"""Released models in use: bundles, embed, search, serve, export."""
