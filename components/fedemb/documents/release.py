"""A release: the manifest of its bundle, the marker that publishes it, the result of the step."""

from __future__ import annotations

from typing import Annotated, ClassVar

from fedemb.documents.fields import Address, Count, Name, Sha
from fedemb.foundation.document import Document, Since


class BundleManifest(Document):
    """`manifest.json`: every file of a bundle by its digest, but those that sign it."""

    kind: ClassVar[str] = "bundle"
    newest: ClassVar[int] = 2
    role: ClassVar[str | None] = "release"

    name: Name
    version: Name
    files: dict[Name, Sha]
    sizes: Annotated[dict[Name, Count] | None, Since(2, before=None)]
    """Bytes of each of the same files: no reader reads more of one."""


class ReleaseMarker(Document):
    """`<name>/<version>.json` in the store of releases; created exclusively, it publishes."""

    kind: ClassVar[str] = "release_marker"
    role: ClassVar[str | None] = "release"

    name: Name
    version: Name
    tree: Name
    """Where the bundle lies in the same store."""
    run_id: Name
    attempt: Count
    model_sha: Sha
    report_sha: Sha
    bundle_sha: Sha
    """Of `manifest.json`."""


class ReleaseResult(Document):
    """What release_model hands to the pipeline; all None in a simulation."""

    kind: ClassVar[str] = "release"

    uri: Address | None
    name: Name | None
    version: Name | None
    bundle_sha: Sha | None
    model_sha: Sha | None
