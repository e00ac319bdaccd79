"""Schemas of the records of the privacy ledger and of its signed heads.

The content of a record depends on its `kind`. `ledger.records` defines the signer of each kind.
Every record is one line of canonical JSON: the ledger in a bundle has one line per record, and a
chain of digests covers the bytes.

Specification: docs/explanation/ledger.md#rules.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    StringConstraints,
    WithJsonSchema,
    field_validator,
)
from pydantic_core.core_schema import ValidationInfo

from fedemb.documents.fields import Address, AnyJson, Count, Delta, Name, Purpose, Sha
from fedemb.foundation.document import Document, Part


def _different(names: list[str]) -> list[str]:
    if len(set(names)) != len(names):
        raise ValueError("a name is listed twice")
    return names


def _stripped(name: str) -> str:
    if name.strip() != name or not name:
        raise ValueError("the name is empty or has spaces around it")
    return name


Reason = Annotated[str, StringConstraints(max_length=8192)]
"""Reason in the policy owner's own text; the only free text that is signed."""
Blocks = Annotated[list[str], Field(min_length=1), AfterValidator(_different)]


class PolicyRecord(Part):
    """Record 0: `PolicyTerms.to_json`."""

    terms: AnyJson


class KeysRecord(Part):
    """Next generation of signing keys; checked in full by `TrustStore.rotated`."""

    keys: Annotated[list[AnyJson], Field(min_length=1)]
    reason: Reason


class ApproversRecord(Part):
    """Name -> public key of all approvers; checked in full by `TrustStore.with_approvers`."""

    approvers: dict[Annotated[str, AfterValidator(_stripped)], Sha]
    reason: Reason


class ChargeRecord(Part):
    """Declared loss of a release made elsewhere; see `ledger.external`."""

    name: Annotated[Name, Field(min_length=1)]
    """Name of the release, unique among the external charges of the policy."""
    blocks: Annotated[list[str], AfterValidator(_different)]
    """Charged user blocks; empty: all, used now or later."""
    relation: Name
    """Change of one unit of the policy that the loss covers."""
    epsilon: float | None
    delta: float
    """Delta of `epsilon`."""
    rho: float | None
    """Rho of zCDP, instead of `epsilon`."""
    reason: Reason


class ReserveRecord(Part):
    """Charge of an attempt; see `ledger.Ledger.reserve`."""

    purpose: Purpose
    blocks: Blocks
    blocks_requested: Blocks
    event: AnyJson
    relation: Name
    delta: Delta
    rounds: Count
    plan_sha: Sha
    config_sha: Sha
    code_sha: Sha
    input: Address


class AttemptRecord(Part):
    """Record about an attempt that was reserved before."""

    reservation: Count
    """Number of the record of its reservation."""


class BindRecord(AttemptRecord):
    """Inputs and runtime of an attempt."""

    inputs_sha: Sha
    commitments: dict[str, Sha]
    private_root: Sha
    key_sha: Sha | None
    """Commitment to the key of coins and noise; None: bound without a key store."""


class CommitRecord(AttemptRecord):
    """End of an attempt; the trainer signs the round log."""

    rounds_started: Count
    round_log: AnyJson


class EvaluationRecord(AttemptRecord):
    """Evaluation of a model on held-out users, recorded before it starts."""

    model_sha: Sha


class DecisionRecord(AttemptRecord):
    """Decision of a person that removes one reason of the gate for one model.

    An approval removes `not_approved` for one report and is signed by an approver. A waiver removes
    another reason from every later report, which lists it, and is signed by the policy owner.
    """

    code: Name
    """Reason code of the gate."""
    model_sha: Sha
    report_sha: Sha | None
    """SHA-256 of the approved report; None: a waiver."""
    reason: Reason


class VoidRecord(AttemptRecord):
    """Refund of a reservation."""

    reason: Reason


class ReleaseRecord(AttemptRecord):
    """Publication of a bundle."""

    model_sha: Sha
    report_sha: Sha
    bundle_sha: Sha
    name: Name
    version: Name


BODIES: dict[str, type[Part]] = {
    "policy": PolicyRecord,
    "keys": KeysRecord,
    "approvers": ApproversRecord,
    "charge": ChargeRecord,
    "reserve": ReserveRecord,
    "bind": BindRecord,
    "commit": CommitRecord,
    "evaluation": EvaluationRecord,
    "decision": DecisionRecord,
    "void": VoidRecord,
    "release": ReleaseRecord,
}
"""Kind of record -> type of its content."""


class LedgerRecord(Document):
    """One ledger record."""

    model_config = ConfigDict(serialize_by_alias=True)
    kind: ClassVar[str] = "ledger_record"
    compact: ClassVar[bool] = True

    policy_id: Name
    sequence: Count
    previous: Sha
    """SHA-256 of the bytes of the previous record."""
    act: Annotated[str, Field(alias="kind", pattern="^[a-z]{1,40}$")]
    run_id: Name
    """Run ID; empty for records about the whole policy."""
    attempt: Count
    time: Annotated[str, StringConstraints(pattern=r"^[0-9T:.+-]{0,40}$")]
    """Time in UTC, for information; only `sequence` defines the order."""
    actor: Name
    body: Annotated[SerializeAsAny[Part], WithJsonSchema({"type": "object"})]

    @field_validator("body", mode="plain")
    @classmethod
    def _of_its_kind(cls, value: object, info: ValidationInfo) -> Part:
        body = BODIES.get(info.data.get("act", ""))
        if body is None:
            raise ValueError("unknown kind of record; this version may be too old")
        return body.model_validate(value)


class LedgerHead(Document):
    """Signed digest of the newest record, stored outside the chain to detect truncation."""

    kind: ClassVar[str] = "ledger_head"
    role: ClassVar[str | None] = "ledger"
    compact: ClassVar[bool] = True

    policy_id: Name
    sequence: Count
    sha: Sha
