"""Readers of users and images: formats, user IDs, photos, virtual clients."""
