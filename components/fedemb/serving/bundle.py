"""What a release holds, and the digests and signatures over it.

    backbone.keras  saved_model/                the model, and the same for serving
    preprocessing.py  parity.json               how a photo is read, and what that must give
    README.md  privacy_report.html              for people: the model card, the report
    *.json  rounds.jsonl                        the evidence: enough to decide again, offline
    ledger.jsonl                                the policy's ledger up to the release
    lineage.jsonl  attestation.json             where it comes from; the verdict, signed
    manifest.json  model.sig                    digests of all files; OpenSSF model signature

Raw artifacts cannot get in: `place` takes `Noised | Public` only.
"""

from __future__ import annotations

import base64
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from fedemb.foundation.canonical_json import LARGEST_JSON, strict_json
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
"""Documents of a run by the name of their artifact, beside those of the model."""
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
"""Every file of a bundle beside `saved_model/`, and no other."""
SUBJECTS = ("backbone.keras", REPORT, MANIFEST)
"""Files the attestation is about."""
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
"""Files that may be larger than one JSON text."""
LARGEST_FILE = 4 << 30
"""Bytes of a file of `LARGE`, where the manifest names no sizes: nothing larger can be released,
see `model_files.MEMORY`."""
NOT_LISTED = frozenset((MANIFEST, SIGNATURE, "attestation.json"))
"""Files that the manifest cannot name: they are made after it."""


def place(artifact: Artifact, bundle: Path, name: str) -> None:
    """Copies one publishable file into the bundle.

    Raises:
      Refused: it is raw.
    """
    require_publishable(artifact)
    write_bytes(bundle / name, artifact.path.read_bytes())


def write_manifest(bundle: Path, name: str, version: str, signer: Signer) -> None:
    """Writes the digests and sizes of all files so far, signed."""
    files = tree_digests(bundle)
    sizes = {file: (bundle / file).stat().st_size for file in files}
    manifest = BundleManifest(name=name, version=version, files=files, sizes=sizes)
    write_signed(bundle / MANIFEST, manifest, signer)


def write_attestation(
    bundle: Path, name: str, verdict: dict[str, Any], signer: Signer
) -> dict[str, Any]:
    """Writes the verdict as an in-toto statement in a signed DSSE envelope.

    Subjects are the model, the report and the manifest by their digests.
    """
    statement = {
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


def read_attestation(bundle: Path, trust: TrustStore) -> dict[str, Any]:
    """Returns the in-toto statement of a bundle after checking its envelope.

    Raises:
      SignatureInvalid: not signed by a key trusted to release, or changed.
      ArtifactError: not such an envelope.
    """
    try:
        envelope = json.loads((bundle / "attestation.json").read_bytes())
        payload = base64.b64decode(envelope["payload"], validate=True)
        (signature,) = envelope["signatures"]
        value = base64.b64decode(signature["sig"], validate=True)
        if envelope["payloadType"] != PAYLOAD_TYPE:
            raise ValueError("another payload type")
        trust.verify_bytes(_pae(payload), value, "release", signature["keyid"], "attestation.json")
        statement = json.loads(payload)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            "attestation.json is no signed in-toto statement; fetch the bundle again"
        ) from error
    return statement


def _pae(payload: bytes) -> bytes:
    """DSSE pre-authentication encoding."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def sign_bundle(bundle: Path, key: EllipticCurvePrivateKey) -> None:
    """Signs every file of the bundle with OpenSSF model_signing."""
    from model_signing import hashing, signing

    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with _in_memory(pem) as path:
        config = signing.Config().use_elliptic_key_signer(private_key=path)
    config.set_hashing_config(_hashing(hashing))
    config.sign(bundle, bundle / SIGNATURE)


@contextmanager
def _in_memory(pem: bytes) -> Iterator[Path]:
    """A path to read a key from, once: a pipe, as a file would outlive a killed process."""
    reading, writing = os.pipe()
    try:
        os.write(writing, pem)  # a key is far smaller than a pipe holds
        os.close(writing)
        yield Path(f"/dev/fd/{reading}")
    finally:
        os.close(reading)


def check_signature(bundle: Path, trust: TrustStore) -> None:
    """Checks the model signature against the pinned keys.

    Raises:
      SignatureInvalid: missing, by no pinned key, or a file was changed, added or removed.
    """
    from model_signing import hashing, verifying

    keys, failure = trust.bundle_keys(), None
    for public in keys:
        pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        with _in_memory(pem) as path:
            config = verifying.Config().use_elliptic_key_verifier(public_key=path)
        config.set_hashing_config(_hashing(hashing))
        try:
            config.verify(bundle, bundle / SIGNATURE)
            return
        except Exception as error:  # the library raises many types; all mean no
            failure = error
    raise SignatureInvalid(
        "model.sig is not a signature of these files by a key of the trust store"
        + ("" if keys else ", which pins none of the role bundle")
        + "; fetch the bundle again from who released it"
    ) from failure


def check_seal(bundle: Path, trust: TrustStore) -> Written[BundleManifest]:
    """Checks that a bundle is whole and signed, without looking into any file but its manifest.

    Returns:
      The manifest.

    Raises:
      SignatureInvalid: its manifest or `model.sig` is not signed by a trusted key, or a file is
        missing, extra, or not what the manifest says.
      ArtifactError: there is no manifest that can be read.
    """
    check_form(bundle)
    manifest = _manifest(bundle, trust)
    check_signature(bundle, trust)
    return manifest


def check_pinned(bundle: Path, pinned: TrustStore) -> tuple[Written[BundleManifest], Ledger]:
    """As `check_seal`, for those who hold pinned keys only: the ledger inside leads to the newest.

    Returns:
      The manifest and the ledger inside.

    Raises:
      SignatureInvalid: as `check_seal`, or the ledger inside does not hold.
      ArtifactError: there is no manifest that can be read.
    """
    manifest, copy = check_origin(bundle, pinned)
    check_signature(bundle, copy.chain.trust)
    return manifest, copy


def check_origin(bundle: Path, pinned: TrustStore) -> tuple[Written[BundleManifest], Ledger]:
    """As `check_pinned` without `model.sig`, so also where model_signing is not installed.

    The manifest names the same files, and the release step's key signs it: the model and how its
    photos are read are those that were released. Whether they should have been is not asked.
    """
    check_form(bundle)
    manifest = read(bundle / MANIFEST, BundleManifest)
    # The trusted keys may be listed only in the ledger. So sizes are compared before the signature:
    # a wrong size can only refuse. No other file is read before the manifest's signature is valid.
    check_sizes(bundle, manifest.body)
    copy = ledger_copy(bundle, pinned, _size_of(bundle, manifest.body, LEDGER))
    copy.chain.trust.check(manifest)
    check_files(bundle, manifest.body)
    return manifest, copy


def _manifest(bundle: Path, trust: TrustStore) -> Written[BundleManifest]:
    manifest = read(bundle / MANIFEST, BundleManifest)
    trust.check(manifest)
    check_sizes(bundle, manifest.body)
    check_files(bundle, manifest.body)
    return manifest


def ledger_copy(bundle: Path, pinned: TrustStore, size: int = LARGEST_FILE) -> Ledger:
    """The ledger inside a bundle; its store is a folder that does not exist.

    Records are read and verified one by one: nothing behind the first broken one is read.

    Args:
      bundle: the folder.
      pinned: keys trusted beforehand.
      size: bytes that the file may have.

    Raises:
      SignatureInvalid: it is broken, or not signed by keys that the pinned ones lead to.
    """
    chain: Chain | None = None
    try:
        for record in _lines(bundle / LEDGER, size):
            if chain is None:
                policy_id = strict_json(record, "record 0")["policy_id"]
                chain = Chain(LocalStore(bundle / "no_store"), policy_id, pinned)
            chain.extend([record])
        if chain is None:
            raise ArtifactError("it holds no record; fetch the bundle again")
        return Ledger(chain)
    except Exception as error:  # fails closed
        raise SignatureInvalid(
            f"the ledger inside the bundle is not valid: {sentence_of(error)}"
        ) from error


def _lines(path: Path, size: int) -> Iterator[bytes]:
    """Lines of a file without their ends, one in memory at a time.

    Raises:
      ArtifactError: a line, or all of them, are too long, or the last one has no end.
    """
    left = size
    with path.open("rb") as file:
        while line := file.readline(LARGEST_JSON + 1):
            left -= len(line)
            if len(line) > LARGEST_JSON or left < 0 or not line.endswith(b"\n"):
                raise ArtifactError(f"{path.name} is longer than it may be, or cut; fetch it again")
            yield line[:-1]


def check_form(bundle: Path) -> None:
    """A bundle has all its files, no other, none a link or a device, and no text without end.

    Raises:
      SignatureInvalid: and which file.
    """
    found = {path.relative_to(bundle).as_posix(): path for path in bundle.rglob("*")}
    folders = {SAVED_MODEL, f"{SAVED_MODEL}/variables"}
    if (bundle / "config.yaml").exists() and (bundle / "run.log").exists():
        raise SignatureInvalid(
            f"{bundle} is the folder of a run; name its release, as the last lines of the run do"
        )
    for what, odd in (
        ("extra", found.keys() - (ALL | folders)),
        ("missing", (ALL | folders) - found.keys()),
    ):
        if odd:
            raise SignatureInvalid(f"the bundle has {what} files: {', '.join(sorted(odd)[:5])}")
    for name, path in found.items():
        status = path.lstat()
        if not (stat.S_ISDIR if name in folders else stat.S_ISREG)(status.st_mode):
            raise SignatureInvalid(f"{name} of the bundle is a link or no file; fetch it again")
        _check_largest(name, status.st_size)


def _check_largest(name: str, size: int) -> None:
    largest = LARGEST_FILE if name in LARGE else LARGEST_JSON
    if size > largest:
        raise SignatureInvalid(f"{name} of the bundle has {size} bytes, expected at most {largest}")


def check_sizes(bundle: Path, manifest: BundleManifest) -> None:
    """Every file has as many bytes as the manifest says; no file is opened.

    Raises:
      SignatureInvalid: and which file.
    """
    if manifest.sizes is None:  # version 1: `check_form` bounds them
        return
    if manifest.sizes.keys() != manifest.files.keys():
        raise SignatureInvalid("the manifest names sizes of other files than it has digests of")
    for name in sorted(ALL - NOT_LISTED):
        found, wanted = (bundle / name).stat().st_size, manifest.sizes.get(name)
        if found != wanted:
            raise SignatureInvalid(
                f"{name} is not what the manifest says: {found} bytes instead of {wanted}; fetch "
                "the bundle again"
            )


def _size_of(bundle: Path, manifest: BundleManifest, name: str) -> int:
    """Bytes of a file that are read at most."""
    if manifest.sizes is not None and name in manifest.sizes:
        return manifest.sizes[name]
    return (bundle / name).stat().st_size


def check_files(bundle: Path, manifest: BundleManifest) -> None:
    """Every file of a bundle is the one its manifest names.

    Raises:
      SignatureInvalid: and which file.
    """
    named = ALL - NOT_LISTED
    if manifest.files.keys() != named:
        raise SignatureInvalid("the manifest names other files than a bundle has")
    for name in sorted(named):
        size = _size_of(bundle, manifest, name)
        if manifest.files[name] != limited_digest(bundle / name, size):
            raise SignatureInvalid(f"{name} is not what the manifest says; fetch the bundle again")


def _hashing(hashing: Any) -> Any:
    return hashing.Config().set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)


@contextmanager
def fetched(found: Located) -> Iterator[Path]:
    """Gives a bundle as a local folder.

    From a bucket it takes nothing that is not a file of a bundle, or larger than one may be.

    Raises:
      SignatureInvalid: the bucket holds such a file.
      ArtifactError: the tree is incomplete, or not what its index says.
      StorageError: it cannot be read.
    """
    store = open_store(found.address)
    if store.local_root is None:
        for entry in store.entries():
            if entry.name not in ALL:
                raise SignatureInvalid(f"the bundle has extra files: {entry.name}")
            _check_largest(entry.name, entry.size)
    with local_tree(found.address) as bundle:
        yield bundle


def read_marker(store: Store, name: str) -> Written[ReleaseMarker] | None:
    """Reads a marker; None if there is none.

    Raises:
      ArtifactError: it is damaged.
    """
    try:
        return parse(store.read(name), ReleaseMarker, name)
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class Located:
    """Where a bundle lies, and what said so."""

    address: str
    """Of its tree."""
    marker: Written[ReleaseMarker] | None
    """That of its version in a bucket; None where the tree itself was named."""


def check_marker(found: Located, manifest: Written[BundleManifest], trust: TrustStore) -> None:
    """The marker that led to a bundle, if one did, was signed for it and stands under its name.

    Raises:
      SignatureInvalid: it was not: an old release could pose as a newer one.
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
        raise SignatureInvalid("the release marker names another bundle than lies there")


def locate(uri: str) -> Located:
    """Finds the tree of a release.

    Args:
      uri: a bundle; or, in a bucket, `<releases>/<name>/<version>`, which its marker resolves.

    Raises:
      InputError: there is no release at the address.
    """
    store = open_store(uri)
    if store.local_root is not None:
        if not store.local_root.is_dir():
            raise InputError(f"there is no release folder {uri}; check the address")
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
