"""The marker object that makes a release visible, and the tree that it names.

The marker `<name>/<version>.json` is created exclusively, after the tree: one of several writers
succeeds. In a folder, the tree is `<name>/<version>/`, renamed into place as a whole. A bucket does
not support rename, so every writer has its own folder `<name>/<version>/<digest>/`, and the marker
names one of them; files of two writers never mix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.verdict import ReleaseMarker
from fedemb.errors import ArtifactError, Refused, SignatureInvalid
from fedemb.foundation.canonical_json import file_digest
from fedemb.foundation.document import Written, read, written
from fedemb.keys.trust import Signer, TrustStore
from fedemb.serving import bundle as parts
from fedemb.serving.bundle import read_marker
from fedemb.storage import Store, join, local_tree


@dataclass(frozen=True)
class Identity:
    """The run and attempt that produced the model."""

    model_sha: str
    run_id: str
    attempt: int


class Marker:
    """The marker of one version."""

    def __init__(self, store: Store, name: str, version: str, trust: TrustStore):
        self._store, self._trust = store, trust
        self._name, self._version = name, version
        self._tree = f"{name}/{version}"
        self._file = f"{self._tree}.json"

    def read(self, identity: Identity) -> Written[ReleaseMarker] | None:
        """Returns the marker of this run and model, or None if the version is free.

        A marker is valid if it is signed and names a signed bundle of this model in this store. The
        bundle's report may be another report of the same run: a run that was killed after the
        marker and resumed creates a new report, and the published bundle stays valid.

        Raises:
          Refused: the version is taken by another release, or the marker is invalid.
        """
        found = read_marker(self._store, self._file)
        if found is None:
            return None
        body = found.body
        if Identity(body.model_sha, body.run_id, body.attempt) != identity:
            raise Refused(
                f"{self._tree} is released already with another model; choose another "
                "release.version"
            )
        wrong = None
        try:
            self._trust.check(found)
            tree = body.tree
            there = self._ours(tree) and self._store.exists(f"{tree}/{parts.MANIFEST}")
            if there and body == self._document(tree, self._published(tree, identity)):
                return found
        except (ArtifactError, Refused, SignatureInvalid) as error:
            wrong = error
        raise Refused(
            f"The release marker {self._file} does not match a signed bundle of this run in "
            f"{self._store.uri}. Check who may write there, remove the marker, and release "
            "again."
        ) from wrong

    def publish(self, tree: Path, identity: Identity, signer: Signer) -> Written[ReleaseMarker]:
        """Stores the tree, then creates the marker; an existing finished tree is reused.

        Raises:
          Refused: the version is taken, or another process released it at the same time.
        """
        try:
            name = self._store.create_tree(tree, self._tree)
            published = {**vars(identity), **_shas(tree)}
        except FileExistsError:  # created earlier by a killed process of this run
            name, published = self._tree, self._published(self._tree, identity)
        document = self._document(name, published)
        try:
            signed = written(document, signer.sign(document.content()))
            self._store.create(self._file, signed.data)
        except FileExistsError:
            found = self.read(identity)
            if found is None or found.body.bundle_sha != document.bundle_sha:
                raise Refused(
                    f"{self._tree} was released by another process at the same time, whose bundle "
                    "stands; run again to take it over, or choose another release.version"
                ) from None
            return found
        return signed

    def _document(self, tree: str, published: dict[str, Any]) -> ReleaseMarker:
        fields = {"name": self._name, "version": self._version, "tree": tree, **published}
        return ReleaseMarker.of_fields(fields)

    def _ours(self, tree: str) -> bool:
        """Returns whether a release would store a tree at this name."""
        if self._store.local_root is not None:
            return tree == self._tree
        folder, _, digest = tree.rpartition("/")
        return folder == self._tree and digest != ""

    def _published(self, name: str, identity: Identity) -> dict[str, Any]:
        """Returns the identity of a stored tree, after checking its signature and its run."""
        with local_tree(join(self._store.uri, name)) as tree:
            parts.check_seal(tree, self._trust)  # any writer of the store could have created it
            report = read(tree / parts.REPORT, PrivacyReport).body
            shas = _shas(tree)
            found = Identity(file_digest(tree / "backbone.keras"), report.run_id, report.attempt)
        if found != identity:
            raise Refused(
                f"{self._tree} holds another model that was never released; choose another "
                "release.version, or remove it"
            )
        return {**vars(identity), **shas}


def _shas(tree: Path) -> dict[str, str]:
    return {
        "report_sha": file_digest(tree / parts.REPORT),
        "bundle_sha": file_digest(tree / parts.MANIFEST),
    }
