"""Cache of frozen trunk features, computed once for each unit or user of a run."""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from tempfile import TemporaryFile

import numpy as np
from jaxtyping import Float32, UInt8

from fedemb.config import LocalTrainingConfig, ModelConfig
from fedemb.data.client_data import choose_examples
from fedemb.foundation import step_logging as events
from fedemb.foundation.cores import available_cores
from fedemb.foundation.files import AppendedFile
from fedemb.models.keras_backend import Model, traced
from fedemb.privacy.feature_sums import whole_features
from fedemb.privacy.sampling import VirtualClient
from fedemb.training.rounds import ClientExamples, UnitFeatures

_LOG = logging.getLogger(__name__)

_TOGETHER, _TOGETHER_BYTES = 256, 64 << 20
"""Images read before their features are computed, and their bytes."""


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
    """Computes the features of each unit once and keeps them in a temporary file without a name.

    So memory does not grow with the images. Features have the same bits whichever images are
    computed together, see `MicroBatches`; a resumed run computes them again.

    Args:
      backbone: `keras.Model`, frozen, images to features.
      rows: converts features and labels of a unit to what is kept.
    """

    def __init__(
        self, backbone: Model, rows: Callable[[np.ndarray, np.ndarray], UnitFeatures] = rows_of
    ) -> None:
        self._compute, self._rows = MicroBatches(backbone), rows
        self._file = AppendedFile(TemporaryFile("a+b", buffering=0))  # noqa: SIM115 - as long as this
        self._known: dict[bytes, tuple[int, int]] = {}
        """Key -> first byte of the unit's rows in the file, and their number of bytes."""

    def fill(self, units: Iterable[tuple[bytes, Callable[[], ClientExamples]]]) -> None:
        """Computes the missing features of units, in full micro-batches over several units.

        Args:
          units: key and reader of each unit, as in `of`.
        """
        waiting: dict[bytes, ClientExamples] = {}
        images = size = 0
        for key, load in units:
            if key not in self._known and key not in waiting:
                waiting[key] = load()
                images += len(waiting[key].labels)
                size += waiting[key].images.nbytes
            if images >= _TOGETHER or size >= _TOGETHER_BYTES:
                self._add(waiting)
                waiting, images, size = {}, 0, 0
        self._add(waiting)

    def of_all(
        self, units: Iterable[tuple[bytes, Callable[[], ClientExamples]]]
    ) -> list[UnitFeatures]:
        """Returns the features of several units; see `fill`."""
        units = list(units)
        self.fill(units)
        return [self._read(key) for key, _ in units]

    def of(self, key: bytes, load: Callable[[], ClientExamples]) -> UnitFeatures:
        """Returns the features of a unit.

        Args:
          key: names the unit; all keys have one length.
          load: reads its images; called once, except without images.
        """
        if key not in self._known:
            self._add({key: load()})
        return self._read(key)

    def _read(self, key: bytes) -> UnitFeatures:
        start, size = self._known.get(key, (0, 0))
        return np.frombuffer(self._file.read(start, size), self.nothing.dtype)

    def _add(self, units: dict[bytes, ClientExamples]) -> None:
        """Computes and keeps the features of units; units without images are not kept.

        The audit reads units of a round from another thread, while this computes the next.
        """
        filled = {key: unit for key, unit in units.items() if len(unit.labels)}
        if not filled:
            return
        features = self._compute(np.concatenate([unit.images for unit in filled.values()]))
        ends = np.cumsum([len(unit.labels) for unit in filled.values()])
        for (key, unit), part in zip(filled.items(), np.split(features, ends[:-1]), strict=True):
            data = self._rows(part, unit.labels).tobytes()
            self._known[key] = self._file.append(data), len(data)

    @cached_property
    def nothing(self) -> UnitFeatures:
        """Features of a unit without images."""
        return self._rows(np.zeros((0, self._compute.dim), np.float32), np.zeros(0, np.int64))


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
      cache: features of users, as `plain_rows`.
      load: reads the images of a virtual client.
      max_examples: of one client.
    """

    def __init__(
        self,
        cache: FeatureCache,
        load: Callable[[VirtualClient], ClientExamples],
        max_examples: int,
    ) -> None:
        self.cache = cache
        self._load, self._most = load, max_examples

    def fill(self, clients: Sequence[VirtualClient]) -> None:
        """Computes the missing features of the users of virtual clients; see `FeatureCache`."""
        self.cache.fill(user for client in clients for user in self._users(client))

    def load(self, client: VirtualClient) -> ClientExamples:
        """Returns the examples of a virtual client that `choose_examples` selects."""
        units = self.cache.of_all(self._users(client))
        chosen = choose_examples([len(unit) for unit in units], self._most)
        rows = np.concatenate([self.cache.nothing, *units])
        starts = np.cumsum([0, *map(len, units)])
        taken = rows[[starts[unit] + turn for unit, turn in chosen]]
        return ClientExamples(client.grouping, client.group, taken["features"], taken["label"])

    def _users(self, client: VirtualClient) -> Iterator[tuple[bytes, Callable[[], ClientExamples]]]:
        """Yields the key and the reader of each user of a virtual client, in ascending order."""
        for user in np.sort(client.users)[:, None]:
            alone = VirtualClient(client.grouping, client.group, user)
            yield user.tobytes(), partial(self._load, alone)


SIZE = 16
"""Images of a micro-batch. Always full: the last one is padded with black images."""


class MicroBatches:
    """Computes features of images; no feature depends on the other images or on the position.

    A probe with random images compares bits for several neighbours and positions before the first
    private image is read. If they differ, features are computed one image at a time, and the log
    says so.

    Args:
      trunk: `keras.Model`, frozen, images to features.
    """

    def __init__(self, trunk: Model) -> None:
        from fedemb.models.keras_backend import preprocess

        self.dim = int(trunk.output_shape[-1])
        self._compute = traced(lambda images: trunk(preprocess(images), training=False))
        self.size = SIZE
        """Images computed together: `SIZE`, or 1 if the probe failed."""
        if not same_bits_anywhere(self._together, tuple(trunk.input_shape[1:])):
            _LOG.warning(events.ONE_BY_ONE)
            self.size = 1
        self._threads = ThreadPoolExecutor(available_cores(), thread_name_prefix="features")

    def __call__(
        self, images: UInt8[np.ndarray, "images size size channels"]
    ) -> Float32[np.ndarray, "images features"]:
        """Returns the features of images."""
        found = np.zeros((len(images), self.dim), np.float32)
        starts = range(0, len(images), self.size)
        batches = self._threads.map(self._together, (images[s : s + self.size] for s in starts))
        for start, batch in zip(starts, batches, strict=True):
            found[start : start + self.size] = batch
        return found

    def _together(self, images: np.ndarray) -> np.ndarray:
        """Returns the features of at most `size` images, computed as one full micro-batch."""
        full = np.zeros((self.size, *images.shape[1:]), np.uint8)
        full[: len(images)] = images
        found: np.ndarray = np.asarray(self._compute(full))
        return found[: len(images)]


def same_bits_anywhere(
    compute: Callable[[np.ndarray], np.ndarray], shape: Sequence[int], size: int = SIZE
) -> bool:
    """Returns whether the features of random images have the same bits in any position.

    Args:
      compute: uint8 `[at most size, *shape]` to features.
      shape: height, width and channels of an image.
      size: images of a micro-batch.
    """
    images = np.random.default_rng(0).integers(0, 256, (2 * size, *shape), np.uint8)
    first = np.concatenate([compute(images[:size]), compute(images[size:])])
    for order in _orders(size):
        again = np.concatenate([compute(images[order[at : at + size]]) for at in (0, size)])
        if (again != first[order]).any():
            return False
    return all((compute(images[at : at + 1])[0] == first[at]).all() for at in (0, size - 1))


def _orders(size: int) -> Iterator[np.ndarray]:
    """Orders of two micro-batches: each image has other neighbours and other positions."""
    random = np.random.default_rng(1)
    yield np.arange(2 * size)  # the same order again: bits do not depend on timing
    yield np.roll(np.arange(2 * size), 1)
    yield np.arange(2 * size)[::-1]
    yield random.permutation(2 * size)
