"""The files of a release bundle, and the digests and signatures over them.

    backbone.keras  saved_model/                the model, and the same for serving
    preprocessing.py  parity.json               how a photo is read, and what that must give
    README.md  privacy_report.html              for people: the model card, the report
    *.json  rounds.jsonl                        the evidence: enough to decide again, offline
    ledger.jsonl                                the policy's ledger up to the release
    lineage.jsonl  attestation.json             where it comes from; the verdict, signed
    manifest.json  model.sig                    digests of all files; OpenSSF model signature

Raw artifacts cannot enter a bundle: `place` accepts only `Noised | Public`.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from fedemb.documents.artifacts import Artifact, require_publishable
from fedemb.documents.evidence import sentence_of
from fedemb.documents.release import BundleManifest, ReleaseMarker
from fedemb.errors import ArtifactError, InputError, SignatureInvalid
from fedemb.foundation.canonical_json import LARGEST_JSON, JsonObject, json_object
from fedemb.foundation.collection import light_import
from fedemb.foundation.digests import file_digest, limited_digest, tree_digests
from fedemb.foundation.document import Written, parse, read
from fedemb.foundation.files import write_bytes
from fedemb.keys.signatures import Signer, write_signed
from fedemb.keys.trust import TrustStore
from fedemb.ledger import Ledger
from fedemb.ledger.chain import Chain
from fedemb.storage import LocalStore, Store, join, local_tree, open_store

PREDICATE_TYPE = "urn:fedemb:verdict:1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
SIGNATURE = "model.sig"
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
    "attestation.json",
    "backbone.keras",
    "config.json",
    "ledger.jsonl",
    "lineage.jsonl",
    "manifest.json",
    "model.json",
    "model.sig",
    PARITY,
    PREPROCESSING,
    "privacy_report.html",
    "rounds.jsonl",
)
"""The complete list of files of a bundle, except `saved_model/`."""
SUBJECTS = ("backbone.keras", REPORT, MANIFEST)
"""Subjects of the attestation."""
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
"""Maximum bytes of a file of `LARGE` if the manifest has no sizes; no larger file can be released,
see `model_files.MEMORY`."""
NOT_LISTED = frozenset((MANIFEST, SIGNATURE, "attestation.json"))
"""Files that the manifest cannot list, because they are created after it."""


def place(artifact: Artifact, bundle: Path, name: str) -> None:
    """Copies one publishable file into the bundle.

    Raises:
      Refused: the artifact is raw.
    """
    require_publishable(artifact)
    write_bytes(bundle / name, artifact.path.read_bytes())


def write_manifest(bundle: Path, name: str, version: str, signer: Signer) -> None:
    """Writes the signed manifest with the digests and sizes of all files written so far."""
    files = tree_digests(bundle)
    sizes = {file: (bundle / file).stat().st_size for file in files}
    manifest = BundleManifest(name=name, version=version, files=files, sizes=sizes)
    write_signed(bundle / MANIFEST, manifest, signer)


class _Digest(TypedDict):
    sha256: str


class _Subject(TypedDict):
    name: str
    digest: _Digest


class Statement(TypedDict):
    """An in-toto statement on files of a bundle."""

    _type: str
    subject: list[_Subject]
    """Names of the files, and their digests."""
    predicateType: str
    predicate: JsonObject
    """The verdict."""


def write_attestation(bundle: Path, name: str, verdict: JsonObject, signer: Signer) -> Statement:
    """Writes the verdict as an in-toto statement in a signed DSSE envelope.

    The subjects are the digests of the model, the report and the manifest.
    """
    statement: Statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {"name": f"{name}/{item}", "digest": {"sha256": file_digest(bundle / item)}}
            for item in SUBJECTS
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": verdict,
    }
    payload = json.dumps(statement, sort_keys=True).encode()
    value = signer.sign_bytes(_pae(payload))
    envelope = {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(payload).decode(),
        "signatures": [{"keyid": signer.key_id, "sig": base64.b64encode(value).decode()}],
    }
    text = json.dumps(envelope, sort_keys=True, indent=1) + "\n"
    write_bytes(bundle / "attestation.json", text.encode())
    return statement


def read_attestation(bundle: Path, trust: TrustStore) -> Statement:
    """Returns the in-toto statement of a bundle after checking its envelope.

    Raises:
      SignatureInvalid: not signed by a key trusted to release, or changed.
      ArtifactError: not a valid envelope.
    """
    try:
        envelope = json.loads((bundle / "attestation.json").read_bytes())
        payload = base64.b64decode(envelope["payload"], validate=True)
        (signature,) = envelope["signatures"]
        value = base64.b64decode(signature["sig"], validate=True)
        if envelope["payloadType"] != PAYLOAD_TYPE:
            raise ValueError(f"the payload type is not {PAYLOAD_TYPE}; fetch the bundle again")
        trust.verify_bytes(_pae(payload), value, "release", signature["keyid"], "attestation.json")
        statement: Statement = json.loads(payload)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            "attestation.json is not a signed in-toto statement; fetch the bundle again"
        ) from error
    return statement


def _pae(payload: bytes) -> bytes:
    """Returns the DSSE pre-authentication encoding."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


@functools.cache
def _model_signing() -> tuple[ModuleType, ModuleType, ModuleType]:
    """Returns `hashing`, `signing` and `verifying`, without the client of keys at Google Cloud."""
    with light_import("google.cloud.kms"):
        from model_signing import hashing, signing, verifying
    return hashing, signing, verifying


def sign_bundle(bundle: Path, key: EllipticCurvePrivateKey) -> None:
    """Signs every file of the bundle with OpenSSF model_signing."""
    hashing, signing, _ = _model_signing()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with _in_memory(pem) as path:
        config = signing.Config().use_elliptic_key_signer(private_key=path)
    config.set_hashing_config(_hashing(hashing))
    config.sign(bundle, bundle / SIGNATURE)


@contextmanager
def _in_memory(pem: bytes) -> Iterator[Path]:
    """Yields a path that can be read once: a pipe, because a file would remain after a kill."""
    reading, writing = os.pipe()
    try:
        os.write(writing, pem)  # a key is much smaller than the pipe buffer
        os.close(writing)
        yield Path(f"/dev/fd/{reading}")
    finally:
        os.close(reading)


def check_signature(bundle: Path, trust: TrustStore) -> None:
    """Checks the model signature against the pinned keys.

    Raises:
      SignatureInvalid: missing, signed by an unpinned key, or a file was changed, added or removed.
    """
    hashing, _, verifying = _model_signing()
    keys, failure = trust.bundle_keys(), None
    for public in keys:
        pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        with _in_memory(pem) as path:
            config = verifying.Config().use_elliptic_key_verifier(public_key=path)
        config.set_hashing_config(_hashing(hashing))
        try:
            config.verify(bundle, bundle / SIGNATURE)
            return
        except Exception as error:  # the library raises many types; all mean invalid
            failure = error
    raise SignatureInvalid(
        "model.sig is not a signature of these files by a trusted key"
        + ("" if keys else "; the trust store has no key of the role bundle")
        + ". Fetch the bundle again from its publisher"
    ) from failure


def check_seal(bundle: Path, trust: TrustStore) -> Written[BundleManifest]:
    """Checks that a bundle is complete and signed; parses no file but its manifest, and returns it.

    Raises:
      SignatureInvalid: its manifest or `model.sig` is not signed by a trusted key, or a file is
          missing, extra, or does not match the manifest.
      ArtifactError: the manifest is missing or unreadable.
    """
    check_form(bundle)
    manifest = read(bundle / MANIFEST, BundleManifest)
    trust.check(manifest)
    check_sizes(bundle, manifest.body)
    check_files(bundle, manifest.body)
    check_signature(bundle, trust)
    return manifest


def check_pinned(bundle: Path, pinned: TrustStore) -> tuple[Written[BundleManifest], Ledger]:
    """Checks a bundle like `check_seal`, with pinned keys only; its ledger lists the newest keys.

    Raises:
      SignatureInvalid: as `check_seal`, or the ledger of the bundle is invalid.
      ArtifactError: the manifest is missing or unreadable.
    """
    manifest, copy = check_origin(bundle, pinned)
    check_signature(bundle, copy.chain.trust)
    return manifest, copy


def check_origin(bundle: Path, pinned: TrustStore) -> tuple[Written[BundleManifest], Ledger]:
    """Checks a bundle like `check_pinned` without `model.sig`; model_signing is not required.

    The manifest lists the same files and is signed by the release step's key. The check proves that
    the model and its preprocessing are the released ones. It does not check the release decision.
    """
    check_form(bundle)
    manifest = read(bundle / MANIFEST, BundleManifest)
    # The trusted keys may be listed only in the ledger, so sizes are compared before the signature:
    # a wrong size can only refuse. No other file is read before the manifest's signature is valid.
    check_sizes(bundle, manifest.body)
    copy = ledger_copy(bundle, pinned, _size_of(bundle, manifest.body, LEDGER))
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
    with path.open("rb") as file:
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
            f"{bundle} is the folder of a run; pass its release, which `fedemb report` prints"
        )
    if not found.keys() & ALL:
        raise SignatureInvalid(
            f"{bundle} is not a release, because it has no {MANIFEST}; pass the folder that "
            "`fedemb report` prints"
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


def check_sizes(bundle: Path, manifest: BundleManifest) -> None:
    """Checks the size of every file against the manifest; opens no file.

    Raises:
      SignatureInvalid: a size differs; the message names the file.
    """
    if manifest.sizes is None:  # version 1: `check_form` bounds the sizes
        return
    if manifest.sizes.keys() != manifest.files.keys():
        raise SignatureInvalid(
            "the manifest lists sizes and digests of different files; fetch the bundle again"
        )
    for name in sorted(ALL - NOT_LISTED):
        found, wanted = (bundle / name).stat().st_size, manifest.sizes.get(name)
        if found != wanted:
            raise SignatureInvalid(
                f"{name} has {found} bytes, but the manifest lists {wanted}; fetch the bundle again"
            )


def _size_of(bundle: Path, manifest: BundleManifest, name: str) -> int:
    """Returns the maximum number of bytes to read from a file."""
    if manifest.sizes is not None and name in manifest.sizes:
        return manifest.sizes[name]
    return (bundle / name).stat().st_size


def check_files(bundle: Path, manifest: BundleManifest) -> None:
    """Checks the digest of every file of a bundle against the manifest.

    Raises:
      SignatureInvalid: a digest differs; the message names the file.
    """
    named = ALL - NOT_LISTED
    if manifest.files.keys() != named:
        raise SignatureInvalid(
            "the manifest does not list the files of a bundle; fetch the bundle again"
        )
    for name in sorted(named):
        size = _size_of(bundle, manifest, name)
        if manifest.files[name] != limited_digest(bundle / name, size):
            raise SignatureInvalid(
                f"the digest of {name} differs from the manifest; fetch the bundle again"
            )


def _hashing(hashing: ModuleType) -> Any:
    return hashing.Config().set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)


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


def read_marker(store: Store, name: str) -> Written[ReleaseMarker] | None:
    """Reads a marker; returns None if it does not exist.

    Raises:
      ArtifactError: the marker is damaged.
    """
    try:
        return parse(store.read(name), ReleaseMarker, name)
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class Located:
    """The location of a bundle, and the marker that led to it."""

    address: str
    """Address of the bundle's tree."""
    marker: Written[ReleaseMarker] | None
    """Marker of the version in a bucket; None if the address names the tree."""


def check_marker(found: Located, manifest: Written[BundleManifest], trust: TrustStore) -> None:
    """Checks that the marker that led to a bundle, if any, was signed for this bundle and name.

    Raises:
      SignatureInvalid: the marker does not match: an old release could pose as a newer one.
    """
    if found.marker is None:
        return
    trust.check(found.marker)
    body, named = found.marker.body, (manifest.body.name, manifest.body.version)
    if not found.address.endswith(f"/{body.tree}") or (body.name, body.version) != named:
        raise SignatureInvalid(
            f"the release marker is that of {body.name} {body.version}, and stands under another "
            "name; find out who may write to the store of releases"
        )
    if body.bundle_sha != manifest.sha:
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
        return Located(join(uri, marker.body.tree.rpartition("/")[2]), marker)
    if not store.exists(MANIFEST):
        raise InputError(
            f"nothing was released at {uri}: there is neither a marker nor a bundle; check the "
            "address, or release again if the process was killed"
        )
    return Located(uri, None)
