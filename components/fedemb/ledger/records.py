"""One record of the privacy ledger: its encoding and its signing role.

The schema of a record is `documents.ledger_record`. The bytes are compared with their own
re-encoding, so changed whitespace, a repeated key or a different number format is an error.

Specification: docs/explanation/ledger.md#rules.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict, TypeVar

from fedemb.documents.ledger_record import DecisionRecord, LedgerRecord
from fedemb.errors import ArtifactError, LedgerError
from fedemb.foundation.canonical_json import ToJson, canonical_json
from fedemb.foundation.document import Part, Written, parse, written
from fedemb.keys.signatures import Signer
from fedemb.keys.trust import APPROVER, TrustStore

GENESIS = "0" * 64
"""`previous` of record 0."""
P = TypeVar("P", bound=Part)


@dataclass(frozen=True)
class Record:
    """A record of the ledger."""

    policy_id: str
    sequence: int
    previous: str
    """SHA-256 of the bytes of the previous record."""
    act: str
    """Kind of the record: a key of `documents.ledger_record.BODIES`."""
    run_id: str
    """Id of the run; empty for records about the whole policy."""
    attempt: int
    time: str
    """UTC time, for display; only `sequence` defines the order."""
    actor: str
    body: Mapping[str, ToJson]
    """Content as JSON; `content` returns it with types."""
    document: Written[LedgerRecord]

    @property
    def kind(self) -> str:
        """Kind of the record as stored: `policy`, `reserve`, ..."""
        return self.act

    def content(self, expected: type[P]) -> P:
        """Returns the content as the class of its kind, see `documents.ledger_record.BODIES`.

        Raises:
          LedgerError: the record is of another kind.
        """
        content = self.document.body.body
        if not isinstance(content, expected):
            raise LedgerError(
                f"ledger record {self.name} is of the kind {self.kind!r} and has no content of a "
                f"{expected.__name__}; restore the ledger from its backup"
            )
        return content

    @property
    def signature(self) -> Mapping[str, str]:
        """Key id, algorithm and value of the signature."""
        return self.document.signature or {}

    @property
    def sha(self) -> str:
        """SHA-256 of the bytes."""
        return self.document.sha

    @property
    def name(self) -> str:
        """Name of the record in the store."""
        return record_name(self.policy_id, self.sequence)

    @functools.cached_property
    def event(self) -> bytes:
        """Canonical JSON of a reservation's event."""
        return canonical_json(self.body["event"])

    def verify(self, trust: TrustStore) -> None:
        """Checks the signature.

        Raises:
          SignatureInvalid: the key is unknown, or the signature does not match the content.
        """
        check_record(self.document, trust)


def check_record(record: Written[LedgerRecord], trust: TrustStore) -> None:
    """Checks the signature of a record with the keys trusted at its place in the ledger.

    Raises:
      SignatureInvalid: the key is unknown, or the signature does not match the content.
    """
    body = record.body
    role, name = signing_role(body), record_name(body.policy_id, body.sequence)
    trust.verify(record.signed_bytes, record.signature, role, name, at=body.sequence)


def record_name(policy_id: str, sequence: int) -> str:
    """Returns the name of a record in the store."""
    return f"{policy_id}/{sequence:08d}.json"


def signing_role(record: LedgerRecord) -> str:
    """Returns the role whose key signs a record."""
    if isinstance(record.body, DecisionRecord):
        return "policy" if record.body.report_sha is None else APPROVER
    if record.act == "evaluation":
        return "evaluate"
    return "policy" if record.act in ("policy", "keys", "approvers", "charge") else "ledger"


class RecordContent(TypedDict):
    """Content of a record, before it is signed."""

    policy_id: str
    sequence: int
    previous: str
    """SHA-256 of the record before it."""
    kind: str
    run_id: str
    attempt: int
    time: str
    """UTC, ISO 8601."""
    actor: str
    body: Mapping[str, object]


def encode_record(content: RecordContent, signer: Signer) -> bytes:
    """Returns the signed bytes of a record.

    Raises:
      LedgerError: the content does not match its kind, or the signer lacks the role of the kind.
    """
    kind = content["kind"]
    try:
        record = LedgerRecord.of_fields({**content, "body": dict(content["body"])})
    except ArtifactError as error:
        raise LedgerError(
            f"a {kind} record cannot be written: {error}; correct the value and retry"
        ) from error
    role = signing_role(record)
    if signer.role != role:
        raise LedgerError(
            f"a {kind} record needs a key of the role {role!r}, got {signer.role!r}; use the "
            "signer of that role"
        )
    return written(record, signer.sign(record.content())).data


def decode_record(data: bytes, name: str, *, canonical: bool = True) -> Record:
    """Decodes the bytes of a record; `Record.verify` checks the signature.

    Args:
      data: the bytes as stored.
      name: name in the store, which must match the record's policy and sequence.
      canonical: False skips the check for canonical encoding; the hash chain covers it.

    Raises:
      LedgerError: not a canonical record.
    """
    try:
        document = parse(data, LedgerRecord, name, exact=canonical)
    except (ArtifactError, RecursionError) as error:
        problem = str(error).partition(";")[0]
        raise LedgerError(
            f"ledger record {name} is broken: {problem}; restore the ledger from its backup"
        ) from error
    fields = document.body
    record = Record(
        policy_id=fields.policy_id,
        sequence=fields.sequence,
        previous=fields.previous,
        act=fields.act,
        run_id=fields.run_id,
        attempt=fields.attempt,
        time=fields.time,
        actor=fields.actor,
        body=vars(fields.body),  # nested values are JSON
        document=document,
    )
    problem = None
    if document.signature is None:
        problem = "it is not signed"
    elif record.name != name:
        problem = "it belongs elsewhere"
    if problem:
        raise LedgerError(
            f"ledger record {name} is broken: {problem}; restore the ledger from its backup"
        )
    return record
