"""The examples of virtual clients, read from the users on disk. Raw."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from fedemb.config import ModelConfig
from fedemb.data.client_data import UserStore, load_examples
from fedemb.privacy.sampling import VirtualClient
from fedemb.training.rounds import ClientExamples

CACHE_BYTES = 256 << 20
"""Maximum bytes of decoded images cached for later rounds."""


class ClientLoader:
    """Loads the examples of virtual clients and caches the most recently used ones decoded.

    Args:
      store: the users.
      model: model configuration, which defines the image format.
      max_examples: maximum number of examples of one client, in keyed order.
      one_image: True if clients are images sampled separately; each client then loads the image at
          its index among its owner's images.
      classes: DP-FedAvg only: all labels, ascending; a label's index is its row of the shared head.
      cache_bytes: maximum bytes of decoded images cached.
    """

    def __init__(
        self,
        store: UserStore,
        model: ModelConfig,
        *,
        max_examples: int,
        one_image: bool = False,
        classes: np.ndarray | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._store, self._classes, self._one_image = store, classes, one_image
        self._how = {
            "max_examples": max_examples,
            "image_size": model.image_size,
            "channels": model.channels,
        }
        self._cache: OrderedDict[bytes, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._room = cache_bytes

    def load(self, client: VirtualClient) -> ClientExamples:
        """Loads a `sampling.VirtualClient`; a client without users returns no examples."""
        key = client.users.tobytes()
        found = self._cache.pop(key, None)
        if found is None:
            found = self._read(client.users)
            self._room -= found[0].nbytes
        self._cache[key] = found
        while self._room < 0:
            _, (images, _) = self._cache.popitem(last=False)
            self._room += images.nbytes
        images, labels = found
        if self._one_image:
            place = slice(client.grouping, client.grouping + 1)
            images, labels = images[place], labels[place]
        return ClientExamples(client.grouping, client.group, images, labels)

    def _read(self, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        images, labels = load_examples(self._store, users, **self._how)
        if self._classes is not None:
            labels = np.searchsorted(self._classes, labels)
        return images, labels


def all_classes(store: UserStore) -> np.ndarray:
    """Returns all labels of the training users, int64 ascending, for DP-FedAvg's shared head."""
    found: set[int] = set()
    for start in range(0, len(store), 1024):
        for user in store.read(np.arange(start, min(start + 1024, len(store)))):
            found.update(user.labels)
    return np.array(sorted(found), np.int64)
