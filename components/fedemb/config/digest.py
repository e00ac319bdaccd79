"""Digest of what a reservation binds of a configuration."""

from __future__ import annotations

from fedemb.config import FREE_SECTIONS, RunConfig
from fedemb.foundation.canonical_json import json_digest


def config_digest(config: RunConfig, *free: str) -> str:
    """SHA-256 of what a reservation binds of a configuration: the `config_sha` of documents.

    Args:
      config: the configuration; what an older version wrote is read by `RunConfig.as_written`.
      *free: names of free sections to bind as well. A utility report binds `evaluation` and an
        audit report `audit`, so that neither passes for one that was made otherwise.
    """
    left_out = {name for name in FREE_SECTIONS if name not in free}
    return json_digest(config.model_dump(mode="json", exclude=left_out))
