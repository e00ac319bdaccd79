"""The reservation: permission of a run to train, as a document and as a ledger record.

The document is passed to the other steps; the ledger record is authoritative. `Reservation.of` a
record and `read_reservation` of a document return equal values, or the step that compares them
refuses.
"""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false
from __future__ import annotations

from pathlib import Path

from fedemb.documents.reservation import ReservationDocument
from fedemb.foundation.canonical_json import JsonObject
from fedemb.foundation.document import read
from fedemb.keys.signatures import Signer, write_signed
from fedemb.keys.trust import TrustStore
from fedemb.ledger.chain import Anchor
from fedemb.ledger.records import Record


class Reservation(ReservationDocument):
    """One attempt of one run, charged to its blocks."""

    @classmethod
    def of(cls, record: Record) -> Reservation:
        """Returns the reservation in a `reserve` record."""
        return cls.model_validate(
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
    def of_document(cls, document: ReservationDocument) -> Reservation:
        """Returns the reservation in a document."""
        return cls.model_validate(document.model_dump())

    @property
    def anchor(self) -> Anchor:
        """The ledger anchor in the reservation."""
        return Anchor(self.sequence, self.record_sha, f"the reservation of run {self.run_id!r}")


def write_reservation(path: Path, reservation: Reservation, signer: Signer) -> JsonObject:
    """Writes the signed document and returns it."""
    return write_signed(path, reservation, signer).json


def read_reservation(path: Path, trust: TrustStore | None = None) -> Reservation:
    """Reads a reservation document.

    Args:
      path: the document.
      trust: keys that verify the signature. None leaves the check to `Ledger.attempt`, which
          compares the whole reservation with its signed record.

    Raises:
      ArtifactError: not a reservation of this version.
      SignatureInvalid: the document was changed, or signed by an unknown key.
    """
    document = read(path, ReservationDocument)
    if trust is not None:
        trust.check(document, at=document.body.sequence)
    return Reservation.of_document(document.body)
