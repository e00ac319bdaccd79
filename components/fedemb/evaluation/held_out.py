"""Held-out users, and the outputs of a run's models for their images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
from pydantic import TypeAdapter, ValidationError

from fedemb.config import EvaluationConfig, RunConfig
from fedemb.data.client_data import UserStore
from fedemb.data.pixels import decode_pngs
from fedemb.data.records import UserRecord
from fedemb.documents.artifacts import RunArtifacts
from fedemb.documents.fields import SubgroupName
from fedemb.documents.utility import baselines_of, rate_name
from fedemb.errors import InputError
from fedemb.evaluation.metrics import Retrieval, Verification, arrange, rates_at, retrieve, verify
from fedemb.evaluation.pairs import MAX_UNITS, Estimate
from fedemb.foundation.canonical_json import JsonFields
from fedemb.models.keras_backend import Model

UNTRAINED_SEED = 7919
"""Offset to the training seed, so that the untrained model shares no weights with the trained."""


@dataclass(frozen=True)
class Subjects:
    """Evaluated images with their owners, one entry per image.

    Attributes:
      labels: int64 [n] classes.
      users: uint64 [n] owners.
      subgroups: str [n]; empty if no subgroup is named.
    """

    labels: np.ndarray
    users: np.ndarray
    subgroups: np.ndarray

    @property
    def clusters(self) -> np.ndarray:
        """Returns the bootstrap clusters: users if each class has one owner, else classes."""
        pairs = np.unique(np.stack([self.labels, self.users.view(np.int64)]), axis=1)
        owned = len(pairs[0]) == len(np.unique(self.labels))
        return self.users if owned else self.labels

    @property
    def identity_kind(self) -> str:
        """Returns `user` or `class`, the kind of `clusters`."""
        return "user" if self.clusters is self.users else "class"

    @property
    def groups(self) -> np.ndarray | None:
        """Returns the subgroups for the bootstrap.

        Returns None if only one subgroup exists, if an identity is in several subgroups, or if the
        number of identities exceeds the maximum number of bootstrap units.
        """
        names, dense = np.unique(self.subgroups, return_inverse=True)
        identities = len(np.unique(self.clusters))
        nested = len({*zip(dense.tolist(), self.clusters.tolist(), strict=True)}) == identities
        return self.subgroups if len(names) > 1 and nested and identities <= MAX_UNITS else None

    @property
    def measurable(self) -> bool:
        """Returns whether two classes exist, one with two images, so that both pair kinds exist."""
        sizes = np.unique(self.labels, return_counts=True)[1]
        return len(sizes) >= 2 and int(sizes.max()) >= 2

    def take(self, use: np.ndarray) -> Subjects:
        """Returns the images where `use` is true."""
        return Subjects(self.labels[use], self.users[use], self.subgroups[use])


def models_of_run(config: RunConfig, artifacts: RunArtifacts) -> dict[str, Model]:
    """Returns the trained model and those baselines of `baselines_of` that are models."""
    from fedemb.models.backbone_files import load_backbone
    from fedemb.models.backbones import build_backbone, cut
    from fedemb.models.imported import network_output
    from fedemb.models.inference import raw_pixels
    from fedemb.models.public_features import with_public_features

    start = load_backbone(artifacts.pretrained / "backbone.keras", config.model)
    untrained_seed = config.training.seed + UNTRAINED_SEED
    makers = {
        "public_backbone": lambda: start,
        "frozen_features": lambda: cut(start, "projection")[0],
        "network_output": lambda: network_output(start),
        "untrained": lambda: with_public_features(
            build_backbone(config.model, untrained_seed), config.model.keep_public_features
        ),
        "raw_pixels": lambda: raw_pixels(config.model),
    }
    models = {"model": load_backbone(artifacts.model / "backbone.keras", config.model)}
    return models | {name: makers[name]() for name in baselines_of(config) if name in makers}


def first_images(users: Iterator[UserRecord], limit: int) -> Iterator[UserRecord]:
    """Yields users up to `limit` images; the last user may be truncated."""
    left = limit
    for user in users:
        if left <= 0:
            return
        kept = user.images[:left]
        left -= len(kept)
        yield UserRecord(user.user_key, kept, user.labels[: len(kept)], user.subgroup, user.block)


def apply_models(
    store: UserStore,
    models: Mapping[str, Model],
    config: RunConfig,
    apply: Callable[..., np.ndarray],
) -> tuple[Subjects, dict[str, np.ndarray]]:
    """Applies every model to the images of a store; images are decoded once and not kept.

    Users are read in the order of their keyed hash, so a limit selects a random subset.

    Args:
      store: evaluation users.
      models: name -> model.
      config: configuration of the run; `evaluation.max_images` and `batch_size` apply.
      apply: `(model, images, batch_size)` to float32 [n, width]: `embed` or `classify`.

    Returns:
      The subjects, and name -> float32 [n, width].
    """
    from fedemb.models.inference import SharedFeatures

    labels: list[int] = []
    users: list[int] = []
    subgroups: list[str] = []
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in models}
    shown = SharedFeatures(models, config.model.trainable, apply)
    waiting: list[bytes] = []

    def flush(count: int) -> None:
        images = decode_pngs(waiting[:count], store.image_size, store.channels)
        for name, found in shown(images, config.evaluation.batch_size).items():
            pieces[name].append(found)
        del waiting[:count]

    held_out = chain.from_iterable(store.read_in_pieces(np.arange(len(store))))
    for user in first_images(held_out, config.evaluation.max_images):
        labels.extend(user.labels)
        users.extend([user.user_key] * len(user.images))
        subgroups.extend([user.subgroup] * len(user.images))
        waiting.extend(user.images)
        if len(waiting) >= 2 * config.evaluation.batch_size:
            flush(len(waiting) - len(waiting) % config.evaluation.batch_size)
    flush(len(waiting))
    subjects = Subjects(
        np.array(labels, np.int64), np.array(users, np.uint64), np.array(subgroups, str)
    )
    widths = {name: model.output_shape[-1] for name, model in models.items()}
    return subjects, {
        name: np.concatenate([np.zeros((0, widths[name]), np.float32), *parts])
        for name, parts in pieces.items()
    }


def shown_group(name: str, number: int) -> str:
    """Returns a group's name as in the data, or its number if the text is not a valid name."""
    try:
        return TypeAdapter(SubgroupName).validate_python(name or "(none)")
    except ValidationError:
        return f"subgroup {number}"


MIN_SUBGROUP_IDENTITIES = 10
"""Minimum identities of a measured subgroup; smaller ones are only counted."""
ROC_POINTS = 120
_SEED = 20221121
"""Seed of the bootstrap: fixed, so that two reports on the same identities can be paired."""


@dataclass(frozen=True)
class Measured:
    """Measurements of one model on one set of subjects."""

    verification: Verification
    retrieval: Retrieval

    @property
    def headline(self) -> Estimate:
        """Returns the recall at the first false accept rate."""
        return self.verification.recall[0]

    def to_json(self) -> JsonFields:
        """Returns `recall_at_far` and `retrieval` of the utility report."""
        verification, retrieval = self.verification, self.retrieval
        return {
            "recall_at_far": {
                rate_name(rate): {**recall.to_json(), "threshold": round(threshold, 6)}
                for rate, recall, threshold in zip(
                    verification.false_accept_rates,
                    verification.recall,
                    verification.thresholds,
                    strict=True,
                )
            },
            "retrieval": {
                "recall_at": {str(k): e.to_json() for k, e in retrieval.recall_at.items()},
                "mean_average_precision": retrieval.mean_average_precision.to_json(),
                "nearest_neighbour": retrieval.nearest_neighbour.to_json(),
                "queries": retrieval.queries,
                "identities_with_match": retrieval.identities_with_match,
            },
        }


def measure(
    subjects: Subjects,
    embeddings: np.ndarray,
    config: EvaluationConfig,
    gallery: np.ndarray | None = None,
) -> Measured:
    """Measures embeddings; with `gallery`, queries of one model against a gallery of another.

    Args:
      subjects: subjects of the embeddings.
      embeddings: [n, dim].
      config: rates, depths and number of draws.
      gallery: [n, dim] of the same images.

    Raises:
      InputError: the subjects are not measurable.
      Diverged: an embedding is not finite.
    """
    groups = subjects.groups if config.resample_subgroups else None
    data = arrange(embeddings, subjects.labels, subjects.clusters, gallery, groups)
    draws = {"samples": config.bootstrap_samples, "seed": _SEED}
    return Measured(
        verify(data, config.false_accept_rates, **draws), retrieve(data, config.recall_at, **draws)
    )


def differences(better: Measured, than: Measured) -> JsonFields:
    """Returns paired differences of recall per false accept rate."""
    rates = better.verification.false_accept_rates
    pairs = zip(rates, better.verification.recall, than.verification.recall, strict=True)
    return {rate_name(rate): (a - b).to_json() for rate, a, b in pairs}


def roc_points(verification: Verification) -> dict[str, list[float]]:
    """Returns a ROC as one list per axis, for KFP, thinned evenly in log false accept rate."""
    roc = verification.roc
    wanted = np.linspace(np.log(roc[0, 0]), np.log(roc[-1, 0]), ROC_POINTS)
    rows = roc[np.unique(np.searchsorted(np.log(roc[:, 0]), wanted).clip(0, len(roc) - 1))]
    return {
        name: [round(float(value), 8) for value in rows[:, column]]
        for column, name in enumerate(("far", "recall", "threshold"))
    }


def by_subgroup(
    subjects: Subjects, embeddings: np.ndarray, config: EvaluationConfig, threshold: float
) -> JsonFields:
    """Evaluates `embeddings` [n, dim] of every subgroup at its own threshold and a common one.

    Returns:
      `measured`: a mapping per subgroup, worst recall first; `too_small`: the number of skipped
      ones.
    """
    measured: list[tuple[float, JsonFields]] = []
    too_small = 0
    for name in np.unique(subjects.subgroups):
        use = subjects.subgroups == name
        part = subjects.take(use)
        if not part.measurable or len(np.unique(part.clusters)) < MIN_SUBGROUP_IDENTITIES:
            too_small += 1
            continue
        try:
            data = arrange(embeddings[use], part.labels, part.clusters)
        except InputError:
            too_small += 1
            continue
        draws = {"samples": config.bootstrap_samples, "seed": _SEED}
        own = verify(data, config.false_accept_rates[:1], **draws)
        accepts, recall = rates_at(data, threshold, **draws)
        figures: JsonFields = {
            "name": shown_group(str(name), len(measured)),
            "images": int(use.sum()),
            "identities": len(np.unique(part.clusters)),
            "recall_at_own_threshold": {**own.recall[0].to_json()},
            "recall_at_common_threshold": {**recall.to_json()} if recall else None,
            "false_accept_rate_at_common_threshold": {**accepts.to_json()} if accepts else None,
        }
        measured.append((own.recall[0].to_json()["value"], figures))
    measured.sort(key=lambda group: group[0])
    return {"measured": [figures for _, figures in measured], "too_small": too_small}
