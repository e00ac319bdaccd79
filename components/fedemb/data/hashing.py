"""Keyed hashes that assign users to block, split and virtual client, fixed for a policy's life.

The key is the policy's partition key (`keys/`). Without the key it is unknown which users share a
virtual client, are held out, or are in a block. A user's assignment is the same in every run. It
does not depend on order, counts or other users, so removing a user changes only one virtual client
per grouping (docs/privacy/sensitivity.md#rule-a).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedemb.keys import derive, open_key_store, partition_key

KEY_BYTES = 8
"""Bytes of a user key. Two users who collide are treated, and protected, as one."""
DIGEST_BYTES = 16
_WORD = 8
LEAST_CLASSES = 2
"""Minimum number of held-out classes, because different-class pairs need two."""
_PURPOSES = (
    "user",
    "user_split",
    "class",
    "class_split",
    "bucket",
    "group",
    "image",
)


@dataclass(frozen=True)
class KeyRef:
    """Reference from which workers fetch the partition key; the Beam graph has no key."""

    keys_uri: str
    policy_id: str
    throwaway: bytes = b""
    """Key used instead of the store if not empty, for previews without a policy."""

    def hasher(self) -> Hasher:
        """Fetches the key.

        Raises:
          StorageError: the key store cannot be read.
        """
        if self.throwaway:
            return Hasher(self.throwaway)
        return Hasher(partition_key(open_key_store(self.keys_uri), self.policy_id))


class Hasher:
    """Keyed hashes of names, one subkey per purpose."""

    def __init__(self, key: bytes):
        self._keys = {purpose: derive(key, purpose) for purpose in _PURPOSES}

    def _word(self, purpose: str, message: bytes) -> int:
        return int.from_bytes(hmac.digest(self._keys[purpose], message, "sha256")[:_WORD], "big")

    def user_key(self, user_id: str) -> bytes:
        """Returns the 64-bit key of a canonical user ID, big-endian: bytes sort as numbers."""
        return hmac.digest(self._keys["user"], user_id.encode(), "sha256")[:KEY_BYTES]

    def holds_out_user(self, user_key: bytes, fraction: float) -> bool:
        """Returns whether the user is held out for evaluation, permanently."""
        return self._word("user_split", user_key) < fraction * 2.0**64

    def holds_out_class(self, label: str, fraction: float) -> bool:
        """Returns whether a shared class is held out for evaluation, permanently."""
        return self._word("class_split", label.encode()) < fraction * 2.0**64

    def held_out_classes(self, labels: Collection[str], fraction: float) -> frozenset[str]:
        """Returns the share of classes held out for evaluation, permanently; at least two."""
        ranked = sorted(labels, key=lambda label: self._word("class_split", label.encode()))
        return frozenset(ranked[: max(LEAST_CLASSES, round(fraction * len(ranked)))])

    def class_id(self, label: str, user_key: bytes) -> int:
        """Returns the signed 64-bit number of a class; empty `user_key`: a class of all users."""
        word = self._word("class", len(user_key).to_bytes(1, "big") + user_key + label.encode())
        return word - (1 << 63)

    def bucket(self, user_key: bytes, buckets: int) -> int:
        """Returns the hash bucket of the user's ledger block."""
        return self._word("bucket", user_key) % buckets

    def image_digest(self, pixels: np.ndarray) -> bytes:
        """Returns the keyed digest of model input pixels, which identifies and orders images."""
        key = self._keys["image"]
        return hashlib.blake2b(pixels.data, digest_size=DIGEST_BYTES, key=key).digest()

    def groups(
        self, user_keys: Sequence[bytes], groupings: int, virtual_clients: int
    ) -> Iterator[np.ndarray]:
        """Yields the virtual clients of users for each grouping in order, uint32 [users].

        Word `r` of the user's hash stream decides grouping `r`, so adding groupings does not change
        the first ones. The bias of `mod` is below virtual_clients / 2^64.
        """
        key = self._keys["group"]
        for first in range(0, groupings, 4):
            block = (first // 4).to_bytes(4, "big")
            stream = b"".join(
                [hmac.digest(key, user_key + block, "sha256") for user_key in user_keys]
            )
            words = np.frombuffer(stream, ">u8").reshape(len(user_keys), 4)
            for word in range(min(4, groupings - first)):
                yield (words[:, word] % np.uint64(virtual_clients)).astype(np.uint32)


def shard_of(word: bytes, shards: int) -> int:
    """Returns the range of the 64-bit hash space that contains a key; ranges ascend with the key.

    >>> [shard_of(bytes([first] + [0] * 7), 4) for first in (0, 63, 64, 255)]
    [0, 0, 1, 3]
    """
    return int.from_bytes(word[:_WORD], "big") * shards >> 64
