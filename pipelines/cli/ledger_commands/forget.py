"""`fedemb forget`: deletes users from all later runs, for the data owner."""

from __future__ import annotations

import sys
from getpass import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedemb.errors import ConfigError, InputError
from fedemb.foundation.files import read_regular
from fedemb.pipelines.cli.options import SetOption
from fedemb.pipelines.output import say

if TYPE_CHECKING:
    from fedemb.keys import KeyStore
    from fedemb.ledger import Ledger
    from fedemb.ledger.state import Attempt

_MOST_IDS = 256 << 20
"""Bytes of a file of ids."""
MEANING = (
    "The guarantee holds for them as for everyone: what these models tell hardly depends on whether"
    " any one of them took part, by the factor each report states, and all runs of the policy"
    " together by epsilon {cap:g} at delta {delta:g} at most. A model trained from now on does not"
    " contain them at all. If they were among the users held out for evaluation, no model was"
    " trained with them, but the published utility figures were computed with them, without noise."
)
LEFT = (
    "still to be deleted by hand: their images at the source, and the private folders of earlier"
    " runs, which keep the users of their time"
)
SIMULATED = (
    "simulations that may have trained on {who}: {runs}. No guarantee covers them. Delete their run"
    " directories, and their models and reports in storage.public_root or the pipeline's artifacts"
)
BEGUN = (
    "warning: these runs started training before and may include {who}: {runs}. A resumed run keeps"
    " its original users. Do not resume these runs to keep them out; their budget stays charged"
)
ELSEWHERE = (
    "the same ledger has policies under which {who} not deleted: {policies}. Run this command for"
    " each of them too, with its --config and --set policy.policy_id=NAME"
)


_NO_STORES = (
    "storage.keys, storage.ledger and storage.deletion_marks must be set; give --policy FOLDER"
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
        typer.Option("--lost", help="Write the lost deletion markers of these users again."),
    ] = False,
    ids: Annotated[
        Path | None,
        typer.Option(help="File of user ids, one a line; default: one id from standard input."),
    ] = None,
    set_: SetOption = None,
) -> None:
    """Delete users from all later runs.

    Prints the releases that may have been trained with these users, and lists no user.

    Example: fedemb forget --config mine.yaml --policy policy --ids deleted.txt
    """
    from fedemb.data.hashing import Hasher
    from fedemb.keys import open_key_store, partition_key
    from fedemb.keys.deletion_marks import mark_deleted
    from fedemb.ledger import check_high_water, ensure_policy_key, open_ledger, policies, read_trust
    from fedemb.pipelines.run.load_config import load_config, policy_overrides
    from fedemb.storage import open_store

    settings = load_config(config, [*(set_ or []), *policy_overrides(policy)])
    storage, policy_id = settings.storage, settings.policy.policy_id
    if not (storage.keys and storage.ledger and storage.deletion_marks):
        raise ConfigError(_NO_STORES)
    texts = _read_ids(ids) if ids else [_read_id()]
    ledgers = open_store(storage.ledger)
    ledger = open_ledger(storage.ledger, policy_id, trust=read_trust(ledgers))
    # Without terms the folder or policy is wrong: a new key would be made and no user deleted.
    user_ids = _canonical(texts)
    keys = open_key_store(storage.keys)
    # An older ledger would not name every release.
    check_high_water(ledger, keys, storage.rollback_anchor)
    ensure_policy_key(ledger, keys)
    hasher = Hasher(partition_key(keys, policy_id))
    user_keys = list(map(hasher.user_key, user_ids))
    marks = map(hasher.deletion_mark, user_keys)
    fresh = [mark_deleted(storage.deletion_marks, keys, policy_id, m, lost=lost) for m in marks]
    _say_deleted(fresh, one=ids is None)
    who = "this user" if len(user_ids) == 1 else "these users"
    others = [other for other in policies(ledgers) if other != policy_id]
    if elsewhere := _not_deleted(user_ids, others, keys, storage.deletion_marks):
        be = f"{who} is" if len(user_ids) == 1 else f"{who} are"
        say(ELSEWHERE.format(who=be, policies=", ".join(elsewhere)))
    blocks = ledger.terms.users.blocks_per_cohort
    _say_consequences(ledger, {hasher.bucket(user_key, blocks) for user_key in user_keys}, who)


def _say_consequences(ledger: Ledger, buckets: set[int], who: str) -> None:
    """Prints the runs and releases that the users of these buckets may have trained."""
    found, open_runs, simulations = _trained(ledger, buckets)
    started = _begun(ledger, buckets)
    if started:
        say(BEGUN.format(who=who, runs=", ".join(started)))
    say(LEFT)
    if simulations:
        say(SIMULATED.format(who=who, runs=", ".join(simulations)))
    if open_runs:
        say(f"runs without a release that may hold {who}: {', '.join(open_runs)}")
    if not found:
        say("no release was trained on the user's block")
        return
    say(f"releases that may have been trained with {who} (their block took part):")
    for name, version, epsilon, delta in found:
        say(f"  {name} {version}: epsilon {epsilon:.3g} at delta {delta:g}")
    say(MEANING.format(cap=ledger.terms.epsilon_cap, delta=ledger.terms.delta))


def _read_id() -> str:
    """The id from standard input; typed at a terminal, it is not shown.

    Raises:
      InputError: more than one line; the user would believe that all of them were deleted.
    """
    if sys.stdin.isatty():
        return getpass("user id (not shown): ")
    first, *more = sys.stdin.read().rstrip().split("\n")
    if more:
        raise InputError(
            f"standard input holds {1 + len(more)} lines, expected one id; nothing was changed: "
            "put several ids into a file, one a line, and name it with --ids"
        )
    return first


def _read_ids(path: Path) -> list[str]:
    """The lines of a file that are not empty.

    Raises:
      InputError: it cannot be read, or holds none.
    """
    try:
        text = read_regular(path, _MOST_IDS).decode()
        found = [line for line in text.split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as text; name a file of ids") from error
    if not found:
        raise InputError(f"{path} holds no user id; write one on each line")
    return found


def _canonical(texts: list[str]) -> list[str]:
    """The ids as partitions of a policy know them, each once.

    Raises:
      InputError: an id is invalid; nothing was changed.
    """
    from fedemb.data.identity import name_text

    found: dict[str, None] = {}
    for number, text in enumerate(texts, start=1):
        user_id = name_text(text)
        if user_id is None:
            where = "standard input" if len(texts) == 1 else f"id {number}"
            raise InputError(
                f"{where} is not a user id; nothing was changed: correct it and try again"
            )
        found[user_id] = None
    return list(found)


def _not_deleted(user_ids: list[str], policies: list[str], keys: KeyStore, uri: str) -> list[str]:
    """Returns the policies under which a user is not deleted: each has markers by its own key."""
    from fedemb.data.hashing import Hasher
    from fedemb.keys import partition_key, policy_key_name
    from fedemb.keys.deletion_marks import read_deletion_marks

    found: list[str] = []
    for policy_id in policies:
        if keys.exists(policy_key_name(policy_id)):  # else no marker exists
            hasher = Hasher(partition_key(keys, policy_id))
            marks = {hasher.deletion_mark(hasher.user_key(user_id)) for user_id in user_ids}
            if marks <= set(read_deletion_marks(uri, policy_id)):
                continue
        found.append(policy_id)
    return found


def _of_buckets(ledger: Ledger, buckets: set[int]) -> list[Attempt]:
    """The attempts that a block of these buckets takes part in; one given back never trained."""
    names = {str(bucket) for bucket in buckets}
    return [
        attempt
        for attempt in ledger.state.attempts.values()
        if attempt.void is None
        and names & {name.rpartition("/")[2] for name in attempt.reserved.blocks}
    ]


def _begun(ledger: Ledger, buckets: set[int]) -> list[str]:
    """Returns the runs whose training started and did not end."""
    return [
        attempt.reserve.run_id
        for attempt in _of_buckets(ledger, buckets)
        if attempt.status == "bound"
    ]


def _trained(
    ledger: Ledger, buckets: set[int]
) -> tuple[list[tuple[Any, ...]], list[str], list[str]]:
    """Returns the runs of blocks with these buckets, in any cohort; only the data has the cohort.

    Returns:
      Name, version, epsilon and delta of every release; the runs that may release yet; and the
      simulations.
    """
    from dp_accounting.privacy_accountant import NeighboringRelation

    from fedemb.documents.ledger_record import ReleaseRecord
    from fedemb.privacy.accounting.accounting import price
    from fedemb.privacy.accounting.events import event_from_json

    found: list[tuple[Any, ...]] = []
    open_runs: list[str] = []
    simulations: list[str] = []
    for attempt in _of_buckets(ledger, buckets):
        reserve, reserved = attempt.reserve, attempt.reserved
        if reserved.purpose == "simulation":
            simulations.append(reserve.run_id)
            continue
        if not attempt.releases:
            open_runs.append(reserve.run_id)
            continue
        relation = NeighboringRelation[reserved.relation]
        guarantee = price(event_from_json(reserved.event), relation, reserved.delta)
        found += [
            (release.name, release.version, guarantee.epsilon, guarantee.delta)
            for release in (item.content(ReleaseRecord) for item in attempt.releases)
        ]
    return found, open_runs, list(dict.fromkeys(simulations))


def _say_deleted(fresh: list[bool], *, one: bool) -> None:
    """Prints how many users are deleted now and how many were deleted before."""
    later, before = "deleted from the next partition on", "deleted before"
    counts = f"{sum(fresh)} {later}; {len(fresh) - sum(fresh)} were {before}"
    single = later if fresh[0] else f"was {before}"
    say(
        single if one else counts,
        "The spelling of the id was not compared with the data; check it.",
    )
