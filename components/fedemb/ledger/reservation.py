"""The reservation: permission of a run to train. Its document is its signed record of the ledger.

reserve_budget copies the bytes of the record for the other steps. They compare the document with
the ledger, see `Ledger.attempt`.
"""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false
from __future__ import annotations

from pathlib import Path

from fedemb.documents.fields import Count, Name, Sha
from fedemb.documents.ledger_record import LedgerRecord, ReserveRecord
from fedemb.errors import ArtifactError
from fedemb.foundation.document import Written, read
from fedemb.keys.trust import TrustStore
from fedemb.ledger.chain import Anchor
from fedemb.ledger.records import check_record


class Reservation(ReserveRecord):
    """One attempt of one run, charged to its blocks."""

    policy_id: Name
    run_id: Name
    attempt: Count
    sequence: Count
    """Number of the ledger record."""
    record_sha: Sha

    @classmethod
    def of(cls, record: Written[LedgerRecord]) -> Reservation:
        """Returns the reservation in a `reserve` record.

        Raises:
          ArtifactError: the record is of another kind.
        """
        fields = record.body
        if not isinstance(fields.body, ReserveRecord):
            raise ArtifactError(
                f"ledger record {fields.sequence} of the kind {fields.act!r} is not a reservation; "
                "run reserve_budget again"
            )
        return cls(
            **vars(fields.body),
            policy_id=fields.policy_id,
            run_id=fields.run_id,
            attempt=fields.attempt,
            sequence=fields.sequence,
            record_sha=record.sha,
        )

    @property
    def anchor(self) -> Anchor:
        """The ledger anchor in the reservation."""
        return Anchor(self.sequence, self.record_sha, f"the reservation of run {self.run_id!r}")


def read_reservation(path: Path, trust: TrustStore | None = None) -> Reservation:
    """Reads the document of a reservation.

    Args:
      path: the document.
      trust: keys that verify the signature. None leaves the check to `Ledger.attempt`, which
          compares the whole reservation with its signed record.

    Raises:
      ArtifactError: not a reservation of this version.
      SignatureInvalid: the document was changed, or signed by an unknown key.
    """
    document = read(path, LedgerRecord)
    if trust is not None:
        check_record(document, trust)
    return Reservation.of(document)
