"""Digest of the configuration sections that a reservation binds."""

from __future__ import annotations

from fedemb.config import FREE_SECTIONS, RunConfig
from fedemb.foundation.canonical_json import json_digest


def config_digest(config: RunConfig, *free: str) -> str:
    """Returns the SHA-256 of the configuration sections that a reservation binds (`config_sha`).

    Args:
      config: the configuration.
      *free: names of free sections to bind as well. A utility report binds `evaluation` and an
        audit report binds `audit`, so a report made with other settings has another digest.
    """
    left_out = {name for name in FREE_SECTIONS if name not in free}
    return json_digest(config.model_dump(mode="json", exclude=left_out))
