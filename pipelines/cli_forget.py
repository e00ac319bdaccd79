"""`fedemb forget`: the data owner's answer to a user who wants to be deleted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

MEANING = (
    "The guarantee holds for them as for everyone: what these models tell hardly depends on whether"
    " this user took part, by the factor each report states. A model trained from now on does not"
    " contain them at all."
)


def forget(
    config: Annotated[
        str, typer.Option("--config", "-c", help="YAML file or preset of the recurring runs.")
    ],
    policy: Annotated[
        Path | None, typer.Option(help="Folder of a lasting policy, as of `fedemb run --policy`.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a.b=c; may be given often.")
    ] = None,
) -> None:
    """Forget one user from the next partition on; the id is read from standard input.

    Also says which releases may have been trained with the user, without listing anyone.
    """
    from components.fedemb.errors import ConfigError, InputError
    from components.fedemb.privacy.keys import open_key_store, partition_key
    from components.fedemb.privacy.ledger import open_ledger, read_trust
    from components.fedemb.records import canonical_user_id
    from components.fedemb.storage import open_store
    from components.partition_users.hashing import Hasher
    from components.partition_users.tombstones import bury
    from pipelines.load_config import load_config, policy_overrides

    settings = load_config(config, [*(set_ or []), *policy_overrides(policy)])
    storage, policy_id = settings.storage, settings.policy.policy_id
    if not (storage.keys and storage.ledger and storage.tombstones):
        raise ConfigError(
            "storage.keys, storage.ledger and storage.tombstones must be set; give --policy FOLDER"
        )
    user_id = canonical_user_id(sys.stdin.readline().rstrip("\n"))
    if user_id is None:
        raise InputError("standard input holds no user id; pipe it in, on one line")
    ledger = open_ledger(storage.ledger, policy_id, trust=read_trust(open_store(storage.ledger)))
    _ = ledger.terms  # a wrong folder or policy would get a key of its own, and forget nobody
    hasher = Hasher(partition_key(open_key_store(storage.keys), policy_id))
    user_key = hasher.user_key(user_id)
    fresh = bury(storage.tombstones, hasher, user_key)
    typer.echo("forgotten from the next partition on" if fresh else "was forgotten before")
    partition = settings.partition
    bucket = hasher.bucket(user_key, partition.blocks_per_cohort)
    blocks = {f"{cohort}/{bucket}" for cohort in partition.cohorts}
    found = _releases(ledger, blocks)
    if not found:
        typer.echo("no release was trained on the user's block")
        return
    typer.echo("releases that may have been trained with this user (their block took part):")
    for name, version, epsilon, delta in found:
        typer.echo(f"  {name} {version}: epsilon {epsilon:.3g} at delta {delta:g}")
    typer.echo(MEANING)


def _releases(ledger: Any, blocks: set[str]) -> list[tuple[Any, ...]]:
    """Name, version, epsilon and delta of every release whose blocks meet the given ones."""
    from dp_accounting import NeighboringRelation

    from components.fedemb.privacy.accounting import price
    from components.fedemb.privacy.events import event_from_json

    found: list[tuple[Any, ...]] = []
    for attempt in ledger.state.attempts.values():
        reserve = attempt.reserve
        if attempt.releases and blocks & set(reserve.body["blocks"]):
            relation = NeighboringRelation[reserve.body["relation"]]
            event = event_from_json(reserve.body["event"])
            guarantee = price(event, relation, reserve.body["delta"])
            found += [
                (record.body["name"], record.body["version"], guarantee.epsilon, guarantee.delta)
                for record in attempt.releases
            ]
    return found
