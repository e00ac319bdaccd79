"""Networks: backbones, layers, losses, import, loading, inference."""
