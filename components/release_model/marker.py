"""The one object that makes a release visible, and the tree it stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from components.fedemb.artifacts import canonical_json, file_digest
from components.fedemb.errors import ArtifactError, Refused
from components.fedemb.evidence import read_document
from components.fedemb.storage import Store, join, local_tree, put_tree
from components.release_model import bundle as parts

SCHEMA = "fedemb/release/1"


class Marker:
    """The marker of one version."""

    def __init__(self, store: Store, name: str, version: str):
        self._store = store
        self._name = f"{name}/{version}.json"
        self._uri = join(store.uri, name, version)
        self._release = {"name": name, "version": version, "uri": self._uri}

    def read(self, identity: dict[str, str]) -> dict[str, Any] | None:
        """The marker of this very model and report, or None if the version is free.

        Raises:
          Refused: the version is taken by something else.
        """
        try:
            document = json.loads(self._store.read(self._name))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ArtifactError(
                f"the release marker {self._name} is damaged; restore it"
            ) from error
        if any(document.get(key) != value for key, value in identity.items()):
            raise Refused(
                f"{self._name.removesuffix('.json')} is released already with another model; "
                "choose another release.version"
            )
        return document

    def publish(self, tree: Path, identity: dict[str, str]) -> dict[str, Any]:
        """Puts the tree in place, then creates the marker; a finished tree is taken as it is."""
        bundle_sha = self._left_behind(identity)
        if bundle_sha is None:
            put_tree(tree, self._uri)
            bundle_sha = file_digest(tree / parts.MANIFEST)
        document = {"schema": SCHEMA, **self._release, **identity, "bundle_sha": bundle_sha}
        try:
            self._store.create(self._name, canonical_json(document))
        except FileExistsError:
            found = self.read(identity)
            if found is None or found["bundle_sha"] != bundle_sha:
                raise Refused(
                    f"{self._uri} was released by another process at the same time; run again"
                ) from None
        return document

    def _left_behind(self, identity: dict[str, str]) -> str | None:
        """Manifest digest of a whole tree that a killed process of this run put in place."""
        try:
            manifest = self._store.read(
                f"{self._release['name']}/{self._release['version']}/{parts.MANIFEST}"
            )
        except FileNotFoundError:
            return None
        with local_tree(self._uri) as tree:
            report = read_document(tree / parts.DOCUMENTS["report"], "report")
            model = file_digest(tree / "backbone.keras")
            sha = file_digest(tree / parts.MANIFEST)
        if {"model_sha": model, "report_sha": report.sha} != identity or not manifest:
            raise Refused(
                f"{self._uri} holds another model that was never released; choose another "
                "release.version, or remove it"
            )
        return sha
