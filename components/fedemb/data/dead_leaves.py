"""Generated images: overlapping leaves of random shape and colour.

Dead leaves share many statistics of photographs (Baradad et al., arXiv 2106.05963). So features
learned from them, or constants of their features, need no public data, no licence and no consent
(in private training: Tang et al., arXiv 2306.06076).
"""

from __future__ import annotations

import numpy as np

_FINE = 2
"""Supersampling factor: each pixel is the mean of `_FINE` squared samples."""
_LEAVES = 120


def dead_leaves(
    images: int, size: int, channels: int, *, laws: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws images, each from one of several laws of colour, size and shape.

    Args:
      images: number of images.
      size: height and width in pixels.
      channels: 1 or 3.
      laws: number of laws, used in turn.
      seed: seed of laws and images.

    Returns:
      uint8 `[images, size, size, channels]`, and the law of each image, int64 `[images]`.
    """
    labels = np.arange(images) % laws
    pixels = np.empty((images, size, size, channels), np.uint8)
    for number, law in enumerate(labels):
        of_law = np.random.default_rng([seed, int(law)])
        palette = of_law.uniform(0.1, 0.9, (3, channels))
        spread, narrow, least = of_law.uniform([0.05, 0.3, 1.0], [0.3, 1.0, 3.0])
        random = np.random.default_rng([seed, int(law), number])
        pixels[number] = _drawn(random, size, channels, palette, spread, narrow, least)
    return pixels, labels


def _drawn(  # noqa: PLR0917 - the numbers of a law
    random: np.random.Generator,
    size: int,
    channels: int,
    palette: np.ndarray,
    spread: float,
    narrow: float,
    least: float,
) -> np.ndarray:
    fine = _FINE * size
    rows, columns = np.mgrid[:fine, :fine]
    canvas = np.tile(random.uniform(0, 1, channels), (fine, fine, 1))
    mood = random.normal(0, 0.15, channels)
    for _ in range(_LEAVES):
        radius = _FINE * min(least / np.sqrt(1 - random.random()), size / 2)
        row, column = random.uniform(-radius, fine + radius, 2)
        angle, shape = random.uniform(0, np.pi), random.uniform(narrow, 1)
        along = (rows - row) * np.cos(angle) + (columns - column) * np.sin(angle)
        across = (columns - column) * np.cos(angle) - (rows - row) * np.sin(angle)
        colour = palette[random.integers(len(palette))] + mood
        colour = colour + spread * (random.normal() + 0.4 * random.normal(size=channels))
        canvas[along**2 + (across / shape) ** 2 < radius**2] = np.clip(colour, 0, 1)
    means = canvas.reshape(size, _FINE, size, _FINE, channels).mean((1, 3))
    return np.rint(255 * means).astype(np.uint8)
