"""Cache of frozen trunk features, computed once for each unit or user of a run."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from fedemb.config import LocalTrainingConfig, ModelConfig
from fedemb.data.client_data import choose_examples
from fedemb.engine.rounds import ClientExamples
from fedemb.models.keras_backend import traced
from fedemb.privacy.queries.product_sum import whole_features
from fedemb.privacy.randomness.sampling import VirtualClient
from fedemb.storage import Store

_BLOCK = 1024
"""Units of one file."""


UnitFeatures = np.ndarray
"""The features of one unit, a row for each image, see `rows_of` and `plain_rows`: one piece of
memory, so that a batch of units is put together at once. Raw."""


def row_type(features: int) -> np.dtype:
    """What is known of an image: `Features`, and its label."""
    mantissas = ("mantissas", np.int16, (features + 1,))
    return np.dtype([mantissas, ("scale", np.float64), ("label", np.int64)])


def rows_of(features: np.ndarray, labels: np.ndarray) -> UnitFeatures:
    """Returns features and labels of images as rows.

    Args:
      features: float32 `[images, features]`.
      labels: `[images]`.
    """
    rows = np.zeros(len(labels), row_type(features.shape[1]))
    rows["mantissas"], rows["scale"] = whole_features(features)
    rows["label"] = labels
    return rows


def plain_rows(features: np.ndarray, labels: np.ndarray) -> UnitFeatures:
    """The same as they are: `features`, float32, and `label`."""
    kind = np.dtype([("features", np.float32, features.shape[1:]), ("label", np.int64)])
    rows = np.zeros(len(labels), kind)
    rows["features"], rows["label"] = features, labels
    return rows


class FeatureCache:
    """Computes the features of each unit once, image by image, and keeps them for a resumed run.

    One image goes through the net at a time: then its features cannot depend on others. Features
    are as private as the images they are made of.

    Args:
      backbone: `keras.Model`, frozen, images to features.
      store: working state of the attempt, in the private root; None keeps nothing.
      inputs_sha: digest of everything that goes into the attempt, the backbone among it: features
        of other inputs are not taken.
      rows: what is kept of the features and labels of a unit.
    """

    def __init__(
        self,
        backbone: Any,
        store: Store | None = None,
        inputs_sha: str = "",
        rows: Callable[[np.ndarray, np.ndarray], UnitFeatures] = rows_of,
    ) -> None:
        from fedemb.models.preprocessing import preprocess

        self._dim, self._rows = int(backbone.output_shape[-1]), rows
        self._store, self._folder = store, f"features/{inputs_sha}"
        self._known: dict[bytes, UnitFeatures] = {}
        self._fresh: list[bytes] = []
        self._compute = traced(lambda image: backbone(preprocess(image[None]), training=False)[0])
        self._blocks = [] if store is None else store.list(f"{self._folder}/")
        for name in self._blocks:
            self._known |= _unpacked(store.read(name)) if store else {}

    def of(self, key: bytes, load: Callable[[], ClientExamples]) -> UnitFeatures:
        """Features of a unit.

        Args:
          key: names the unit; all keys have one length.
          load: reads its images; called once.
        """
        if key not in self._known:
            unit = load()
            computed = np.zeros((len(unit.labels), self._dim), np.float32)
            for row, image in enumerate(unit.images):
                computed[row] = np.asarray(self._compute(image))
            features = self._rows(computed, unit.labels)
            if not len(unit.labels):
                return features
            self._known[key] = features
            self._fresh.append(key)
            if self._store is not None and len(self._fresh) == _BLOCK:
                name = f"{self._folder}/{len(self._blocks):06d}.npz"
                self._store.write(name, _packed({k: self._known[k] for k in self._fresh}))
                self._blocks.append(name)
                self._fresh = []
        return self._known[key]

    @property
    def nothing(self) -> UnitFeatures:
        """Of a unit without images."""
        return self._rows(np.zeros((0, self._dim), np.float32), np.zeros(0, np.int64))

    def delete(self) -> None:
        """Removes what was kept: for the end of a training."""
        if self._store is not None:
            for name in self._blocks:
                self._store.delete(name)
        self._blocks, self._known, self._fresh = [], {}, []


def unit_key(client: VirtualClient) -> bytes:
    """Names a unit that is sampled alone: all of its row number, and the place of an image."""
    return client.users.tobytes() + client.grouping.to_bytes(4, "big")


def keeps_features(model: ModelConfig, local: LocalTrainingConfig) -> bool:
    """Returns whether local training can use features that are computed once.

    This holds if only the projection trains and the pixels are the same in every epoch.
    """
    return model.trainable == "projection" and local.augmentation is None


class FrozenFeatures:
    """Loads virtual clients as the features of their images.

    Features are cached by user, so removing a user from a virtual client needs no new features.

    Args:
      trunk: `keras.Model`, images to features.
      load: reads the images of a virtual client.
      max_examples: of one client.
      store: see `FeatureCache`.
      inputs_sha: see `FeatureCache`.
    """

    def __init__(
        self,
        trunk: Any,
        load: Callable[[VirtualClient], ClientExamples],
        max_examples: int,
        store: Store | None = None,
        inputs_sha: str = "",
    ) -> None:
        self.cache = FeatureCache(trunk, store, inputs_sha, plain_rows)
        self._load, self._most = load, max_examples

    def load(self, client: VirtualClient) -> ClientExamples:
        """Its examples, those that `choose_examples` takes."""
        units = [self._of(client, user) for user in np.sort(client.users)[:, None]]
        chosen = choose_examples([len(unit) for unit in units], self._most)
        rows = np.concatenate([self.cache.nothing, *units])
        starts = np.cumsum([0, *map(len, units)])
        taken = rows[[starts[unit] + turn for unit, turn in chosen]]
        return ClientExamples(client.grouping, client.group, taken["features"], taken["label"])

    def _of(self, client: VirtualClient, user: np.ndarray) -> UnitFeatures:
        alone = VirtualClient(client.grouping, client.group, user)
        return self.cache.of(user.tobytes(), partial(self._load, alone))


def _packed(units: dict[bytes, UnitFeatures]) -> bytes:
    packed = io.BytesIO()
    np.savez(
        packed,
        keys=np.array([np.frombuffer(key, np.uint8) for key in units]),
        counts=np.array([len(unit) for unit in units.values()]),
        rows=np.concatenate([*units.values()]),
    )
    return packed.getvalue()


def _unpacked(data: bytes) -> dict[bytes, UnitFeatures]:
    with np.load(io.BytesIO(data), allow_pickle=False) as packed:
        units = np.split(packed["rows"], np.cumsum(packed["counts"])[:-1])
        return {key.tobytes(): unit for key, unit in zip(packed["keys"], units, strict=True)}
