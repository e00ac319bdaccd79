"""Reservation document: the charge in the ledger, passed to the other steps."""

from __future__ import annotations

from typing import ClassVar

from fedemb.documents.fields import Address, AnyJson, Count, Delta, Name, Purpose, Sha
from fedemb.foundation.document import Document


class ReservationDocument(Document):
    """Written by reserve_budget from a ledger record; see `ledger.reservation`."""

    kind: ClassVar[str] = "reservation"
    role: ClassVar[str | None] = "ledger"

    policy_id: Name
    run_id: Name
    attempt: Count
    sequence: Count
    """Number of the ledger record."""
    record_sha: Sha
    purpose: Purpose
    blocks: list[Name]
    """Blocks whose users may be read: the requested blocks with remaining budget."""
    blocks_requested: list[Name]
    event: AnyJson
    relation: Name
    delta: Delta
    rounds: Count
    plan_sha: Sha
    config_sha: Sha
    code_sha: Sha
    input: Address
    """Address and version of the input."""
