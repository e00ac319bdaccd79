"""Users manifest: public constants of a partition and keyed commitments to it, without counts."""

from __future__ import annotations

from typing import ClassVar

from fedemb.documents.fields import Count, Name, Sha
from fedemb.foundation.document import Document, Part


class Commitments(Part):
    """Keyed commitments to the output of partition_users."""

    users: Sha
    evaluation: Sha


class UsersManifest(Document):
    """Written by partition_users."""

    kind: ClassVar[str] = "users"
    role: ClassVar[str | None] = "partition"

    run_id: Name
    config_sha: Sha
    reservation_sha: Sha
    """SHA-256 of the reservation document."""
    virtual_clients: Count
    groupings: Count
    blocks: list[Name]
    image_size: Count
    channels: Count
    commitments: Commitments
