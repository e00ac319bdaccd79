"""Checks the stores of a run before anything is written."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

from fedemb.config import RunConfig
from fedemb.errors import ConfigError, LedgerError
from fedemb.ledger.root import TRUST_NAME
from fedemb.storage import open_store


def check_stores(config: RunConfig, config_name: str, runs: Path) -> None:
    """Refuses stores that would mix what must stay apart, or a bucket without a ledger.

    `config_name` is shown in the command of the message. Raw artifacts are below `runs` unless the
    configuration moves them.

    Raises:
      ConfigError: keys beside the ledger, Raw beside public artifacts, or a lasting ledger without
        lasting keys.
      LedgerError: the remote ledger was never made.
      StorageError: the store of the ledger cannot be reached.
    """
    storage = config.storage
    if storage.ledger is not None and storage.keys is None:
        raise ConfigError(
            f"the ledger {storage.ledger} lasts, so its keys must last too, and elsewhere; set "
            "storage.keys to a folder or Secret Manager, the same for every run"
        )
    places = {
        f"storage.{name}": place
        for name in ("public_root", "private_root", "ledger", "keys", "releases")
        if (place := getattr(storage, name)) is not None
    }
    pairs = [
        (first, second)
        for first, second in combinations(places, 2)
        if {first, second} & {"storage.private_root", "storage.keys"}
    ]
    if storage.private_root is None and storage.public_root is not None:
        places["--runs"] = str(runs)
        pairs.append(("storage.public_root", "--runs"))
    for first, second in pairs:
        if _nested(places[first], places[second]):
            raise ConfigError(
                f"{first}={places[first]} and {second}={places[second]} lie one inside the "
                "other; private and public data, and keys and what they protect, must be apart: "
                "name another place"
            )
    if storage.ledger is not None:
        store = open_store(storage.ledger)
        if store.local_root is None and not store.exists(TRUST_NAME):
            raise LedgerError(
                f"No ledger in {store.uri}. Check the address. For a new ledger run `fedemb "
                f"ledger init --config {config_name} --ledger {store.uri} --keys "
                f"{storage.keys}` with the --set options of this run, then run again."
            )


def _nested(first: str, second: str) -> bool:
    one, other = (
        f"{(place if '://' in place else Path(place).expanduser().resolve().as_uri())}".rstrip("/")
        for place in (first, second)
    )
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")
