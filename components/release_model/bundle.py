"""What a release holds, and the digests and signatures over it.

    backbone.keras  saved_model/                the model, and the same for serving
    MODEL_CARD.md  privacy_report.html          for people
    *.json  rounds.jsonl                        the evidence: enough to decide again, offline
    ledger.jsonl                                the policy's ledger up to the release
    lineage.jsonl  attestation.json             where it comes from; the verdict, signed
    manifest.json  model.sig                    digests of all files; OpenSSF model signature

Raw artifacts cannot get in: `assemble` takes `Noised | Public` only and checks every tensor.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from fedemb.documents.artifacts import (
    Artifact,
    file_digest,
    require_publishable,
    tree_digests,
    write_bytes,
    write_json,
)
from fedemb.errors import ArtifactError, SignatureInvalid
from fedemb.keys.signatures import Signer
from fedemb.keys.trust import TrustStore

MANIFEST_SCHEMA = "fedemb/bundle/1"
PREDICATE_TYPE = "urn:fedemb:verdict:1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
SIGNATURE = "model.sig"
MANIFEST = "manifest.json"
DOCUMENTS = {
    "plan": "privacy_plan.json",
    "reservation": "reservation.json",
    "users": "users_manifest.json",
    "model": "model.json",
    "audit": "audit_report.json",
    "utility": "utility_report.json",
    "report": "privacy_report.json",
}
"""Kind of evidence to file name."""
FILES = (
    *DOCUMENTS.values(),
    "MODEL_CARD.md",
    "attestation.json",
    "backbone.keras",
    "config.json",
    "ledger.jsonl",
    "lineage.jsonl",
    "manifest.json",
    "model.sig",
    "privacy_report.html",
    "rounds.jsonl",
    "verdict.json",
)
"""Every file of a bundle beside `saved_model/`, and no other."""
SUBJECTS = ("backbone.keras", DOCUMENTS["report"], MANIFEST)
"""Files the attestation is about."""
SAVED_MODEL = "saved_model"
SAVED_MODEL_FILES = (
    "fingerprint.pb",
    "saved_model.pb",
    "variables/variables.data-00000-of-00001",
    "variables/variables.index",
)


def place(artifact: Artifact, bundle: Path, name: str) -> None:
    """Copies one publishable file into the bundle.

    Raises:
      Refused: it is raw.
    """
    require_publishable(artifact)
    write_bytes(bundle / name, artifact.path.read_bytes())


def write_manifest(bundle: Path, header: dict[str, Any]) -> str:
    """Writes the digests of all files so far and returns the digest of the manifest."""
    digests = tree_digests(bundle)
    write_json(bundle / MANIFEST, MANIFEST_SCHEMA, {**header, "files": digests})
    return file_digest(bundle / MANIFEST)


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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "key.pem")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
        config = signing.Config().use_elliptic_key_signer(private_key=path)
        config.set_hashing_config(_hashing(hashing))
        config.sign(bundle, bundle / SIGNATURE)


def check_signature(bundle: Path, trust: TrustStore) -> None:
    """Checks the model signature against the pinned keys.

    Raises:
      SignatureInvalid: missing, by no pinned key, or a file was changed, added or removed.
    """
    from model_signing import hashing, verifying

    keys, failure = trust.bundle_keys(), None
    for public in keys:
        pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        with tempfile.TemporaryDirectory() as folder:
            key = Path(folder, "key.pub")
            key.write_bytes(pem)
            config = verifying.Config().use_elliptic_key_verifier(public_key=key)
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


def _hashing(hashing: Any) -> Any:
    return hashing.Config().set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)
