"""Evidence for the gate: the documents of a run, read strictly, with the digests of their bytes.

The report is compared with all evidence. No document is trusted only because it is in a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from fedemb.config import RunConfig
from fedemb.config.run import config_digest
from fedemb.documents.artifacts import RunArtifacts
from fedemb.documents.audit import AuditReport
from fedemb.documents.fields import Tensor
from fedemb.documents.ledger_record import LedgerRecord
from fedemb.documents.model import ModelCard, RoundLine, UsersManifest, stored_tensors
from fedemb.documents.plan import PrivacyPlan
from fedemb.documents.utility import AnyUtility, utility_kind
from fedemb.errors import ArtifactError, FedEmbError
from fedemb.foundation.canonical_json import canonical_json, file_digest, strict_json
from fedemb.foundation.document import Document, Written, read
from fedemb.foundation.files import read_regular
from fedemb.storage import LARGEST

MODEL_FILES = {"backbone.keras", "model.json", "rounds.jsonl"}
"""Exact set of files in a model artifact."""


@dataclass(frozen=True)
class Evidence:
    """Documents of one run."""

    config: RunConfig
    plan: Written[PrivacyPlan]
    reservation: Written[LedgerRecord]
    users: Written[UsersManifest]
    model: Written[ModelCard]
    rounds: tuple[RoundLine, ...]
    model_files: Mapping[str, str]
    """File name -> digest, for every file of the model artifact."""
    tensors: tuple[Tensor, ...]
    """Names and shapes found inside `backbone.keras`."""
    audit: Written[AuditReport]
    utility: Written[AnyUtility]

    @property
    def signed(self) -> tuple[Written[Document], ...]:
        """Returns the documents signed by steps before the report, except the reservation."""
        return (self.plan, self.users, self.model, self.audit, self.utility)

    @property
    def unrecorded(self) -> tuple[Written[Document], ...]:
        """Returns signed documents that no ledger record names and that can be rewritten."""
        return (self.audit, self.utility)

    def trusted_at(self, reserved: int, reported: int) -> Iterator[tuple[Written[Document], int]]:
        """Yields each signed document with the ledger record at which its key must be trusted.

        A key that was retired between reservation and report is still valid for documents that the
        ledger names by digest at reservation, bind or commit. Other documents could be written
        later with a retired key, so their keys must be trusted when the report is made: at its last
        record, not at that of the reservation.
        """
        for document in self.signed:
            yield document, reported if document in self.unrecorded else reserved

    @property
    def config_sha(self) -> str:
        """Returns the digest of the configuration sections that a reservation binds."""
        return config_digest(self.config)


def write_rounds(lines: Sequence[RoundLine]) -> bytes:
    """Returns the public round log: one line of canonical JSON per round."""
    return b"".join(canonical_json(line.model_dump(mode="json")) + b"\n" for line in lines)


def read_rounds(path: Path) -> tuple[RoundLine, ...]:
    """Reads the public round log, whose bytes must equal those that the trainer writes.

    Raises:
      ArtifactError: the log is missing, a line is not a round, or its bytes are not canonical.
    """
    try:
        data = read_regular(path, LARGEST)
        rounds = tuple(
            RoundLine.model_validate(strict_json(line, f"a line of {path.name}"))
            for line in data.splitlines()
        )
    except (OSError, ArtifactError, ValidationError) as error:
        raise ArtifactError(
            f"a line of the round log {path.name} cannot be read, or is not the public line of its "
            "round and nothing else; resume the training"
        ) from error
    if write_rounds(rounds) != data:
        raise ArtifactError(
            f"the round log {path.name} was changed after it was written; take the model artifact "
            "from the training step again"
        )
    return rounds


def read_evidence(config: RunConfig, artifacts: RunArtifacts) -> Evidence:
    """Reads the documents of a run: plan, reservation, users, model, audit and utility report.

    Raises:
      ArtifactError: a document is missing or broken, or the model artifact has other files.
    """
    folder = artifacts.model
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    if found != MODEL_FILES:
        raise ArtifactError(
            f"the model artifact holds {sorted(found ^ MODEL_FILES)} beside or instead of "
            "backbone, model.json and rounds.jsonl; run the training again"
        )
    return gather(config, artifacts)


def gather(config: RunConfig, artifacts: RunArtifacts) -> Evidence:
    """Reads the documents of a run, and only the files of a model from the folder `model`.

    Raises:
      ArtifactError: a document is missing or broken.
    """
    model = read(artifacts.model / "model.json", ModelCard)
    backbone = artifacts.model / "backbone.keras"
    files = {name: _digest(artifacts.model / name) for name in sorted(MODEL_FILES)}
    # A file that differs from the trainer's is not parsed; the gate reports the difference.
    its_own = files[backbone.name] == model.body.weights_sha
    return Evidence(
        config=config,
        plan=read(artifacts.privacy_plan, PrivacyPlan),
        reservation=read(artifacts.reservation, LedgerRecord),
        users=read(artifacts.users, UsersManifest),
        model=model,
        rounds=read_rounds(artifacts.model / "rounds.jsonl"),
        model_files=files,
        tensors=stored_tensors(backbone, files[backbone.name]) if its_own else (),
        audit=read(artifacts.audit_report, AuditReport),
        utility=read(artifacts.utility_report, utility_kind(config.task)),
    )


def _digest(path: Path) -> str:
    try:
        return file_digest(path)
    except OSError as error:
        raise ArtifactError(
            f"{path.name} of the model cannot be read; run the training again"
        ) from error


def sentence_of(error: Exception) -> str:
    """Returns an error as a sentence; for errors of other libraries, only the kind of problem."""
    if isinstance(error, FedEmbError):
        return str(error)
    if isinstance(error, KeyError):
        return f"the field {error} is missing"
    return f"a value has the wrong type or form ({type(error).__name__})"
