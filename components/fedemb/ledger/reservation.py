"""The reservation: what a step is allowed to do, as a document and as a ledger record.

The document travels to the other steps; the ledger's record is what counts. `Reservation.of` a
record and `read_reservation` of a document give the same value, or the step that compares refuses.
"""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false
from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dp_accounting import DpEvent, NeighboringRelation

from fedemb.documents.artifacts import read_json, write_json
from fedemb.errors import ArtifactError
from fedemb.keys.signatures import Signer, sign_document
from fedemb.keys.trust import TrustStore, verify_document
from fedemb.ledger.chain import Anchor
from fedemb.ledger.records import Record
from fedemb.privacy.accounting.events import event_from_json

SCHEMA = "fedemb/reservation/1"


@dataclass(frozen=True)
class Reservation:
    """One attempt of one run, charged to its blocks."""

    policy_id: str
    run_id: str
    attempt: int
    sequence: int
    """Number of its ledger record."""
    record_sha: str
    purpose: str
    blocks: tuple[str, ...]
    """Whose users may be read; those requested that are not full."""
    blocks_requested: tuple[str, ...]
    event: dict[str, Any]
    relation: str
    delta: float
    rounds: int
    plan_sha: str
    config_sha: str
    code_sha: str
    input: str
    """Address and version of the input."""

    @classmethod
    def of(cls, record: Record) -> Reservation:
        """The reservation a `reserve` record holds."""
        return cls.from_json(
            {
                **record.body,
                "policy_id": record.policy_id,
                "run_id": record.run_id,
                "attempt": record.attempt,
                "sequence": record.sequence,
                "record_sha": record.sha,
            }
        )

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Reservation:
        """Reads the fields of a document, closed-world.

        Raises:
          ArtifactError: a field is unknown or missing.
        """
        names = {item.name for item in fields(cls)}
        if set(body) != names:
            raise ArtifactError(
                f"a reservation has exactly the fields {', '.join(sorted(names))}; run "
                "reserve_budget again"
            )
        values = dict(body)
        for name in ("blocks", "blocks_requested"):
            values[name] = tuple(body[name])
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """The fields of the document, without schema and signature."""
        body = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            **body,
            "blocks": list(self.blocks),
            "blocks_requested": list(self.blocks_requested),
        }

    @property
    def dp_event(self) -> DpEvent:
        """Event of the whole run as reserved."""
        return event_from_json(self.event)

    @property
    def neighboring_relation(self) -> NeighboringRelation:
        """Relation the event is meant under."""
        return NeighboringRelation[self.relation]

    @property
    def anchor(self) -> Anchor:
        """What it says about the ledger."""
        return Anchor(self.sequence, self.record_sha, f"the reservation of run {self.run_id!r}")


def write_reservation(path: Path, reservation: Reservation, signer: Signer) -> dict[str, Any]:
    """Writes the signed document and returns it."""
    document = sign_document({"schema": SCHEMA, **reservation.to_json()}, signer)
    write_json(path, SCHEMA, {key: value for key, value in document.items() if key != "schema"})
    return document


def read_reservation(path: Path, trust: TrustStore | None = None) -> Reservation:
    """Reads a reservation document.

    Args:
      path: the document.
      trust: checks its signature. None leaves that to `Ledger.attempt`, which compares the whole
        reservation with its signed record.

    Raises:
      ArtifactError: not a reservation of this version.
      SignatureInvalid: changed, or signed by an unknown key.
    """
    document = read_json(path, SCHEMA)
    if trust is not None:
        verify_document(document, trust, "ledger", at=document.get("sequence"))
    body = {key: value for key, value in document.items() if key not in ("schema", "signature")}
    return Reservation.from_json(body)
