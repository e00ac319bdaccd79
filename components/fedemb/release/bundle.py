"""The files of a release bundle, and the signed manifest that seals them.

    backbone.keras  saved_model/                the model, and the same for serving
    preprocessing.py  parity.json               how a photo is read, and what that must give
    README.md  privacy_report.html              for people: the model card, the report
    *.json  rounds.jsonl                        the evidence: enough to decide again, offline
    ledger.jsonl                                the policy's ledger up to the release
    lineage.jsonl                               where it comes from
    manifest.json                               name, run, digests and sizes of all files, signed

Raw artifacts cannot enter a bundle: `place` accepts only `Noised | Public`.

A release becomes visible with its marker `<name>/<version>.json`, a copy of the manifest that is
created exclusively, after the tree: one of several writers succeeds. In a folder, the tree is
`<name>/<version>/`, renamed into place as a whole. A bucket does not support rename, so every
writer has its own folder `<name>/<version>/<digest>/`, whose digest follows from the manifest;
files of two writers never mix.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedemb.documents.artifacts import Artifact, require_publishable
from fedemb.documents.evidence import sentence_of
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.verdict import Identity, ReleaseManifest
from fedemb.errors import ArtifactError, InputError, Refused, SignatureInvalid
from fedemb.foundation.canonical_json import LARGEST_JSON, json_object, limited_digest, tree_digests
from fedemb.foundation.document import Written, parse, read
from fedemb.foundation.files import open_regular, read_regular, write_bytes
from fedemb.keys.trust import Signer, TrustStore, write_signed
from fedemb.ledger import Ledger
from fedemb.ledger.records import Chain
from fedemb.runtime.step_context import StepContext
from fedemb.storage import LocalStore, Store, join, local_tree, open_store

MANIFEST = "manifest.json"
PARITY = "parity.json"
PREPROCESSING = "preprocessing.py"
REPORT = "privacy_report.json"
LEDGER = "ledger.jsonl"
DOCUMENTS = {
    "privacy_plan": "privacy_plan.json",
    "reservation": "reservation.json",
    "users": "users_manifest.json",
    "audit_report": "audit_report.json",
    "utility_report": "utility_report.json",
    "privacy_report": REPORT,
    "verdict": "verdict.json",
}
"""Documents of a run by artifact name, in addition to those of the model."""
FILES = (
    *DOCUMENTS.values(),
    "README.md",
    "backbone.keras",
    "config.json",
    "ledger.jsonl",
    "lineage.jsonl",
    "manifest.json",
    "model.json",
    PARITY,
    PREPROCESSING,
    "privacy_report.html",
    "rounds.jsonl",
)
"""The complete list of files of a bundle, except `saved_model/`."""
SAVED_MODEL = "saved_model"
SAVED_MODEL_FILES = (
    "saved_model.pb",
    "variables/variables.data-00000-of-00001",
    "variables/variables.index",
)


ALL = frozenset((*FILES, *(f"{SAVED_MODEL}/{name}" for name in SAVED_MODEL_FILES)))
LARGE = frozenset(
    ("backbone.keras", "ledger.jsonl", *(f"{SAVED_MODEL}/{name}" for name in SAVED_MODEL_FILES))
)
"""Files that may exceed the size limit of a JSON document."""
LARGEST_FILE = 4 << 30
"""Maximum bytes of a file of `LARGE`; no larger file can be released, see `model_files.MEMORY`."""


def place(artifact: Artifact, bundle: Path, name: str) -> None:
    """Copies one publishable file into the bundle.

    Raises:
      Refused: the artifact is raw.
    """
    require_publishable(artifact)
    write_bytes(bundle / name, read_regular(artifact.path, LARGEST_FILE))


def write_manifest(bundle: Path, identity: Identity, signer: Signer) -> None:
    """Writes the signed manifest with the digests and sizes of all files written so far."""
    files = tree_digests(bundle)
    sizes = {file: (bundle / file).stat().st_size for file in files}
    write_signed(
        bundle / MANIFEST, ReleaseManifest(**identity._asdict(), files=files, sizes=sizes), signer
    )


def check_bundle(bundle: Path, trust: TrustStore) -> Written[ReleaseManifest]:
    """Checks that a bundle is complete and signed; parses no file but its manifest, and returns it.

    Raises:
      SignatureInvalid: its manifest is not signed by a trusted key, or a file is missing, extra, or
          does not match the manifest.
      ArtifactError: the manifest is missing or unreadable.
    """
    check_form(bundle)
    manifest = read(bundle / MANIFEST, ReleaseManifest)
    trust.check(manifest)
    check_sizes(bundle, manifest.body)
    check_files(bundle, manifest.body)
    return manifest


def check_origin(bundle: Path, pinned: TrustStore) -> tuple[Written[ReleaseManifest], Ledger]:
    """Checks a bundle like `check_bundle`, with pinned keys only; its ledger lists the newest keys.

    The check proves that the files are the released ones. It does not check the release decision.

    Raises:
      SignatureInvalid: as `check_bundle`, or the ledger of the bundle is invalid.
      ArtifactError: the manifest is missing or unreadable.
    """
    check_form(bundle)
    manifest = read(bundle / MANIFEST, ReleaseManifest)
    # The trusted keys may be listed only in the ledger, so sizes are compared before the signature:
    # a wrong size can only refuse. No other file is read before the manifest's signature is valid.
    check_sizes(bundle, manifest.body)
    copy = ledger_copy(bundle, pinned, manifest.body.sizes[LEDGER])
    copy.chain.trust.check(manifest)
    check_files(bundle, manifest.body)
    return manifest, copy


def ledger_copy(bundle: Path, pinned: TrustStore, size: int = LARGEST_FILE) -> Ledger:
    """Returns the ledger of a bundle, of at most `size` bytes. Its store does not exist.

    Records are read and verified one by one; reading stops at the first broken record.

    Raises:
      SignatureInvalid: the ledger is broken, or its keys do not chain to the pinned keys.
    """
    chain: Chain | None = None
    try:
        for record in _lines(bundle / LEDGER, size):
            if chain is None:
                policy_id = str(json_object(record, "record 0")["policy_id"])
                chain = Chain(LocalStore(bundle / "no_store"), policy_id, pinned)
            chain.extend([record])
        if chain is None:
            raise ArtifactError("the file has no record; fetch the bundle again")
        return Ledger(chain)
    except Exception as error:  # any error is a refusal
        why = sentence_of(error)
        if isinstance(error, SignatureInvalid) and chain is not None and not chain.records:
            why = "no key of the trust file signed its first record"
        raise SignatureInvalid(
            f"the ledger in the bundle is not valid: {why}. Pass the trust.json of the owner of "
            "this release. If this was the right file, fetch the bundle again"
        ) from error


def _lines(path: Path, size: int) -> Iterator[bytes]:
    """Yields the lines of a file without line ends, with one line in memory at a time.

    Raises:
      ArtifactError: a line or the file is too long, or the last line has no line end.
    """
    left = size
    with open_regular(path) as file:
        while line := file.readline(LARGEST_JSON + 1):
            left -= len(line)
            if len(line) > LARGEST_JSON or left < 0 or not line.endswith(b"\n"):
                raise ArtifactError(f"{path.name} is longer than it may be, or cut; fetch it again")
            yield line[:-1]


def check_form(bundle: Path) -> None:
    """Checks the file list of a bundle: complete, no extra file, link or device, sizes bounded.

    Raises:
      SignatureInvalid: a file fails the check; the message names it.
    """
    found = {path.relative_to(bundle).as_posix(): path for path in bundle.rglob("*")}
    folders = {SAVED_MODEL, f"{SAVED_MODEL}/variables"}
    if (bundle / "config.yaml").exists() and (bundle / "run.log").exists():
        raise SignatureInvalid(
            f"{bundle} is the folder of a run; pass its release, which `fedemb runs RUN` prints"
        )
    if not found.keys() & ALL:
        raise SignatureInvalid(
            f"{bundle} is not a release, because it has no {MANIFEST}; pass the folder that "
            "`fedemb runs RUN` prints"
        )
    for what, odd in (
        ("extra", found.keys() - (ALL | folders)),
        ("missing", (ALL | folders) - found.keys()),
    ):
        if odd:
            raise SignatureInvalid(
                f"the bundle has {what} files: {', '.join(sorted(odd)[:5])}; fetch it again"
            )
    for name, path in found.items():
        status = path.lstat()
        if not (stat.S_ISDIR if name in folders else stat.S_ISREG)(status.st_mode):
            raise SignatureInvalid(f"{name} of the bundle is not a regular file; fetch it again")
        _check_largest(name, status.st_size)


def _check_largest(name: str, size: int) -> None:
    largest = LARGEST_FILE if name in LARGE else LARGEST_JSON
    if size > largest:
        raise SignatureInvalid(
            f"{name} of the bundle has {size} bytes, expected at most {largest}; fetch it again"
        )


def check_sizes(bundle: Path, manifest: ReleaseManifest) -> None:
    """Checks the size of every file against the manifest; opens no file.

    Raises:
      SignatureInvalid: a size differs; the message names the file.
    """
    if manifest.sizes.keys() != manifest.files.keys():
        raise SignatureInvalid(
            "the manifest lists sizes and digests of different files; fetch the bundle again"
        )
    for name in sorted(ALL - {MANIFEST}):
        found, wanted = (bundle / name).stat().st_size, manifest.sizes.get(name)
        if found != wanted:
            raise SignatureInvalid(
                f"{name} has {found} bytes, but the manifest lists {wanted}; fetch the bundle again"
            )


def check_files(bundle: Path, manifest: ReleaseManifest) -> None:
    """Checks the digest of every file of a bundle against the manifest.

    Raises:
      SignatureInvalid: a digest differs; the message names the file.
    """
    named = ALL - {MANIFEST}
    if manifest.files.keys() != named:
        raise SignatureInvalid(
            "the manifest does not list the files of a bundle; fetch the bundle again"
        )
    for name in sorted(named):
        size = manifest.sizes[name]
        if manifest.files[name] != limited_digest(bundle / name, size):
            raise SignatureInvalid(
                f"the digest of {name} differs from the manifest; fetch the bundle again"
            )


@contextmanager
def fetched(found: Located) -> Iterator[Path]:
    """Yields a bundle as a local folder.

    From a bucket, only files of a bundle within the size limits are downloaded.

    Raises:
      SignatureInvalid: the bucket holds an extra or too large file.
      ArtifactError: the tree is incomplete, or does not match its index.
      StorageError: the tree cannot be read.
    """
    store = open_store(found.address)
    if store.local_root is None:
        for entry in store.entries():
            if entry.name not in ALL:
                raise SignatureInvalid(f"the bundle has extra files: {entry.name}; fetch it again")
            _check_largest(entry.name, entry.size)
    with local_tree(found.address) as bundle:
        yield bundle


def read_marker(store: Store, name: str) -> Written[ReleaseManifest] | None:
    """Reads a marker; returns None if it does not exist.

    Raises:
      ArtifactError: the marker is damaged.
    """
    try:
        return parse(store.read(name), ReleaseManifest, name)
    except FileNotFoundError:
        return None


def tree_of(store: Store, marker: Written[ReleaseManifest]) -> str:
    """Returns where `Store.create_tree` puts the bundle of a marker."""
    body = marker.body
    return store.tree_name(f"{body.name}/{body.version}", {**body.files, MANIFEST: marker.sha})


@dataclass(frozen=True)
class Located:
    """The location of a bundle, and the marker that led to it."""

    address: str
    """Address of the bundle's tree."""
    marker: Written[ReleaseManifest] | None
    """Marker of the version in a bucket; None if the address names the tree."""


def check_marker(found: Located, manifest: Written[ReleaseManifest]) -> None:
    """Checks that the marker that led to a bundle, if any, is its manifest, under its own name.

    The signature of the manifest is checked by the caller.

    Raises:
      SignatureInvalid: the marker does not match: an old release could pose as a newer one.
    """
    if found.marker is None:
        return
    body = found.marker.body
    if not found.address.rpartition("/")[0].endswith(f"/{body.name}/{body.version}"):
        raise SignatureInvalid(
            f"the release marker is that of {body.name} {body.version}, and stands under another "
            "name; find out who may write to the store of releases"
        )
    if found.marker.data != manifest.data:
        raise SignatureInvalid(
            "the release marker belongs to another bundle; find out who can write to the store of "
            "releases"
        )


def locate(uri: str) -> Located:
    """Finds the tree of a release.

    Args:
      uri: a bundle, or in a bucket `<releases>/<name>/<version>`, which its marker resolves.

    Raises:
      InputError: the address does not contain a release.
    """
    store = open_store(uri)
    if store.local_root is not None:
        if not store.local_root.is_dir():
            raise InputError(f"no release folder at {uri}; check the address")
        return Located(uri, None)
    parent, _, version = uri.rstrip("/").rpartition("/")
    if parent.endswith(":/"):
        raise InputError(f"{uri} is a whole bucket; name a release in it")
    marker = read_marker(open_store(parent), f"{version}.json")
    if marker is not None:
        return Located(join(uri, tree_of(store, marker).rpartition("/")[2]), marker)
    if not store.exists(MANIFEST):
        raise InputError(
            f"nothing was released at {uri}: there is neither a marker nor a bundle; check the "
            "address, or release again if the process was killed"
        )
    return Located(uri, None)


class Marker:
    """The marker of one version."""

    def __init__(self, store: Store, trust: TrustStore, identity: Identity, model_sha: str):
        self._store, self._trust = store, trust
        self._identity, self._model_sha = identity, model_sha
        self._tree = f"{identity.name}/{identity.version}"
        self._file = f"{self._tree}.json"

    def read(self) -> Written[ReleaseManifest] | None:
        """Returns the marker of this run and model, or None if the version is free.

        A marker is valid if it is the signed manifest of a bundle of this model in this store. The
        bundle's report may be another report of the same run: a run that was killed after the
        marker and resumed creates a new report, and the published bundle stays valid.

        Raises:
          Refused: the version is taken by another release, or the marker is invalid.
        """
        found = read_marker(self._store, self._file)
        if found is None:
            return None
        if not self._is_mine(found.body):
            raise Refused(
                f"{self._tree} is released already with another model; choose another "
                "release.version"
            )
        tree, wrong = tree_of(self._store, found), None
        try:
            there = self._store.exists(f"{tree}/{MANIFEST}")
            if there and self._stored(tree).data == found.data:
                return found
        except (ArtifactError, Refused, SignatureInvalid) as error:
            wrong = error
        raise Refused(
            f"The release marker {self._file} does not match a signed bundle of this run in "
            f"{self._store.uri}. Check who may write there, remove the marker, and release "
            "again."
        ) from wrong

    def publish(self, tree: Path) -> Written[ReleaseManifest]:
        """Stores the tree, then creates the marker; an existing finished tree is reused.

        Raises:
          Refused: the version is taken, or another process released it at the same time.
        """
        try:
            self._store.create_tree(tree, self._tree)
            manifest = read(tree / MANIFEST, ReleaseManifest)
        except FileExistsError:  # created earlier by a killed process of this run
            manifest = self._stored(self._tree)
        try:
            self._store.create(self._file, manifest.data)
        except FileExistsError:
            found = self.read()
            if found is None or found.data != manifest.data:
                raise Refused(
                    f"{self._tree} was released by another process at the same time, whose bundle "
                    "stands; run again to take it over, or choose another release.version"
                ) from None
        return manifest

    def _is_mine(self, manifest: ReleaseManifest) -> bool:
        return (
            manifest.identity == self._identity
            and manifest.files.get("backbone.keras") == self._model_sha
        )

    def _stored(self, name: str) -> Written[ReleaseManifest]:
        """Returns the manifest of a stored tree, after checking its signature and its run."""
        with local_tree(join(self._store.uri, name)) as tree:
            manifest = check_bundle(tree, self._trust)  # any writer of the store could create it
            report = read(tree / REPORT, PrivacyReport).body
        run = (self._identity.run_id, self._identity.attempt)
        if not self._is_mine(manifest.body) or (report.run_id, report.attempt) != run:
            raise Refused(
                f"{self._tree} holds another model that was never released; choose another "
                "release.version, or remove it"
            )
        return manifest


@contextmanager
def read_release(context: StepContext, uri: str) -> Iterator[Path]:
    """Yields the model file of an earlier release after checking it with this ledger's keys.

    Raises:
      ArtifactError: the release does not exist or cannot be read.
      SignatureInvalid: a file was changed, or the signing key is not trusted.
      StorageError: the store cannot be reached.
    """
    found = locate(uri)
    with fetched(found) as bundle:
        try:
            manifest, _ = check_origin(bundle, context.trust)
            check_marker(found, manifest)
        except (ArtifactError, SignatureInvalid) as error:
            raise SignatureInvalid(
                f"evaluation.previous_release {uri} is not a release under the keys of this "
                f"ledger: {error}; set it to one that release_model published, or omit it"
            ) from error
        yield bundle / "backbone.keras"
