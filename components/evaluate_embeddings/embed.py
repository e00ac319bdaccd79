"""Embeds the held-out images by several models at once, a piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fedemb.config import RunConfig
from fedemb.data.client_data import UserStore
from fedemb.data.pixels import decode_pngs
from fedemb.data.records import UserRecord
from fedemb.embedding import embed
from fedemb.steps.evaluate_embeddings.measure import Subjects

PIECE = 512
"""Users read at once: memory does not grow with the set."""


def first_images(users: Iterator[UserRecord], limit: int) -> Iterator[UserRecord]:
    """Yields users until `limit` images; the last user may be cut."""
    left = limit
    for user in users:
        if left <= 0:
            return
        kept = user.images[:left]
        left -= len(kept)
        yield UserRecord(user.user_key, kept, user.labels[: len(kept)], user.subgroup, user.block)


def _users(store: UserStore) -> Iterator[UserRecord]:
    for start in range(0, len(store), PIECE):
        yield from store.read(np.arange(start, min(start + PIECE, len(store))))


def embed_users(
    store: UserStore,
    backbones: Mapping[str, Any],
    config: RunConfig,
    embedder: Callable[..., np.ndarray] = embed,
) -> tuple[Subjects, dict[str, np.ndarray]]:
    """Embeds the images of a store with every backbone; images are decoded once and not kept.

    Users come in the order of their keyed hash, so a limit takes a random part of them.

    Args:
      store: evaluation users.
      backbones: by name.
      config: of the run; `evaluation.max_images` and `batch_size` count here.
      embedder: `(backbone, images, batch_size)` to float32 [n, dim].

    Returns:
      The subjects, and by name float32 [n, dim].
    """
    labels: list[int] = []
    users: list[int] = []
    subgroups: list[str] = []
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in backbones}
    waiting: list[bytes] = []

    def flush() -> None:
        if waiting:
            images = decode_pngs(waiting, store.image_size, store.channels)
            for name, backbone in backbones.items():
                pieces[name].append(embedder(backbone, images, config.evaluation.batch_size))
            waiting.clear()

    for user in first_images(_users(store), config.evaluation.max_images):
        labels.extend(user.labels)
        users.extend([user.user_key] * len(user.images))
        subgroups.extend([user.subgroup] * len(user.images))
        waiting.extend(user.images)
        if len(waiting) >= 8 * config.evaluation.batch_size:
            flush()
    flush()
    width = len(config.model.classes) or config.model.embedding_dim
    empty = np.zeros((0, width), np.float32)
    subjects = Subjects(
        np.array(labels, np.int64), np.array(users, np.uint64), np.array(subgroups, str)
    )
    return subjects, {name: np.concatenate([empty, *parts]) for name, parts in pieces.items()}
