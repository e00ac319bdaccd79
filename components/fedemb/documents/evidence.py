"""What the gate judges by: the documents of a run, read strictly, with the digests of their bytes.

The report is compared with all of it; nothing of it is trusted for being in a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedemb.config import RunConfig
from fedemb.documents.artifacts import (
    canonical_json,
    config_digest,
    parse_json,
    sha256_hex,
    tree_digests,
)
from fedemb.documents.evidence_schema import SCHEMAS, document_problem
from fedemb.documents.model_files import stored_tensors
from fedemb.documents.run_artifacts import RunArtifacts
from fedemb.errors import ArtifactError, FedEmbError

MODEL_FILES = {"backbone.keras", "model.json", "rounds.jsonl"}
"""What a model artifact holds, and nothing else."""


@dataclass(frozen=True)
class Document:
    """A JSON document and the digest of its bytes."""

    body: Mapping[str, Any]
    sha: str


@dataclass(frozen=True)
class Evidence:
    """The documents of one run."""

    config: RunConfig
    config_sha: str
    """Digest of the configuration as it was written, perhaps by an older version."""
    plan: Document
    reservation: Document
    users: Document
    model: Document
    rounds: tuple[Mapping[str, Any], ...]
    model_files: Mapping[str, str]
    """Digest of every file of the model artifact."""
    tensors: tuple[Mapping[str, Any], ...]
    """Names and shapes found inside `backbone.keras`."""
    audit: Document
    utility: Document


def read_document(path: Path, kind: str) -> Document:
    """Reads a document whose bytes must be those our writers give its content.

    Raises:
      ArtifactError: missing, of another schema, with an unknown or a missing field, or with bytes
        that say more than its content (blanks, repeated keys, another spelling of a number).
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(
            f"the {kind} document {path.name} cannot be read; run the step that writes it"
        ) from error
    try:
        body = parse_json(data, SCHEMAS[kind], f"the {kind} document")
        text = json.dumps(body, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            f"the {kind} document {path.name} holds a number that is none, or is nested without "
            "end; it was not written by us"
        ) from error
    if text.encode() + b"\n" != data:
        raise ArtifactError(
            f"the {kind} document {path.name} was changed after it was written; run its step again"
        )
    problem = document_problem(kind, body)
    if problem is not None:
        raise ArtifactError(
            f"{problem} of the {kind} document {path.name} is unknown, missing or not of its form; "
            "run its step again with this version"
        )
    return Document(body, sha256_hex(data))


def read_rounds(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Reads the public round log, whose bytes must be those the trainer gives its content.

    Raises:
      ArtifactError: missing, a line is no JSON object, or its bytes say more than its content.
    """
    try:
        data = path.read_bytes()
        rounds = [json.loads(line) for line in data.splitlines()]
        if not all(isinstance(entry, dict) for entry in rounds):
            raise ValueError("no object")
        written = b"".join(canonical_json(entry) + b"\n" for entry in rounds)
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(
            f"the round log {path.name} cannot be read; resume the training"
        ) from error
    if written != data:
        raise ArtifactError(
            f"the round log {path.name} was changed after it was written; take the model artifact "
            "from the training step again"
        )
    return tuple(rounds)


def read_evidence(config: RunConfig, artifacts: RunArtifacts) -> Evidence:
    """Reads the documents of a run: plan, reservation, users, model, audit and utility report.

    Raises:
      ArtifactError: one is missing or broken, or the model artifact holds other files.
    """
    model = artifacts.model
    files = tree_digests(model)
    if set(files) != MODEL_FILES:
        raise ArtifactError(
            f"the model artifact holds {sorted(set(files) ^ MODEL_FILES)} beside or instead of "
            "backbone, model.json and rounds.jsonl; run the training again"
        )
    return Evidence(
        config=config,
        config_sha=config_digest(config),
        plan=read_document(artifacts.privacy_plan, "plan"),
        reservation=read_document(artifacts.reservation, "reservation"),
        users=read_document(artifacts.users, "users"),
        model=read_document(model / "model.json", "model"),
        rounds=read_rounds(model / "rounds.jsonl"),
        model_files=files,
        tensors=tuple(stored_tensors(model / "backbone.keras")),
        audit=read_document(artifacts.audit_report, "audit"),
        utility=read_document(artifacts.utility_report, "utility"),
    )


def sentence_of(error: Exception) -> str:
    """An error as a sentence; of one that is not ours only what kind of thing is missing."""
    if isinstance(error, FedEmbError):
        return str(error)
    if isinstance(error, KeyError):
        return f"the field {error} is missing"
    return f"a value has the wrong type or form ({type(error).__name__})"
