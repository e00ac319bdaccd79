"""Generated images for `make run`: every identity is a random glyph of a few pen strokes.

Private identities have curved strokes of a thin pen. Public classes have straight strokes of a
broad pen, because public data usually differs from private data. Every image shows the glyph in
another pose: jittered control points, rotation, scale, shear, shift, pen width, contrast, noise.

A stroke is a row of Gaussian dots. A dot is separable in x and y, so the ink of a whole image is
one matrix product [height, dots] x [dots, width], and thousands of images render per second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedemb.config import BuiltinData
from fedemb.data.pixels import encode_png
from fedemb.foundation.files import new_file

_CHUNK = 500
"""Identities per random stream; fixed, so that the first N never depend on the rest."""
_DOTS = 14
"""Dots per stroke."""
_MAX_STROKES = 5
_HAND = 0.05
"""Variation of the handwriting of users for the same glyph; paper is -1 to 1."""


@dataclass(frozen=True)
class Style:
    """Stroke style of a pen."""

    stream: int
    """Number of the random stream: styles never share randomness."""
    min_strokes: int
    bend: float
    """Distance of the middle of a stroke from the straight line; paper is -1 to 1."""
    joined: float
    """Probability that a stroke starts at the end of the previous one."""
    pen: float
    """Pen radius; the image is -1 to 1."""


PRIVATE = Style(stream=1, min_strokes=3, bend=0.55, joined=0.5, pen=0.055)
PUBLIC = Style(stream=2, min_strokes=3, bend=0.0, joined=0.9, pen=0.11)


def _glyphs(rng: np.random.Generator, style: Style) -> tuple[np.ndarray, np.ndarray]:
    """Draws glyphs: control points [_CHUNK, strokes, 3, 2] in -1..1, ink [_CHUNK, strokes]."""
    shape = (_CHUNK, _MAX_STROKES)
    angle = rng.uniform(0, 2 * np.pi, shape)
    length = rng.uniform(0.6, 1.5, shape)
    start = rng.uniform(-0.8, 0.8, (*shape, 2))
    joined = rng.random(shape) < style.joined
    middle = rng.normal(0, style.bend, (*shape, 2))
    points = np.empty((*shape, 3, 2))
    for stroke in range(_MAX_STROKES):
        if stroke:
            last = points[:, stroke - 1, 2]
            start[:, stroke] = np.where(joined[:, stroke, None], last, start[:, stroke])
        step = np.stack([np.cos(angle[:, stroke]), np.sin(angle[:, stroke])], -1)
        end = start[:, stroke] + step * length[:, stroke, None]
        outside = np.abs(end) > 0.9  # turn back into the paper
        end = np.where(outside, start[:, stroke] - step * length[:, stroke, None], end).clip(-1, 1)
        points[:, stroke, 0] = start[:, stroke]
        points[:, stroke, 1] = (start[:, stroke] + end) / 2 + middle[:, stroke]
        points[:, stroke, 2] = end
    strokes = rng.integers(style.min_strokes, _MAX_STROKES + 1, _CHUNK)
    ink = (np.arange(_MAX_STROKES) < strokes[:, None]).astype(np.float64)
    drawn = ink[..., None, None]
    low = np.where(drawn > 0, points, np.inf).min((1, 2))
    high = np.where(drawn > 0, points, -np.inf).max((1, 2))
    half = (high - low).max(-1) / 2
    points = (points - ((high + low) / 2)[:, None, None]) / half[:, None, None, None]
    return points, ink


def _poses(rng: np.random.Generator, images: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws affine poses of images: matrices [images, 2, 2] and shifts [images, 2]."""
    turn = np.deg2rad(rng.uniform(-15, 15, images))
    scale = rng.uniform(0.62, 0.86, (images, 1)) * rng.uniform(0.9, 1.1, (images, 2))
    shear = rng.uniform(-0.2, 0.2, images)
    cos, sin = np.cos(turn), np.sin(turn)
    matrix = np.empty((images, 2, 2))
    matrix[:, 0] = np.stack([cos, cos * shear - sin], -1)
    matrix[:, 1] = np.stack([sin, sin * shear + cos], -1)
    return matrix * scale[:, None, :], rng.uniform(-0.14, 0.14, (images, 2))


def _render(
    rng: np.random.Generator, points: np.ndarray, ink: np.ndarray, style: Style, size: int
) -> np.ndarray:
    """Renders one image of each glyph given: uint8 [images, size, size], ink black on white."""
    images = len(points)
    points = points + rng.normal(0, 0.06, points.shape)
    matrix, shift = _poses(rng, images)
    points = np.einsum("nspc,ndc->nspd", points, matrix) + shift[:, None, None]
    along = np.linspace(0, 1, _DOTS)
    weights = np.stack([(1 - along) ** 2, 2 * along * (1 - along), along**2], -1)
    dots = np.einsum("tp,nspd->nstd", weights, points)
    spacing = np.linalg.norm(np.diff(dots, axis=2, append=dots[:, :, -2:-1]), axis=-1)
    radius = style.pen * rng.uniform(0.75, 1.35, images)
    amount = (ink[..., None] * spacing / radius[:, None, None]).reshape(images, -1)
    dots = dots.reshape(images, -1, 2).astype(np.float32)
    grid = np.linspace(-1 + 1 / size, 1 - 1 / size, size, dtype=np.float32)
    scale = (np.sqrt(0.5) / radius).astype(np.float32)[:, None, None]
    near_x = np.exp(-(((grid - dots[..., :1]) * scale) ** 2))
    near_y = np.exp(-(((grid - dots[..., 1:]) * scale) ** 2)) * amount[..., None]
    density = near_y.astype(np.float32).transpose(0, 2, 1) @ near_x
    contrast = rng.uniform(0.7, 1.0, (images, 1, 1)).astype(np.float32)
    paper = 1 - contrast * (1 - np.exp(-1.2 * density))
    noise = rng.standard_normal(paper.shape, dtype=np.float32)
    paper += noise * rng.uniform(0.02, 0.08, (images, 1, 1)).astype(np.float32)
    return (paper.clip(0, 1) * 31).round().astype(np.uint8) * 8  # 32 greys: small files


def draw(
    style: Style, *, seed: int, identities: int, images_each: int, image_size: int
) -> Iterator[np.ndarray]:
    """Draws identities in order, in chunks.

    Yields:
      uint8 [identities of the chunk, images_each, image_size, image_size].
    """

    def chunk(first: int) -> np.ndarray:
        rng = np.random.default_rng(np.random.SeedSequence([seed, style.stream, first]))
        points, ink = _glyphs(rng, style)
        count = min(_CHUNK, identities - first)
        views = [_render(rng, points, ink, style, image_size) for _ in range(images_each)]
        return np.stack(views, 1)[:count]

    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(chunk, range(0, identities, _CHUNK))


def draw_classes(
    style: Style, *, seed: int, users: int, images_each: int, image_size: int, classes: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Draws users who all write the same glyphs in individual handwriting, in chunks.

    Yields:
      uint8 [users of the chunk, images_each, image_size, image_size], and the class of each image,
      int64 [users of the chunk, images_each].
    """
    first_chunk = np.random.default_rng(np.random.SeedSequence([seed, style.stream, 0]))
    points, ink = _glyphs(first_chunk, style)

    def chunk(first: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(np.random.SeedSequence([seed, style.stream, first, classes]))
        labels = rng.integers(0, classes, (_CHUNK, images_each))
        hand = rng.normal(0, _HAND, (_CHUNK, *points.shape[1:]))
        views = [
            _render(rng, points[label] + hand, ink[label], style, image_size) for label in labels.T
        ]
        count = min(_CHUNK, users - first)
        return np.stack(views, 1)[:count], labels[:count]

    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(chunk, range(0, users, _CHUNK))


def glyphs(
    users: int,
    images_per_user: int = 4,
    *,
    style: Style = PRIVATE,
    image_size: int = 28,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns glyphs as arrays.

    >>> images, users = glyphs(users=5)
    >>> images.shape, images.dtype, users[:5]
    ((20, 28, 28, 1), dtype('uint8'), array([0, 0, 0, 0, 1]))

    Args:
      users: number of identities.
      images_per_user: number of images per identity.
      style: stroke style.
      image_size: height and width in pixels.
      seed: random seed; the first images do not depend on `users`.

    Returns:
      images: uint8 [users x images_per_user, image_size, image_size, 1].
      users: int64 [users x images_per_user], owner of each image.
    """
    chunks = draw(
        style, seed=seed, identities=users, images_each=images_per_user, image_size=image_size
    )
    images = np.concatenate(list(chunks)).reshape(-1, image_size, image_size, 1)
    return images, np.repeat(np.arange(users), images_per_user)


def _write(path: Path, chunks: Iterable[tuple[np.ndarray, np.ndarray | None]], prefix: str) -> int:
    """Writes chunks of users as Parquet: image, user_id, label. Returns the number of images.

    A chunk is images with their classes, or with None if every user is one class.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [("image", pa.binary()), ("user_id", pa.string()), ("label", pa.int64())],
        {"source": "procedural glyphs of fedemb", "licence": "Apache-2.0"},
    )
    written = first = 0
    with new_file(path) as sink, pq.ParquetWriter(sink, schema, compression="none") as writer:
        for chunk, classes in chunks:
            count, each = chunk.shape[:2]
            numbers = np.repeat(np.arange(first, first + count), each)
            images = [encode_png(image[..., None]) for image in chunk.reshape(-1, *chunk.shape[2:])]
            ids = [f"{prefix}{number:08d}" for number in numbers.tolist()]
            labels = numbers if classes is None else classes.ravel()
            writer.write_table(pa.table([images, ids, labels], schema=schema))
            written += len(images)
            first += count
    return written


def write_builtin(
    builtin: BuiltinData, image_size: int, private_path: Path, public_path: Path
) -> tuple[int, int]:
    """Writes private and public glyphs as two Parquet files, in the same form as real data.

    The same seed gives the same bytes; fewer users give the first of the same users.

    Args:
      builtin: numbers of users, images and classes, and the seed.
      image_size: height and width in pixels.
      private_path: Parquet file with `users x images_per_user` images: of one class per user, or
        of `builtin.classes` shared ones.
      public_path: Parquet file with the public classes.

    Returns:
      Numbers of private and public images written.

    Raises:
      StorageError: a file cannot be written; no partial file is left.
    """
    public = draw(
        PUBLIC,
        seed=builtin.seed,
        identities=builtin.public_classes,
        images_each=builtin.public_images_per_class,
        image_size=image_size,
    )
    return (
        _write_private(builtin, image_size, private_path),
        _write(public_path, ((chunk, None) for chunk in public), "public-"),
    )


def _write_private(builtin: BuiltinData, image_size: int, path: Path) -> int:
    each, seed = builtin.images_per_user, builtin.seed
    private: Iterable[tuple[np.ndarray, np.ndarray | None]]
    if builtin.classes:
        private = draw_classes(
            PRIVATE,
            seed=seed,
            users=builtin.users,
            images_each=each,
            image_size=image_size,
            classes=builtin.classes,
        )
    else:
        identities = builtin.users
        drawn = draw(
            PRIVATE, seed=seed, identities=identities, images_each=each, image_size=image_size
        )
        private = ((chunk, None) for chunk in drawn)
    return _write(path, private, "glyph-")
