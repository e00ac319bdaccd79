"""The records of the privacy ledger and its signed heads, as they are written down.

What is in a record depends on its `kind`; who signs which says `ledger.records`. All of them are
one line of canonical JSON: the ledger in a bundle has a line for each, and a chain of digests goes
over the bytes.

Specification: docs/explanation/ledger.md#rules.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

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

from fedemb.documents.fields import Address, Count, Delta, Json, Name, Purpose, Sha
from fedemb.foundation.document import Document, Part


def _different(names: list[str]) -> list[str]:
    if len(set(names)) != len(names):
        raise ValueError("a name twice")
    return names


def _stripped(name: str) -> str:
    if name.strip() != name or not name:
        raise ValueError("no name")
    return name


Reason = Annotated[str, StringConstraints(max_length=8192)]
"""In the owner's words; the only free text that is signed."""
Blocks = Annotated[list[str], Field(min_length=1), AfterValidator(_different)]


class PolicyRecord(Part):
    """Record 0: `PolicyTerms.to_json`."""

    terms: Json


class WaiverRecord(Part):
    """One waivable rule of the gate, for one model."""

    code: Name
    model_sha: Sha
    reason: Reason


class KeysRecord(Part):
    """The next generation of signing keys; `TrustStore.rotated` looks closer."""

    keys: Annotated[list[Json], Field(min_length=1)]
    reason: Reason


class ApproversRecord(Part):
    """Name -> public key of all who may approve; `TrustStore.with_approvers` looks closer."""

    approvers: dict[Annotated[str, AfterValidator(_stripped)], Sha]
    reason: Reason


class ReserveRecord(Part):
    """The charge of an attempt; see `ledger.Ledger.reserve`."""

    purpose: Purpose
    blocks: Blocks
    blocks_requested: Blocks
    event: Json
    relation: Name
    delta: Delta
    rounds: Count
    plan_sha: Sha
    config_sha: Sha
    code_sha: Sha
    input: Address


class BindRecord(Part):
    """What an attempt trains with, and where."""

    reservation: Count
    inputs_sha: Sha
    commitments: dict[str, Sha]
    private_root: Sha


class CommitRecord(Part):
    """The end of an attempt; the round log is signed by the trainer."""

    reservation: Count
    rounds_started: Count
    round_log: Json


class LookRecord(Part):
    """A model is about to be measured on evaluation people."""

    reservation: Count
    model_sha: Sha


class ApprovalRecord(Part):
    """Somebody named for it approves one report of one model."""

    reservation: Count
    model_sha: Sha
    report_sha: Sha


class VoidRecord(Part):
    """A reservation is given back."""

    reservation: Count
    reason: Reason


class ReleaseRecord(Part):
    """A bundle was published."""

    reservation: Count
    model_sha: Sha
    report_sha: Sha
    bundle_sha: Sha
    name: Name
    version: Name


BODIES: dict[str, type[Part]] = {
    "policy": PolicyRecord,
    "waiver": WaiverRecord,
    "keys": KeysRecord,
    "approvers": ApproversRecord,
    "reserve": ReserveRecord,
    "bind": BindRecord,
    "commit": CommitRecord,
    "look": LookRecord,
    "approval": ApprovalRecord,
    "void": VoidRecord,
    "release": ReleaseRecord,
}
"""By the kind of the record."""


class LedgerRecord(Document):
    """One record."""

    model_config = ConfigDict(serialize_by_alias=True)
    kind: ClassVar[str] = "ledger_record"
    compact: ClassVar[bool] = True

    policy_id: Name
    sequence: Count
    previous: Sha
    """SHA-256 of the bytes of the record before."""
    act: Annotated[str, Field(alias="kind", pattern="^[a-z]{1,40}$")]
    run_id: Name
    """Empty for what the policy owner signs."""
    attempt: Count
    time: Annotated[str, StringConstraints(pattern=r"^[0-9T:.+-]{0,40}$")]
    """UTC, for people; the order is that of `sequence` alone."""
    actor: Name
    body: Annotated[SerializeAsAny[Part], WithJsonSchema({"type": "object"})]

    @field_validator("body", mode="plain")
    @classmethod
    def _of_its_kind(cls, value: Any, info: ValidationInfo) -> Part:
        body = BODIES.get(info.data.get("act", ""))
        if body is None:
            raise ValueError("of a kind that this version does not know")
        return body.model_validate(value, context=info.context)


class LedgerHead(Document):
    """The digest of a record, signed beside the chain: no later cut goes unseen."""

    kind: ClassVar[str] = "ledger_head"
    role: ClassVar[str | None] = "ledger"
    compact: ClassVar[bool] = True

    policy_id: Name
    sequence: Count
    sha: Sha
