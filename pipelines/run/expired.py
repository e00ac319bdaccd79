"""Expired data of the runs of a folder on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fedemb.config.policy import StorageConfig
from fedemb.errors import FedEmbError, StorageError
from fedemb.ledger import open_ledger, read_trust
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.local import iter_runs
from fedemb.steps.delete_expired.retention import (
    Expired,
    KnownRun,
    Retention,
    check_apart,
    find_expired,
    known_runs,
)
from fedemb.storage import open_store

PUBLIC = ("public", "reports", "index.html")
"""Outputs of a run directory; the configuration, the state, the log and the ledger are kept."""


@dataclass(frozen=True)
class Kept:
    """A run whose data is kept at any age."""

    run_id: str
    reason: str


def expired_runs(
    runs: Path, retention: Retention, now: datetime
) -> Iterator[tuple[RunDirectory, Expired] | Kept]:
    """Yields expired data of every run of a folder, or why a run is not considered."""
    for run in iter_runs(runs):
        if run.is_running():
            yield Kept(run.run_id, "it is running")
            continue
        try:
            known = _known(run)
        except FedEmbError as error:
            yield Kept(run.run_id, f"its ledger cannot be read ({error})")
            continue
        if known is None:
            yield Kept(run.run_id, "its ledger has no reservation of it")
            continue
        stores = run.config().storage.model_copy(update=run.stores())
        check_stores_apart(stores.model_copy(update={"public_root": str(run.public)}))
        for item in find_expired([known], retention, now, stores.private_root, None):
            yield run, item
        if known.expired(retention, "public", now) and (found := _public(run, known)):
            yield run, found


def check_stores_apart(storage: StorageConfig) -> None:
    """Refuses stores where a deletion of expired data could reach what is kept.

    Raises:
      ConfigError: two stores overlap.
    """
    kept = (storage.ledger, storage.keys, storage.releases, storage.rollback_anchor)
    roots = (storage.private_root, storage.public_root)
    check_apart(filter(None, roots), filter(None, kept))


def delete_public(run: RunDirectory) -> None:
    """Deletes the public outputs of a run directory.

    Raises:
      StorageError: a file cannot be deleted.
    """
    try:
        for name in PUBLIC:
            path = run.root / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"{error.filename} cannot be deleted: {error.strerror}. Correct its permissions, then "
            "run the command again."
        ) from error


def _known(run: RunDirectory) -> KnownRun | None:
    uri, policy = run.stores()["ledger"], run.config().policy.policy_id
    ledger = open_ledger(uri, policy, trust=read_trust(open_store(uri)))
    return next((found for found in known_runs(ledger) if found.run_id == run.run_id), None)


def _public(run: RunDirectory, known: KnownRun) -> Expired | None:
    files = [
        path
        for name in PUBLIC
        for path in [run.root / name, *(run.root / name).rglob("*")]
        if path.is_file()
    ]
    names = tuple(path.relative_to(run.root).as_posix() for path in files)
    size = sum(path.stat().st_size for path in files)
    return Expired(known, "public", str(run.root), "public", names, size) if names else None
