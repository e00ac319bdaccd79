"""Deletes the expired data of all runs of a ledger, or only lists it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime

from fedemb.errors import LedgerError
from fedemb.foundation.canonical_json import JsonFields
from fedemb.foundation.files import write_bytes
from fedemb.ledger import open_ledger, policies, read_trust
from fedemb.runtime.step_context import StepContext
from fedemb.steps.delete_expired.retention import (
    Expired,
    KnownRun,
    check_apart,
    delete,
    find_expired,
    known_runs,
    parse_retention,
)
from fedemb.storage import open_store

SCHEMA = "fedemb/deleted/1"


def runs_of(ledger_uri: str) -> list[KnownRun]:
    """Returns the runs of all policies of a ledger root.

    Raises:
      LedgerError: no ledger, or a broken one: then nothing may be deleted.
    """
    store = open_store(ledger_uri)
    names = policies(store)
    if not names:
        raise LedgerError(f"No ledger in {store.uri}. Pass the root of the ledgers.")
    trust = read_trust(store)
    ledgers = [open_ledger(ledger_uri, name, trust=trust) for name in names]
    return [run for ledger in ledgers for run in known_runs(ledger)]


def listing(found: Sequence[Expired], now: datetime, *, deleted: bool) -> JsonFields:
    """Returns a list of expired data as JSON."""
    return {
        "schema": SCHEMA,
        "time": now.isoformat(timespec="seconds"),
        "deleted": deleted,
        "objects": sum(len(item.names) for item in found),
        "bytes": sum(item.size for item in found),
        "found": [item.to_json() for item in found],
    }


def run(context: StepContext, now: datetime | None = None) -> dict[str, float]:
    """Lists expired data in the artifact `deleted`, and deletes it unless this is a dry run.

    Returns: Number of objects and bytes, as metrics.

    Raises:
      ConfigError: the stores overlap.
      LedgerError: the ledger is missing or broken.
      StorageError: a store does not answer; the next run deletes the rest.
    """
    now = now or datetime.now(UTC).replace(microsecond=0)
    private, public = context.private_root, context.public_root
    check_apart(filter(None, (private, public)), [context.ledger_uri])
    runs = runs_of(context.ledger_uri)
    retention = parse_retention(context.retention)
    found = list(find_expired(runs, retention, now, private, public))
    if not context.dry_run:
        for item in found:
            delete(item)
    body = listing(found, now, deleted=not context.dry_run)
    write_bytes(context.artifacts.deleted, json.dumps(body, indent=1).encode())
    objects, size = sum(len(item.names) for item in found), sum(item.size for item in found)
    return {"objects": float(objects), "bytes": float(size)}
