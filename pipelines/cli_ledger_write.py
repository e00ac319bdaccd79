"""`fedemb ledger void` and `fedemb ledger waive`: the two acts of people on a ledger."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.fedemb.errors import InputError, LedgerError, Refused

if TYPE_CHECKING:
    from components.fedemb.privacy.keys import KeyStore
    from components.fedemb.privacy.ledger import Ledger

LedgerOption = Annotated[
    str, typer.Option("--ledger", help="Root of the ledgers: path, gs://, s3://.")
]
KeysOption = Annotated[str, typer.Option("--keys", help="Key store: a folder or gsm://project.")]
PolicyOption = Annotated[
    str | None, typer.Option("--policy", help="Policy; default: the only one there.")
]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; stays in the ledger for ever.")]


def void(
    run_id: Annotated[str, typer.Argument(help="Run whose reservation is given back.")],
    ledger: LedgerOption,
    keys: KeysOption,
    reason: ReasonOption,
    policy: PolicyOption = None,
) -> None:
    """Give back the reservation of a run that will not train; refused once training was bound."""
    from components.fedemb.privacy.reservation import Reservation

    opened, _ = _open(ledger, keys, policy, role="ledger")
    found = opened.state.attempts.get((run_id, opened.state.last_attempt(run_id)))
    if found is None:
        raise InputError(
            f"the ledger of policy {opened.policy_id!r} has no run {run_id!r}; `fedemb ledger show`"
            " lists them"
        )
    record = opened.void(Reservation.of(found.reserve), _text(reason))
    typer.echo(
        f"run {run_id} attempt {record.attempt} is given back as record {record.sequence}: it "
        "charges nothing"
    )


def waive(
    code: Annotated[str, typer.Argument(help="Rule of the gate, as the verdict names it.")],
    model: Annotated[
        Path, typer.Option("--model", help="model.json of the one model this is for.")
    ],
    ledger: LedgerOption,
    keys: KeysOption,
    reason: ReasonOption,
    policy: PolicyOption = None,
) -> None:
    """Sign a waiver of one waivable gate rule for one model. Done by the policy owner."""
    from components.fedemb.gate.decide import WAIVABLE
    from components.fedemb.privacy.signatures import Signer

    if code not in WAIVABLE:
        raise Refused(
            f"rule {code!r} cannot be waived, as it is arithmetic or integrity; only "
            f"{' and '.join(WAIVABLE)} can"
        )
    weights = _weights_sha(model)
    opened, key_store = _open(ledger, keys, policy, role="policy")
    owner = Signer.load_or_create(key_store, "policy")
    for record in opened.state.waivers:
        if (record.body["code"], record.body["model_sha"]) == (code, weights):
            typer.echo(f"{code} is waived for this model already, by record {record.sequence}")
            return
    record = opened.waive(code=code, model_sha=weights, reason=_text(reason), signer=owner)
    typer.echo(f"{code} is waived for model {weights[:12]} as record {record.sequence}")


def _open(ledger: str, keys: str, policy: str | None, *, role: str) -> tuple[Ledger, KeyStore]:
    """The verified ledger, to be written with a key that exists and is believed in its role."""
    from components.fedemb.privacy.keys import open_key_store
    from components.fedemb.privacy.ledger import open_ledger
    from components.fedemb.privacy.signatures import Signer
    from pipelines.ledger_summary import load

    found = load(ledger, policy, None, signatures=True)
    key_store = open_key_store(keys)
    if not key_store.exists(f"signing/{role}"):
        raise LedgerError(f"{keys} holds no key signing/{role}; name the key store of this ledger")
    signer = Signer.load_or_create(key_store, role)
    if signer.trusted() not in found.chain.trust.keys:
        raise Refused(
            f"the ledger does not believe key signing/{role} of {keys}; name the key store it was "
            "made with"
        )
    if role == "policy":
        return found, key_store
    opened = open_ledger(ledger, found.policy_id, signer=signer, trust=found.chain.trust)
    return opened, key_store


def _text(reason: str) -> str:
    if not reason.strip():
        raise InputError("--reason is empty; say why, in a sentence without user ids")
    return reason.strip()


def _weights_sha(path: Path) -> str:
    import json

    try:
        sha = json.loads(path.read_bytes())["weights_sha"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path.name} is no model.json that can be read; name the one in the train step's "
            "output `model`"
        ) from error
    if not isinstance(sha, str):
        raise InputError(f"weights_sha in {path.name} is no digest; name the model's own file")
    return sha
