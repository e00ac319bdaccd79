"""The one object that makes a release visible, and the tree it stands for.

The marker `<name>/<version>.json` is created exclusively, after the tree: of many writers one wins.
In a folder the tree is `<name>/<version>/`, renamed into place as a whole. In a bucket nothing can
be renamed, so every writer has a folder `<name>/<version>/<digest>/` of its own, and the marker
names one of them; files of two writers never mix.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedemb.documents.artifacts import canonical_json, file_digest
from fedemb.documents.evidence import read_document
from fedemb.errors import ArtifactError, InputError, Refused, SignatureInvalid
from fedemb.keys.trust import TrustStore
from fedemb.steps.release_model import bundle as parts
from fedemb.storage import Store, create_tree, join, local_tree, open_store

SCHEMA = "fedemb/release/1"


class Marker:
    """The marker of one version."""

    def __init__(self, store: Store, name: str, version: str, trust: TrustStore):
        self._store, self._trust = store, trust
        self._tree = f"{name}/{version}"
        self._name = f"{self._tree}.json"
        self._release = {"name": name, "version": version}

    def read(self, identity: dict[str, Any]) -> dict[str, Any] | None:
        """The marker of this very run and model, or None if the version is free.

        A marker is not signed, so it is trusted for what lies where it points alone: a
        bundle in this store, signed, of this model, with the digests it names. Its report may be
        another one of the same run: a run that was killed after the marker and resumed has priced
        itself anew, and what was published stands.

        Args:
          identity: `{"model_sha", "run_id", "attempt"}`.

        Raises:
          Refused: the version is taken by something else, or the marker cannot be trusted.
        """
        document = read_marker(self._store, self._name)
        if document is None:
            return None
        if any(document.get(key) != value for key, value in identity.items()):
            raise Refused(
                f"{self._tree} is released already with another model; choose another "
                "release.version"
            )
        name, wrong = self._tree_at(document.get("uri")), None
        try:
            if name is not None and self._store.exists(f"{name}/{parts.MANIFEST}"):
                shas = self._published(name, identity)
                if document == self._document(name, identity, shas):
                    return document
        except (ArtifactError, Refused, SignatureInvalid) as error:
            wrong = error
        raise Refused(
            f"the release marker {self._name} names no bundle in {self._store.uri} that is signed, "
            "of this run and as the marker says, so no release step wrote it or the bundle was "
            "changed since; find out who may write there, remove the marker, then release again"
        ) from wrong

    def publish(self, tree: Path, identity: dict[str, Any]) -> dict[str, Any]:
        """Puts the tree in place, then creates the marker; a finished tree is taken as it is.

        Raises:
          Refused: the version is taken, or another process released it at the same time.
        """
        try:
            name = create_tree(tree, self._store, self._tree)
            shas = _shas(tree)
        except FileExistsError:  # a killed process of this run put it in place
            name, shas = self._tree, self._published(self._tree, identity)
        document = self._document(name, identity, shas)
        try:
            self._store.create(self._name, canonical_json(document))
        except FileExistsError:
            found = self.read(identity)
            if found is None or found["bundle_sha"] != shas["bundle_sha"]:
                raise Refused(
                    f"{self._tree} was released by another process at the same time, whose bundle "
                    "stands; run again to take it over, or choose another release.version"
                ) from None
        return document

    def _document(
        self, name: str, identity: dict[str, Any], shas: dict[str, str]
    ) -> dict[str, Any]:
        uri = join(self._store.uri, name)
        return {"schema": SCHEMA, **self._release, "uri": uri, **identity, **shas}

    def _tree_at(self, uri: Any) -> str | None:
        """Name in the store of the tree at an address; None where no release would put one."""
        name = self._tree
        if self._store.local_root is None:
            name += "/" + str(uri).rpartition("/")[2]
        return name if uri == join(self._store.uri, name) else None

    def _published(self, name: str, identity: dict[str, Any]) -> dict[str, str]:
        """Digests of a whole tree in place, whoever put it there: it is signed, and of this run."""
        with local_tree(join(self._store.uri, name)) as tree:
            parts.check_signature(tree, self._trust)  # whoever may write there could have put it
            report = read_document(tree / parts.DOCUMENTS["report"], "report")
            shas = _shas(tree)
            found = {
                "model_sha": file_digest(tree / "backbone.keras"),
                "run_id": report.body["run_id"],
                "attempt": report.body["attempt"],
            }
        if found != identity:
            raise Refused(
                f"{self._tree} holds another model that was never released; choose another "
                "release.version, or remove it"
            )
        return shas


def _shas(tree: Path) -> dict[str, str]:
    return {
        "report_sha": file_digest(tree / parts.DOCUMENTS["report"]),
        "bundle_sha": file_digest(tree / parts.MANIFEST),
    }


def read_marker(store: Store, name: str) -> dict[str, Any] | None:
    """Reads a marker; None if there is none.

    Raises:
      ArtifactError: it is damaged.
    """
    try:
        document = json.loads(store.read(name))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ArtifactError(f"the release marker {name} is damaged; restore it") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ArtifactError(f"{name} is no release marker of this version; restore it")
    return document


def bundle_address(uri: str) -> tuple[str, str | None]:
    """Finds the tree of a release.

    Args:
      uri: a bundle; or, in a bucket, `<releases>/<name>/<version>`, which its marker resolves.

    Returns:
      Address of the tree, and the digest of its manifest that the marker names, if there is one.

    Raises:
      InputError: there is no release at the address.
    """
    store = open_store(uri)
    if store.local_root is not None:
        if not store.local_root.is_dir():
            raise InputError(f"there is no release folder {uri}; check the address")
        return uri, None
    parent, _, version = uri.rstrip("/").rpartition("/")
    if parent.endswith(":/"):
        raise InputError(f"{uri} is a whole bucket; name a release in it")
    marker = read_marker(open_store(parent), f"{version}.json")
    if marker is not None:
        return join(uri, str(marker["uri"]).rstrip("/").rpartition("/")[2]), marker["bundle_sha"]
    if not store.exists(parts.MANIFEST):
        raise InputError(
            f"nothing was released at {uri}: there is neither a marker nor a bundle; check the "
            "address, or release again if the process was killed"
        )
    return uri, None
