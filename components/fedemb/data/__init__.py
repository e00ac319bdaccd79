"""Readers of users and images: formats, user ids, photos, virtual clients."""
