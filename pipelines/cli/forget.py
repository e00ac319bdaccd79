"""`fedemb forget`: the data owner's answer to a user who wants to be deleted."""

from __future__ import annotations

import sys
from getpass import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fedemb.keys import KeyStore
    from fedemb.ledger import Ledger
    from fedemb.ledger.state import Attempt

MEANING = (
    "The guarantee holds for them as for everyone: what these models tell hardly depends on whether"
    " this user took part, by the factor each report states, and all runs of the policy together by"
    " epsilon {cap:g} at delta {delta:g} at most. A model trained from now on does not contain them"
    " at all. If they were among the users held out for evaluation, no model was trained with them,"
    " but the published utility figures were computed with them, without noise."
)
LEFT = (
    "still to be deleted by hand: their images at the source, and the private folders of earlier"
    " runs, which keep the users of their time"
)
SIMULATED = (
    "simulations that may have been trained with this user: {runs}. None is ever released, and no"
    " guarantee covers them: delete their run directories, and the models and reports they left in"
    " storage.public_root or the pipeline's artifacts"
)
BEGUN = (
    "warning: these runs had begun to train before, and a resumed run finishes with the people it"
    " began with, this user perhaps among them: {runs}. To keep them out, do not resume these; what"
    " they were charged stays charged"
)
ELSEWHERE = (
    "the same ledger has policies under which this user is not forgotten: {policies}; call this"
    " command for each of them too (--set policy.policy_id=NAME, with its --config), or they train"
    " there"
)


def forget(
    config: Annotated[
        str, typer.Option("--config", "-c", help="YAML file or preset of the recurring runs.")
    ],
    policy: Annotated[
        Path | None, typer.Option(help="Folder of a lasting policy, as in `fedemb run --policy`.")
    ] = None,
    lost: Annotated[
        bool,
        typer.Option(
            "--lost", help="The store lost deletion marks, and this user's was one: write it again."
        ),
    ] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a.b=c; may be given often.")
    ] = None,
) -> None:
    """Forget one user from the next partition on; the id is read from standard input.

    Also says which releases may have been trained with the user, without listing anyone.
    """
    from fedemb.data.hashing import Hasher
    from fedemb.data.records import canonical_user_id
    from fedemb.errors import ConfigError, InputError
    from fedemb.keys import open_key_store, partition_key
    from fedemb.keys.deletion_marks import mark_deleted
    from fedemb.ledger import check_high_water, open_ledger, policies, read_trust
    from fedemb.pipelines.run.load_config import load_config, policy_overrides
    from fedemb.storage import open_store

    settings = load_config(config, [*(set_ or []), *policy_overrides(policy)])
    storage, policy_id = settings.storage, settings.policy.policy_id
    if not (storage.keys and storage.ledger and storage.deletion_marks):
        raise ConfigError(
            "storage.keys, storage.ledger and storage.deletion_marks must be set; give --policy "
            "FOLDER"
        )
    user_id = canonical_user_id(_read_id())
    if user_id is None:
        raise InputError("standard input holds no user id; pipe it in, on one line")
    ledgers = open_store(storage.ledger)
    ledger = open_ledger(storage.ledger, policy_id, trust=read_trust(ledgers))
    _ = ledger.terms  # a wrong folder or policy would get a key of its own, and forget nobody
    keys = open_key_store(storage.keys)
    check_high_water(ledger, keys, storage.witness)  # an older one would not name every release
    hasher = Hasher(partition_key(keys, policy_id))
    user_key = hasher.user_key(user_id)
    mark = hasher.deletion_mark(user_key)
    fresh = mark_deleted(storage.deletion_marks, keys, policy_id, mark, lost=lost)
    typer.echo("forgotten from the next partition on" if fresh else "was forgotten before")
    others = [other for other in policies(ledgers) if other != policy_id]
    elsewhere = _not_forgotten(user_id, others, keys, storage.deletion_marks)
    if elsewhere:
        typer.echo(ELSEWHERE.format(policies=", ".join(elsewhere)))
    terms = ledger.terms
    bucket = hasher.bucket(user_key, terms.users.blocks_per_cohort)
    found, open_runs, simulations = _trained(ledger, bucket)
    begun = _begun(ledger, bucket)
    if begun:
        typer.echo(BEGUN.format(runs=", ".join(begun)))
    typer.echo(LEFT)
    if simulations:
        typer.echo(SIMULATED.format(runs=", ".join(simulations)))
    if open_runs:
        typer.echo(f"runs without a release that may hold this user: {', '.join(open_runs)}")
    if not found:
        typer.echo("no release was trained on the user's block")
        return
    typer.echo("releases that may have been trained with this user (their block took part):")
    for name, version, epsilon, delta in found:
        typer.echo(f"  {name} {version}: epsilon {epsilon:.3g} at delta {delta:g}")
    typer.echo(MEANING.format(cap=terms.epsilon_cap, delta=terms.delta))


def _read_id() -> str:
    """The id from standard input; typed at a terminal, it is not shown.

    Raises:
      InputError: more than one line, of which all but the first would be taken for forgotten.
    """
    from fedemb.errors import InputError

    if sys.stdin.isatty():
        return getpass("user id (not shown): ")
    first, *more = sys.stdin.read().rstrip().split("\n")
    if more:
        raise InputError(
            f"standard input holds {1 + len(more)} lines, and one user is forgotten at a time; "
            "nobody was: call this command once for each"
        )
    return first


def _not_forgotten(user_id: str, policies: list[str], keys: KeyStore, uri: str) -> list[str]:
    """Those policies under which the user is not forgotten: each has marks by a key of its own."""
    from fedemb.data.hashing import Hasher
    from fedemb.keys import partition_key
    from fedemb.keys.deletion_marks import read_deletion_marks

    found: list[str] = []
    for policy_id in policies:
        if keys.exists(f"policy/{policy_id}"):  # else there is no mark, and looking made the key
            hasher = Hasher(partition_key(keys, policy_id))
            mark = hasher.deletion_mark(hasher.user_key(user_id))
            if mark in read_deletion_marks(uri, policy_id):
                continue
        found.append(policy_id)
    return found


def _of_bucket(ledger: Ledger, bucket: int) -> list[Attempt]:
    """The attempts that a block of this bucket takes part in; one given back never trained."""
    return [
        attempt
        for attempt in ledger.state.attempts.values()
        if attempt.void is None
        and str(bucket) in {name.rpartition("/")[2] for name in attempt.reserve.body["blocks"]}
    ]


def _begun(ledger: Ledger, bucket: int) -> list[str]:
    """Runs whose training began and did not end."""
    return [
        attempt.reserve.run_id
        for attempt in _of_bucket(ledger, bucket)
        if attempt.status == "bound"
    ]


def _trained(ledger: Ledger, bucket: int) -> tuple[list[tuple[Any, ...]], list[str], list[str]]:
    """What a block of this bucket took part in, of any cohort: which is the user's, data tell only.

    Returns:
      Name, version, epsilon and delta of every release; the runs that may release yet; and the
      simulations.
    """
    from dp_accounting import NeighboringRelation

    from fedemb.privacy.accounting.accounting import price
    from fedemb.privacy.accounting.events import event_from_json

    found: list[tuple[Any, ...]] = []
    open_runs: list[str] = []
    simulations: list[str] = []
    for attempt in _of_bucket(ledger, bucket):
        reserve = attempt.reserve
        if reserve.body["purpose"] == "simulation":
            simulations.append(reserve.run_id)
            continue
        if not attempt.releases:
            open_runs.append(reserve.run_id)
            continue
        relation = NeighboringRelation[reserve.body["relation"]]
        guarantee = price(event_from_json(reserve.body["event"]), relation, reserve.body["delta"])
        found += [
            (record.body["name"], record.body["version"], guarantee.epsilon, guarantee.delta)
            for record in attempt.releases
        ]
    return found, open_runs, list(dict.fromkeys(simulations))
