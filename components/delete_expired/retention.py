"""Finds and deletes expired data of runs: private data, working state and old public outputs.

The ledger decides which runs exist, how they ended and when. Data of runs that the ledger does not
hold is kept. Objects are found by the id of a run and a fixed list of folders, so the ledger, keys,
and releases are never listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from fedemb.config.policy import PRIVATE_FOLDERS
from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import JsonFields
from fedemb.foundation.section import Section
from fedemb.ledger import Ledger
from fedemb.storage import Store, open_store

Days = Annotated[int, Field(ge=1)]
Kind = Literal["private", "working", "public"]
State = Literal["released", "measured", "void", "open"]

WORKING = ("train",)
"""Folders of the private root with working state: checkpoints, round records, cached features."""
PRIVATE = tuple(sorted(PRIVATE_FOLDERS - set(WORKING)))
"""Folders of the private root with private data, or with figures computed from it."""
PIPELINES = ("dp-fedemb", "dp-sgd")
"""Folders of a pipeline root above the folders of runs."""


class Retention(Section):
    """Days after the last ledger record of a run until its data expires; null: never.

    A run is open until its model was committed and evaluated. Open runs can be resumed.
    """

    private_days: Days | None = 30
    """Private data of runs that are not open."""
    working_days: Days | None = 7
    """Checkpoints and caches of runs that are not open."""
    open_days: Days | None = None
    """Private data and working state of open runs, which can then not be resumed."""
    public_days: Days | None = None
    """Public outputs of runs that are neither open nor released."""
    released_public_days: Days | None = None
    """Public outputs of released runs. The release itself is kept."""

    def days(self, state: State, kind: Kind) -> int | None:
        """Returns the days until data of a run expires; None: never."""
        if kind == "public":
            if state == "open":
                return None
            return self.released_public_days if state == "released" else self.public_days
        if state == "open":
            return self.open_days
        return self.private_days if kind == "private" else self.working_days


def parse_retention(text: str) -> Retention:
    """Returns the periods of a JSON object; missing fields have their defaults.

    Raises:
      ConfigError: not a valid object.
    """
    try:
        return Retention.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise ConfigError(
            f"retention is not valid: {where}{': ' * bool(where)}{problem['msg']}. Pass a JSON "
            'object such as {"private_days": 30}.'
        ) from error


@dataclass(frozen=True)
class KnownRun:
    """A run in the ledger."""

    run_id: str
    state: State
    last: datetime
    """Time of its newest ledger record."""

    def expired(self, retention: Retention, kind: Kind, now: datetime) -> bool:
        """Returns whether data of the run has expired."""
        days = retention.days(self.state, kind)
        return days is not None and now - self.last >= timedelta(days=days)


@dataclass(frozen=True)
class Expired:
    """Expired data of one run in one folder."""

    run: KnownRun
    kind: Kind
    uri: str
    """Store of the objects."""
    folder: str
    """Folder in the store."""
    names: tuple[str, ...]
    """Names of the objects, the index of a tree first."""
    size: int
    """Size of all objects in bytes."""

    def to_json(self) -> JsonFields:
        """Returns the fields as JSON, with the number of objects instead of their names."""
        return {
            "run_id": self.run.run_id,
            "state": self.run.state,
            "last_record": self.run.last.isoformat(timespec="seconds"),
            "kind": self.kind,
            "folder": self.folder,
            "objects": len(self.names),
            "bytes": self.size,
        }


def known_runs(ledger: Ledger) -> list[KnownRun]:
    """Returns the runs of a ledger, in order of their ids."""
    last: dict[str, str] = {}
    for record in ledger.chain.records:
        if record.run_id:
            last[record.run_id] = max(record.time, last.get(record.run_id, ""))
    evaluated = {record.run_id for record in ledger.state.evaluations}
    found: list[KnownRun] = []
    for run_id, time in sorted(last.items()):
        attempts = [item for (name, _), item in ledger.state.attempts.items() if name == run_id]
        states = {item.status for item in attempts}
        if "released" in states:
            state: State = "released"
        elif states & {"reserved", "bound"} or (states != {"void"} and run_id not in evaluated):
            state = "open"
        else:
            state = "void" if states == {"void"} else "measured"
        moment = datetime.fromisoformat(time)
        found.append(KnownRun(run_id, state, moment.astimezone(UTC)))
    return found


def check_apart(roots: Iterable[str], kept: Iterable[str]) -> None:
    """Checks that no root whose objects expire is inside a store that is kept, or contains one.

    Args:
      roots: addresses of the private and the public root.
      kept: addresses of ledger, keys, releases and rollback anchor.

    Raises:
      ConfigError: two addresses overlap.
    """
    first, second = [_normal(uri) for uri in roots], [_normal(uri) for uri in kept]
    pairs = [(one, other) for one in first for other in second] + list(combinations(first, 2))
    for one, other in pairs:
        if one.startswith(other) or other.startswith(one):
            raise ConfigError(
                f"{one} and {other} overlap, so a deletion could reach the ledger, keys, releases "
                "or data of another kind. Use separate addresses for all stores."
            )


def _normal(uri: str) -> str:
    place = uri if "://" in uri else Path(uri).expanduser().resolve().as_uri()
    return place.rstrip("/") + "/"


def find_expired(
    runs: Sequence[KnownRun],
    retention: Retention,
    now: datetime,
    private_root: str | None,
    public_root: str | None,
) -> Iterator[Expired]:
    """Yields the expired data of runs below those of the two roots that are set.

    Raises:
      StorageError: a store cannot be listed.
    """
    private = open_store(private_root) if private_root else None
    public = open_store(public_root) if public_root else None
    for run in runs:
        kinds: tuple[tuple[Kind, tuple[str, ...]], ...] = (
            ("private", PRIVATE),
            ("working", WORKING),
        )
        for kind, folders in kinds:
            if private is not None and run.expired(retention, kind, now):
                for folder in folders:
                    yield from _in_folder(private, run, kind, f"{run.run_id}/{folder}")
        if public is not None and run.expired(retention, "public", now):
            for above in ("", *(f"{name}/" for name in PIPELINES)):
                yield from _in_folder(public, run, "public", f"{above}{run.run_id}")


def _in_folder(store: Store, run: KnownRun, kind: Kind, folder: str) -> Iterator[Expired]:
    index = [entry for entry in store.entries(f"{folder}.tree") if entry.name == f"{folder}.tree"]
    found = [*index, *store.entries(f"{folder}/")]
    if found:
        names = tuple(entry.name for entry in found)
        yield Expired(run, kind, store.uri, folder, names, sum(entry.size for entry in found))


def delete(item: Expired) -> None:
    """Deletes expired objects. A repetition after an interruption deletes the rest.

    Raises:
      StorageError: an object cannot be deleted.
    """
    store = open_store(item.uri)
    for name in item.names:
        store.delete(name)
    if store.local_root is not None:
        _remove_empty(store.local_root / item.folder)


def _remove_empty(folder: Path) -> None:
    """Removes a folder tree that has no files left."""
    with suppress(OSError):  # a file of another program, or a link: kept
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir()
        folder.rmdir()
