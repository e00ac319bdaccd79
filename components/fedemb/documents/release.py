"""Release: the manifest of its bundle, and the marker that publishes it."""

from __future__ import annotations

from typing import ClassVar

from fedemb.documents.fields import Count, Name, Sha
from fedemb.foundation.document import Document


class BundleManifest(Document):
    """`manifest.json`: digest of every other file of a bundle; its signature is the seal."""

    kind: ClassVar[str] = "bundle"
    role: ClassVar[str | None] = "release"

    name: Name
    version: Name
    files: dict[Name, Sha]
    sizes: dict[Name, Count]
    """File name -> size in bytes; readers read at most this number of bytes."""


class ReleaseMarker(Document):
    """`<name>/<version>.json` in the release store; its exclusive creation is the publication.

    The artifact `release` of the pipeline is a copy.
    """

    kind: ClassVar[str] = "release"
    role: ClassVar[str | None] = "release"

    name: Name
    version: Name
    tree: Name
    """Location of the bundle in the same store."""
    run_id: Name
    attempt: Count
    model_sha: Sha
    report_sha: Sha
    bundle_sha: Sha
    """SHA-256 of `manifest.json`."""
