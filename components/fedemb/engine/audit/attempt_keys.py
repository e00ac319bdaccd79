"""Keys from which noise and coins of an attempt are drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedemb.documents.audit import REPLAYED
from fedemb.keys import derive
from fedemb.privacy.randomness.noise import run_key


@dataclass(frozen=True)
class AttemptKeys:
    """Root key and identity of an attempt, while the root key exists."""

    root_key: bytes
    run_id: str
    attempt: int
    inputs_sha: str

    def key(self, purpose: str) -> bytes:
        """Returns the attempt's key of `noise` or `coins`."""
        return run_key(self.root_key, purpose, self.run_id, self.attempt, self.inputs_sha)

    @property
    def noise_key(self) -> bytes:
        """Key of the attempt's `KeyedNoise`."""
        return self.key("noise")

    def chosen_rounds(self, rounds: int) -> list[int]:
        """Returns the rounds to replay; they are unknown without the key."""
        words = derive(self.root_key, "replay", self.run_id, str(self.attempt))
        random = np.random.default_rng(list(words))
        return sorted(random.permutation(rounds)[:REPLAYED].tolist())
