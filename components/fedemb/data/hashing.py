"""Keyed hashes that place users: block, split and virtual client, fixed for a policy's life.

The key is the policy's partition key (`keys/`), so without it one cannot tell which users share a
virtual client, are held out, or fill a block; and a user is placed alike in every run.
Nothing depends on order, counts or other users: that is what makes removing a user change one
virtual client per grouping and nothing else (docs/privacy/sensitivity.md#rule-a).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedemb.data.identity import CURRENT, NameRule
from fedemb.keys import derive, open_key_store, partition_key

KEY_BYTES = 8
"""Bytes of a user key. Two users who collide are treated, and protected, as one."""
DIGEST_BYTES = 16
_WORD = 8
LEAST_CLASSES = 2
"""Held-out classes without which no pair of two classes can be told apart."""
_PURPOSES = (
    "user",
    "user_split",
    "class",
    "class_split",
    "bucket",
    "group",
    "image",
    "deletion_mark",
)


@dataclass(frozen=True)
class KeyRef:
    """Where the workers fetch the partition key: the key itself never enters the Beam graph."""

    keys_uri: str
    policy_id: str
    throwaway: bytes = b""
    """Used instead of the store if not empty: for previews that have no policy."""
    names: NameRule = CURRENT
    """The rule of the policy that tells users apart."""

    def hasher(self) -> Hasher:
        """Fetches the key.

        Raises:
          StorageError: the key store cannot be read.
        """
        if self.throwaway:
            return Hasher(self.throwaway, self.names)
        key = partition_key(open_key_store(self.keys_uri), self.policy_id)
        return Hasher(key, self.names)


class Hasher:
    """Keyed hashes, one subkey per purpose, of names by the rule of a policy."""

    def __init__(self, key: bytes, names: NameRule = CURRENT):
        self.names = names
        self._keys = {purpose: derive(key, purpose) for purpose in _PURPOSES}

    def _word(self, purpose: str, message: bytes) -> int:
        return int.from_bytes(hmac.digest(self._keys[purpose], message, "sha256")[:_WORD], "big")

    def user_key(self, user_id: str) -> bytes:
        """The 64-bit key of a canonical user id, big-endian, so that bytes sort as numbers do."""
        return hmac.digest(self._keys["user"], user_id.encode(), "sha256")[:KEY_BYTES]

    def holds_out_user(self, user_key: bytes, fraction: float) -> bool:
        """Whether the user belongs to evaluation, for ever."""
        return self._word("user_split", user_key) < fraction * 2.0**64

    def holds_out_class(self, label: str, fraction: float) -> bool:
        """Whether a class that users share belongs to evaluation, for ever."""
        return self._word("class_split", label.encode()) < fraction * 2.0**64

    def held_out_classes(self, labels: Collection[str], fraction: float) -> frozenset[str]:
        """Which of all shared classes belong to evaluation, for ever: that share, two at least."""
        ranked = sorted(labels, key=lambda label: self._word("class_split", label.encode()))
        return frozenset(ranked[: max(LEAST_CLASSES, round(fraction * len(ranked)))])

    def class_id(self, label: str, user_key: bytes) -> int:
        """Signed 64-bit number of a class; an empty `user_key` makes it a class of all users."""
        word = self._word("class", len(user_key).to_bytes(1, "big") + user_key + label.encode())
        return word - (1 << 63)

    def bucket(self, user_key: bytes, buckets: int) -> int:
        """Hash bucket of the user's ledger block."""
        return self._word("bucket", user_key) % buckets

    def deletion_mark(self, user_key: bytes) -> str:
        """Name of the mark of a user who asked to be forgotten, 64 hexadecimal digits."""
        return hmac.digest(self._keys["deletion_mark"], user_key, "sha256").hex()

    def image_digest(self, pixels: np.ndarray) -> bytes:
        """Keyed digest of pixels as the model sees them: identity and place in the order."""
        key = self._keys["image"]
        return hashlib.blake2b(pixels.data, digest_size=DIGEST_BYTES, key=key).digest()

    def groups(
        self, user_keys: Sequence[bytes], groupings: int, virtual_clients: int
    ) -> Iterator[np.ndarray]:
        """Yields the virtual client of users in one grouping after the other, uint32 [users].

        Word `r` of the user's hash stream decides grouping `r`, so more groupings leave the first
        ones as they are. The bias of `mod` is below virtual_clients / 2^64.
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
    """Range of the 64-bit hash space a key falls in; ranges ascend with the key.

    >>> [shard_of(bytes([first] + [0] * 7), 4) for first in (0, 63, 64, 255)]
    [0, 0, 1, 3]
    """
    return int.from_bytes(word[:_WORD], "big") * shards >> 64
