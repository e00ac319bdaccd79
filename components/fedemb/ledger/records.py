"""One entry of the privacy ledger: fields, closed-world codec, signature.

A record is canonical JSON and nothing else: its bytes are compared with their own re-encoding, so a
changed blank, a repeated key or another spelling of a number is a broken record. Records of version
1 stay readable for ever; a field is never removed and never changes its meaning.

Specification: docs/ledger.md#rules.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from fedemb.documents.artifacts import canonical_json, parse_json, sha256_hex
from fedemb.errors import ArtifactError, LedgerError
from fedemb.keys.signatures import Signer
from fedemb.keys.trust import APPROVER, TrustStore

SCHEMA = "fedemb/ledger_record/1"
GENESIS = "0" * 64
"""`previous` of record 0."""

_HEX = re.compile(r"[0-9a-f]{64}")
_HEADER = (
    "schema",
    "policy_id",
    "sequence",
    "previous",
    "kind",
    "run_id",
    "attempt",
    "time",
    "actor",
    "body",
    "signature",
)


def _is_str(value: object) -> bool:
    return isinstance(value, str)


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_dict(value: object) -> bool:
    return isinstance(value, dict)


def _is_probability(value: object) -> bool:
    return isinstance(value, float) and 0.0 < value < 1.0


def _is_names(value: object) -> bool:
    if not isinstance(value, list):
        return False
    names = cast("list[object]", value)
    return bool(names) and all(map(_is_str, names)) and len(set(names)) == len(names)


def _is_digests(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return all(map(_is_digest, cast("dict[str, object]", value).values()))


def _is_keys(value: object) -> bool:
    """The public halves of new signing keys; `TrustStore.rotated` looks closer."""
    if not isinstance(value, list):
        return False
    keys = cast("list[object]", value)
    return bool(keys) and all(map(_is_dict, keys))


def _is_approvers(value: object) -> bool:
    """Name -> public key; `TrustStore.with_approvers` looks closer."""
    if not isinstance(value, dict):
        return False
    entries = cast("dict[str, object]", value)
    return all(name.strip() == name != "" and _is_digest(key) for name, key in entries.items())


_BODIES: dict[str, dict[str, Callable[[object], bool]]] = {
    "policy": {"terms": _is_dict},
    "waiver": {"code": _is_str, "model_sha": _is_digest, "reason": _is_str},
    "keys": {"keys": _is_keys, "reason": _is_str},
    "approvers": {"approvers": _is_approvers, "reason": _is_str},
    "reserve": {
        "purpose": lambda value: value in ("release", "simulation"),
        "blocks": _is_names,
        "blocks_requested": _is_names,
        "event": _is_dict,
        "relation": _is_str,
        "delta": _is_probability,
        "rounds": _is_count,
        "plan_sha": _is_digest,
        "config_sha": _is_digest,
        "code_sha": _is_digest,
        "input": _is_str,
    },
    "bind": {
        "reservation": _is_count,
        "inputs_sha": _is_digest,
        "commitments": _is_digests,
        "private_root": _is_digest,
    },
    "commit": {"reservation": _is_count, "rounds_started": _is_count, "round_log": _is_dict},
    "look": {"reservation": _is_count, "model_sha": _is_digest},
    "approval": {"reservation": _is_count, "model_sha": _is_digest, "report_sha": _is_digest},
    "void": {"reservation": _is_count, "reason": _is_str},
    "release": {
        "reservation": _is_count,
        "model_sha": _is_digest,
        "report_sha": _is_digest,
        "bundle_sha": _is_digest,
        "name": _is_str,
        "version": _is_str,
    },
}
"""Kinds and their fields; see `signing_role` for who signs which."""


@dataclass(frozen=True)
class Record:
    """An entry as it stands in the ledger."""

    policy_id: str
    sequence: int
    previous: str
    """SHA-256 of the bytes of the record before."""
    kind: str
    run_id: str
    """Empty for what the policy owner signs."""
    attempt: int
    time: str
    """UTC, for people; the order is that of `sequence` alone."""
    actor: str
    body: Mapping[str, Any]
    signature: Mapping[str, str]
    sha: str
    """SHA-256 of the bytes."""

    @property
    def name(self) -> str:
        """Where it lies in the store."""
        return record_name(self.policy_id, self.sequence)

    @functools.cached_property
    def event(self) -> bytes:
        """Canonical JSON of a reservation's event."""
        return canonical_json(self.body["event"])

    def unsigned(self) -> dict[str, Any]:
        """The content the signature covers."""
        return {
            "schema": SCHEMA,
            "policy_id": self.policy_id,
            "sequence": self.sequence,
            "previous": self.previous,
            "kind": self.kind,
            "run_id": self.run_id,
            "attempt": self.attempt,
            "time": self.time,
            "actor": self.actor,
            "body": self.body,
        }

    def verify(self, trust: TrustStore) -> None:
        """Checks the signature.

        Raises:
          SignatureInvalid: by an unknown key, or not of this content.
        """
        role = signing_role(self.kind)
        trust.verify(self.unsigned(), dict(self.signature), role, self.name, at=self.sequence)


def record_name(policy_id: str, sequence: int) -> str:
    """Name of a record in the store."""
    return f"{policy_id}/{sequence:08d}.json"


def signing_role(kind: str) -> str:
    """The role whose key signs a kind of record."""
    if kind == "look":
        return "evaluate"
    if kind == "approval":
        return APPROVER
    return "policy" if kind in ("policy", "waiver", "keys", "approvers") else "ledger"


def encode_record(
    *,
    policy_id: str,
    sequence: int,
    previous: str,
    kind: str,
    run_id: str,
    attempt: int,
    time: str,
    actor: str,
    body: Mapping[str, Any],
    signer: Signer,
) -> bytes:
    """Returns the signed bytes of a record.

    Raises:
      LedgerError: the content is not that of its kind, or the signer has not the kind's role.
    """
    if signer.role != signing_role(kind):
        raise LedgerError(
            f"a {kind} record is signed in the role {signing_role(kind)!r}, got {signer.role!r}"
        )
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "policy_id": policy_id,
        "sequence": sequence,
        "previous": previous,
        "kind": kind,
        "run_id": run_id,
        "attempt": attempt,
        "time": time,
        "actor": actor,
        "body": dict(body),
    }
    document["signature"] = signer.sign(document)
    data = canonical_json(document)
    decode_record(data, record_name(policy_id, sequence))
    return data


def decode_record(data: bytes, name: str, *, canonical: bool = True) -> Record:
    """Reads a record's bytes; the signature is checked by `Record.verify`.

    Args:
      data: the bytes as stored.
      name: name in the store, which must be that of the record's policy and sequence.
      canonical: False leaves to the hash chain that the bytes are the one way to write the record.

    Raises:
      LedgerError: not a record of this version, byte for byte.
    """
    try:
        document = parse_json(data, SCHEMA, name)
        if canonical and canonical_json(document) != data:
            raise LedgerError(f"ledger record {name} is not in canonical form: it was changed")
    except (ArtifactError, RecursionError) as error:
        raise LedgerError(f"ledger record {name} is broken: {error}") from error
    _check(document, name)
    return Record(
        **{key: document[key] for key in _HEADER if key != "schema"}, sha=sha256_hex(data)
    )


def _check(document: dict[str, Any], name: str) -> None:
    def need(holds: bool, problem: str) -> None:
        if not holds:
            raise LedgerError(
                f"ledger record {name} is broken: {problem}; restore the ledger from its backup"
            )

    need(set(document) == set(_HEADER), "it has unknown fields or lacks some")
    policy_id, sequence, kind = document["policy_id"], document["sequence"], document["kind"]
    texts = (policy_id, kind, document["run_id"], document["time"], document["actor"])
    need(all(map(_is_str, texts)), "its policy, kind, run, time or actor is no text")
    need(_is_count(sequence) and _is_count(document["attempt"]), "a number is no count")
    need(record_name(policy_id, sequence) == name, "it belongs elsewhere")
    need(_is_digest(document["previous"]), "its previous digest is malformed")
    need(_is_dict(document["signature"]), "it is not signed")
    need(kind in _BODIES, f"its kind {kind!r} is unknown to this version")
    need(_is_dict(document["body"]), "its body is no object")
    fields, body = _BODIES[kind], cast("dict[str, object]", document["body"])
    need(set(body) == set(fields), f"a {kind} record has exactly the fields {', '.join(fields)}")
    for field, fits in fields.items():
        need(fits(body[field]), f"its field {field} has a value of another type or out of bounds")
