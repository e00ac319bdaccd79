"""Feature caches of an attempt.

Features follow from the images and the frozen trunk only: no key, coin or noise is part of them.
"""

# Keras is not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import numpy as np

from fedemb.engine.feature_cache import FOLDER, FeatureCache, UnitFeatures, rows_of
from fedemb.foundation.canonical_json import JsonObject, json_digest
from fedemb.models.arrays import Model
from fedemb.storage import Store


class FeatureCaches:
    """Opens the feature cache of a training; inputs of features select one cache.

    Args:
      store: signed working state of the attempt.
      inputs_sha: digest of the inputs of the attempt: users, code, configuration, public backbone.
    """

    def __init__(self, store: Store, inputs_sha: str) -> None:
        self._store, self._inputs_sha = store, inputs_sha
        self._open: tuple[str, FeatureCache] | None = None

    def open(
        self,
        trunk: Model,
        images: JsonObject,
        rows: Callable[[np.ndarray, np.ndarray], UnitFeatures] = rows_of,
    ) -> FeatureCache:
        """Returns the cache of a trunk and a selection of images.

        One cache stays in memory. A cache of other inputs is read from the store, where every
        object is signed by the trainer under its name.

        Args:
          trunk: `keras.Model`, frozen, images to features.
          images: settings that select and decode the images, see `ClientLoader.settings`.
          rows: see `FeatureCache`.
        """
        content = ["features/1", self._inputs_sha, trunk_digest(trunk), images, rows.__name__]
        key = json_digest(content)
        if self._open is not None and self._open[0] == key:
            return self._open[1]
        self.save()
        self._open = key, FeatureCache(trunk, self._store, key, rows)
        return self._open[1]

    def save(self) -> None:
        """Writes the features that are only in memory."""
        if self._open is not None:
            self._open[1].save()

    def delete(self) -> None:
        """Deletes all features of the attempt."""
        self._open = None
        for name in self._store.list(FOLDER):
            self._store.delete(name)


def trunk_digest(trunk: Model) -> str:
    """Returns a digest of layers, precision and weights of a trunk, without the trunk's name."""
    layers = json.loads(trunk.to_json())
    layers["config"].pop("name", None)  # numbered by Keras in each process
    digest = hashlib.sha256(json.dumps(layers, sort_keys=True).encode())
    weights: list[np.ndarray] = trunk.get_weights()
    for values in weights:
        digest.update(f"{values.dtype.str}{values.shape}".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()
