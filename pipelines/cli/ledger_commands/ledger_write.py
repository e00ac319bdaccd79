"""`fedemb ledger void`, `waive` and `rotate-keys`: the acts of people on a ledger."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import InputError, Refused
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


@grouped
def waive(
    *,
    code: Annotated[str, typer.Argument(help="Code of the gate rule, as in the verdict.")],
    model: Annotated[
        Path,
        typer.Option("--model", help="Run directory of the model, or its model.json."),
    ],
    act: Act,
) -> None:
    """Sign a waiver of one gate rule for one model. For the policy owner.

    Example: fedemb ledger waive stopped_early --model runs/week-1 --ledger policy/ledger
    --keys policy/keys --reason "converged after half of the rounds"
    """
    from fedemb.documents.ledger_record import WaiverRecord
    from fedemb.gate.before_charge import WHEN
    from fedemb.gate.decide import WAIVABLE
    from fedemb.keys.signatures import Signer

    if code not in WHEN:
        raise InputError(
            f"The gate has no rule {code!r}. Pass a code of the verdict, one of "
            f"{', '.join(WAIVABLE)}."
        )
    if code not in WAIVABLE:
        raise Refused(
            f"Rule {code!r} protects arithmetic or integrity and cannot be waived. Pass one of "
            f"{', '.join(WAIVABLE)}."
        )
    opened, key_store = act.open()
    run_id, weights = _committed(model, opened)
    owner = Signer.current(key_store, "policy", opened.chain.trust)
    for record in opened.state.waivers:
        waiver = record.content(WaiverRecord)
        if (waiver.code, waiver.model_sha) == (code, weights):
            say(f"{code} is waived for this model already, by record {record.sequence}")
            return
    record = opened.waive(
        code=code, model_sha=weights, reason=reason_text(act.reason), signer=owner
    )
    say(f"{code} is waived for model {weights[:12]} of run {run_id} as record {record.sequence}")


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


def _committed(path: Path, ledger: Ledger) -> tuple[str, str]:
    """Run and weights of a model that this ledger has committed.

    Raises:
      InputError: the run has trained none.
      ArtifactError: its card cannot be read.
      Refused: the ledger has no such card in a commit, or the run's folder holds another run's.
    """
    from fedemb.documents.ledger_record import CommitRecord
    from fedemb.documents.model import ModelCard
    from fedemb.foundation.document import read
    from fedemb.pipelines.run.directory import RunDirectory

    run = RunDirectory.open(path) if path.is_dir() else None
    if run is not None:
        model = run.output("model")
        if model is None:
            raise InputError(f"run {run.run_id} has trained no model; there is nothing to waive")
        path = model / "model.json"
    card = read(path, ModelCard)
    named = card.body.run_id
    commits = [attempt.commit for attempt in ledger.state.attempts.values() if attempt.commit]
    cards = [commit.content(CommitRecord).round_log["card_sha"] for commit in commits]
    if card.sha not in cards:
        raise Refused(
            f"{path.name} says it is of run {named!r}, and the ledger of policy "
            f"{ledger.policy_id!r} has committed no such model; name the run whose model was "
            "refused by the gate"
        )
    if run is not None and named != run.run_id:
        raise Refused(
            f"{path.name} belongs to run {named!r} and is stored in run {run.run_id!r}. Pass "
            "the run whose model the gate denied."
        )
    return named, card.body.weights_sha
