"""The users who never trained, and what the models of a run make of their images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from fedemb.config import RunConfig
from fedemb.data.client_data import UserStore, load_examples
from fedemb.data.pixels import decode_pngs
from fedemb.data.records import UserRecord
from fedemb.data.verified_folder import VerifiedFolder
from fedemb.documents.fields import SubgroupName
from fedemb.documents.run_artifacts import RunArtifacts
from fedemb.documents.starts import starts_of
from fedemb.evaluation.pairs import MAX_UNITS

PIECE = 512
"""Users read at once: memory does not grow with the set."""
UNTRAINED_SEED = 7919
"""Added to the training seed: the untrained model shares no weight with the trained one."""


@dataclass(frozen=True)
class Subjects:
    """Who is measured: one entry per image.

    Attributes:
      labels: int64 [n] classes.
      users: uint64 [n] owners.
      subgroups: str [n]; empty where none is named.
    """

    labels: np.ndarray
    users: np.ndarray
    subgroups: np.ndarray

    @property
    def clusters(self) -> np.ndarray:
        """What the bootstrap resamples: users where a class has one owner, else classes."""
        pairs = np.unique(np.stack([self.labels, self.users.view(np.int64)]), axis=1)
        owned = len(pairs[0]) == len(np.unique(self.labels))
        return self.users if owned else self.labels

    @property
    def identity_kind(self) -> str:
        """`user` or `class`: what `clusters` holds."""
        return "user" if self.clusters is self.users else "class"

    @property
    def groups(self) -> np.ndarray | None:
        """Subgroups as the bootstrap can draw them.

        None: there is one alone, an identity is in several, or there are more identities than the
        bootstrap takes apart.
        """
        names, dense = np.unique(self.subgroups, return_inverse=True)
        identities = len(np.unique(self.clusters))
        nested = len({*zip(dense.tolist(), self.clusters.tolist(), strict=True)}) == identities
        return self.subgroups if len(names) > 1 and nested and identities <= MAX_UNITS else None

    @property
    def measurable(self) -> bool:
        """Two classes, one of them with two images: less has no pair of each kind."""
        sizes = np.unique(self.labels, return_counts=True)[1]
        return len(sizes) >= 2 and int(sizes.max()) >= 2

    def take(self, use: np.ndarray) -> Subjects:
        """The images where `use` is true."""
        return Subjects(self.labels[use], self.users[use], self.subgroups[use])


def models_of_run(config: RunConfig, artifacts: RunArtifacts) -> dict[str, Any]:
    """The trained model, and what it must be better than (`starts_of`) as far as it is a model."""
    from fedemb.engine import build_backbone
    from fedemb.models.backbones import cut
    from fedemb.models.loading import load_backbone
    from fedemb.models.raw_pixels import raw_pixels

    start = load_backbone(artifacts.pretrained / "backbone.keras", config.model)
    untrained_seed = config.training.seed + UNTRAINED_SEED
    makers = {
        "public_backbone": lambda: start,
        "frozen_features": lambda: cut(start, "projection")[0],
        "untrained": lambda: build_backbone(config.model, untrained_seed),
        "raw_pixels": lambda: raw_pixels(config.model),
    }
    models = {"model": load_backbone(artifacts.model / "backbone.keras", config.model)}
    return models | {name: makers[name]() for name in starts_of(config) if name in makers}


def train_without_privacy(config: RunConfig, pretrained: Path, users: VerifiedFolder) -> Any:
    """The baseline of a simulation, from the same public start.

    Args:
      config: of the run.
      pretrained: folder of the public start.
      users: folder of the training users.
    """
    from fedemb.engine import train_centralized
    from fedemb.models.loading import load_backbone

    backbone = load_backbone(pretrained / "backbone.keras", config.model)
    store = UserStore(users)
    images, labels = load_examples(
        store,
        np.arange(len(store)),
        max_examples=int(store.image_counts.sum()),
        image_size=config.model.image_size,
        channels=config.model.channels,
    )
    epochs = config.evaluation.centralized_epochs
    return train_centralized(backbone, images, labels, config.training, epochs=epochs)


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


def apply_models(
    store: UserStore,
    models: Mapping[str, Any],
    config: RunConfig,
    apply: Callable[..., np.ndarray],
) -> tuple[Subjects, dict[str, np.ndarray]]:
    """Shows the images of a store to every model; images are decoded once and not kept.

    Users come in the order of their keyed hash, so a limit takes a random part of them.

    Args:
      store: evaluation users.
      models: by name.
      config: of the run; `evaluation.max_images` and `batch_size` count here.
      apply: `(model, images, batch_size)` to float32 [n, width]: `embed` or `classify`.

    Returns:
      The subjects, and by name float32 [n, width].
    """
    from fedemb.models.inference import VectorizedRounds

    labels: list[int] = []
    users: list[int] = []
    subgroups: list[str] = []
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in models}
    shown = VectorizedRounds(models, config.model.trainable, apply)
    waiting: list[bytes] = []

    def flush() -> None:
        if waiting:
            images = decode_pngs(waiting, store.image_size, store.channels)
            for name, found in shown(images, config.evaluation.batch_size).items():
                pieces[name].append(found)
            waiting.clear()

    for user in first_images(_users(store), config.evaluation.max_images):
        labels.extend(user.labels)
        users.extend([user.user_key] * len(user.images))
        subgroups.extend([user.subgroup] * len(user.images))
        waiting.extend(user.images)
        if len(waiting) >= 8 * config.evaluation.batch_size:
            flush()
    flush()
    subjects = Subjects(
        np.array(labels, np.int64), np.array(users, np.uint64), np.array(subgroups, str)
    )
    widths = {name: model.output_shape[-1] for name, model in models.items()}
    return subjects, {
        name: np.concatenate([np.zeros((0, widths[name]), np.float32), *parts])
        for name, parts in pieces.items()
    }


def shown_group(name: str, number: int) -> str:
    """A group's name, as it stands in the data; what could be more than a name is numbered."""
    try:
        return TypeAdapter(SubgroupName).validate_python(name or "(none)")
    except ValidationError:
        return f"subgroup {number}"
