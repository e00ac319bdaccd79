"""`fedemb ledger void` and `rotate-keys`: the acts of people on a ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import InputError
from fedemb.pipelines.cli.option_groups import grouped
from fedemb.pipelines.output import say

if TYPE_CHECKING:
    from fedemb.keys import KeyStore
    from fedemb.ledger import Ledger

LedgerOption = Annotated[
    str, typer.Option("--ledger", help="Root of the ledgers: path, gs://, s3://.")
]
KeysOption = Annotated[str, typer.Option("--keys", help="Key store: a folder or gsm://project.")]
PolicyOption = Annotated[
    str | None, typer.Option("--policy", help="Policy; default: the only policy of the ledger.")
]
RollbackAnchorOption = Annotated[
    str | None,
    typer.Option(
        "--rollback-anchor",
        help="Store of the rollback anchor, as in storage.rollback_anchor.",
    ),
]
ReasonOption = Annotated[
    str, typer.Option("--reason", help="Reason; stays in the ledger permanently.")
]


@dataclass(frozen=True, kw_only=True)
class Act:
    """Options of an act on a policy that is recorded with a reason."""

    ledger: LedgerOption
    keys: KeysOption
    reason: ReasonOption
    policy: PolicyOption = None
    rollback_anchor: RollbackAnchorOption = None

    def open(self) -> tuple[Ledger, KeyStore]:
        """Returns the ledger and its key store, see `open_for_people`."""
        return open_for_people(self.ledger, self.keys, self.policy, self.rollback_anchor)


@grouped
def void(
    *, run_id: Annotated[str, typer.Argument(help="Run whose reservation is returned.")], act: Act
) -> None:
    """Return the reservation of a run that will not train; refused once training was bound.

    Example: fedemb ledger void week-2 --ledger policy/ledger --keys policy/keys --reason
    "wrong data"
    """
    from fedemb.ledger.reservation import Reservation

    opened, key_store = act.open()
    opened.unlock(key_store)
    found = opened.state.attempts.get((run_id, opened.state.last_attempt(run_id)))
    if found is None:
        raise InputError(
            f"The ledger of policy {opened.policy_id!r} has no run {run_id!r}. Run `fedemb "
            "ledger show` to list the runs."
        )
    record = opened.void(Reservation.of(found.reserve.document), reason_text(act.reason), key_store)
    say(
        f"run {run_id} attempt {record.attempt} is given back as record {record.sequence}: it "
        "charges nothing"
    )


def rotate(
    ledger: LedgerOption,
    keys: KeysOption,
    reason: ReasonOption,
    role: Annotated[
        list[str] | None, typer.Option("--role", help="Role of the key; repeatable; default: all.")
    ] = None,
    rollback_anchor: Annotated[
        list[str] | None,
        typer.Option(
            "--rollback-anchor",
            help="Store of a policy's rollback anchor; repeatable.",
        ),
    ] = None,
) -> None:
    """Replace the signing keys in all policies of a ledger. For the policy owner.

    Earlier signatures of a retired key stay trusted; later ones are not.

    Example: fedemb ledger rotate-keys --ledger policy/ledger --keys policy/keys --reason
    "yearly rotation"
    """
    from fedemb.documents.ledger_record import KeysRecord
    from fedemb.keys import open_key_store
    from fedemb.keys.trust import ROLES
    from fedemb.ledger import rotate_keys

    unknown = sorted(set(role or ()) - set(ROLES))
    if unknown:
        raise InputError(f"--role {unknown[0]!r} is unknown. Pass one of {', '.join(ROLES)}.")
    written = rotate_keys(
        ledger,
        open_key_store(keys),
        reason_text(reason),
        role or ROLES,
        rollback_anchors=rollback_anchor or (),
    )
    for record in written:
        names = ", ".join(str(key["role"]) for key in record.content(KeysRecord).keys)
        say(
            f"policy {record.policy_id}: record {record.sequence} names new signing keys of {names}"
        )
    say("pinned copies of trust.json stay valid: the ledger leads from them to the new keys")
    say("a step that was running meanwhile ends with exit code 4; resume its run")


def open_for_people(
    ledger: str, keys: str, policy: str | None, rollback_anchor: str | None
) -> tuple[Ledger, KeyStore]:
    """The ledger with all signatures verified, not older than its marks wherever they are made.

    Raises:
      Refused: the policy has a rollback anchor, and it was not named.
    """
    from fedemb.keys import open_key_store
    from fedemb.ledger import check_high_water, find_rollback_anchor
    from fedemb.pipelines.cli.ledger_commands.ledger_summary import load

    opened, key_store = load(ledger, policy, None, signatures=True), open_key_store(keys)
    check_high_water(
        opened,
        key_store,
        find_rollback_anchor(opened, [rollback_anchor] if rollback_anchor else []),
    )
    return opened, key_store


def reason_text(reason: str) -> str:
    """A reason that says something, for a record that stays."""
    if not reason.strip():
        raise InputError("--reason is empty. Pass a reason without user ids.")
    return reason.strip()
