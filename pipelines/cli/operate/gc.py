"""`fedemb gc`: lists and deletes expired data of runs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import ConfigError, InputError
from fedemb.pipelines.cli.option_groups import grouped
from fedemb.pipelines.cli.options import JsonOption, SetOption
from fedemb.pipelines.output import say, say_json

if TYPE_CHECKING:
    from fedemb.config import RunConfig
    from fedemb.steps.delete_expired.retention import Expired, Retention


@dataclass(frozen=True, kw_only=True)
class Periods:
    """Days after the last ledger record of a run."""

    private_days: Annotated[
        int, typer.Option(help="Days until private data of evaluated runs expires.", min=1)
    ] = 30
    working_days: Annotated[
        int, typer.Option(help="Days until checkpoints and caches expire.", min=1)
    ] = 7
    open_days: Annotated[
        int | None,
        typer.Option(help="Days until data of runs that can be resumed expires. [never]", min=1),
    ] = None
    public_days: Annotated[
        int | None,
        typer.Option(help="Days until outputs of unreleased runs expire. [never]", min=1),
    ] = None
    released_public_days: Annotated[
        int | None,
        typer.Option(help="Days until outputs of released runs expire. [never]", min=1),
    ] = None

    def retention(self) -> Retention:
        """Returns the periods as a section."""
        from fedemb.steps.delete_expired.retention import Retention

        return Retention.model_validate(vars(self))


DeleteOption = Annotated[
    bool, typer.Option("--delete", help="Delete; without it, data is only listed.")
]


@grouped
def collect(
    *,
    runs: Annotated[Path, typer.Option(help="Folder of all runs on this machine.")] = Path("runs"),
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", help="Configuration whose stores are searched instead."),
    ] = None,
    set_: SetOption = None,
    periods: Periods,
    delete: DeleteOption = False,
    json_: JsonOption = False,
) -> None:
    """List expired data of runs; with --delete, delete it.

    The ledger, keys, and releases are never deleted.

    Example: fedemb gc --private-days 14 --public-days 90 --delete
    """
    from fedemb.steps.delete_expired.sweep import listing

    now = datetime.now(UTC).replace(microsecond=0)
    if config is None:
        found = _local(runs, periods.retention(), now, delete=delete, quiet=json_)
    else:
        from fedemb.pipelines.run.load_config import load_config

        loaded = load_config(config, set_ or [])
        found = _stores(loaded, periods.retention(), now, delete=delete)
    if json_:
        say_json(listing(found, now, deleted=delete))
        return
    for item in found:
        days = (now - item.run.last).days
        say(
            f"  {item.run.run_id:<24} {item.kind:<8} {_size(item.size):>9}  {item.folder}  "
            f"({item.run.state}, last record {days} days ago)"
        )
    size = _size(sum(item.size for item in found))
    total = f"{sum(len(item.names) for item in found)} objects, {size}"
    if not found:
        say("nothing has expired")
    elif delete:
        say(f"deleted {total}")
    else:
        say(f"expired: {total}. Nothing was deleted; pass --delete to delete")


def _local(
    runs: Path, retention: Retention, now: datetime, *, delete: bool, quiet: bool
) -> list[Expired]:
    from fedemb.pipelines.run.expired import Kept, delete_public, expired_runs
    from fedemb.steps.delete_expired import retention as data

    if not any(runs.glob("*/config.yaml")):
        raise InputError(f"No run in {runs}. Pass the folder of all runs with --runs.")
    found: list[Expired] = []
    for row in list(expired_runs(runs, retention, now)):
        if isinstance(row, Kept):
            say(f"kept {row.run_id}: {row.reason}", err=quiet)
            continue
        run, item = row
        found.append(item)
        if not delete:
            continue
        with run.alone():
            # Recorded first, because an interrupted deletion is final.
            run.record_deleted(item.kind, now.isoformat())
            if item.kind == "public":
                delete_public(run)
            else:
                data.delete(item)
    return found


def _stores(
    config: RunConfig, retention: Retention, now: datetime, *, delete: bool
) -> list[Expired]:
    from fedemb.pipelines.run.expired import check_stores_apart
    from fedemb.steps.delete_expired import retention as data
    from fedemb.steps.delete_expired.sweep import runs_of

    storage = config.storage
    if not storage.ledger or not (storage.private_root or storage.public_root):
        raise ConfigError(
            "storage.ledger and one of storage.private_root and storage.public_root must be set "
            "to search stores. Set them, or omit --config to search runs on this machine."
        )
    check_stores_apart(storage)
    known = runs_of(storage.ledger)
    found = list(
        data.find_expired(known, retention, now, storage.private_root, storage.public_root)
    )
    if delete:
        for item in found:
            data.delete(item)
    return found


def _size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
