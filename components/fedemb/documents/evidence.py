"""What the gate judges by: the documents of a run, read strictly, with the digests of their bytes.

The report is compared with all of it; nothing of it is trusted for being in a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedemb.config import RunConfig
from fedemb.config.digest import config_digest
from fedemb.documents.audit import AuditReport
from fedemb.documents.fields import Tensor
from fedemb.documents.model import ModelCard, RoundLine
from fedemb.documents.model_files import stored_tensors
from fedemb.documents.plan import PrivacyPlan
from fedemb.documents.reservation import ReservationDocument
from fedemb.documents.run_artifacts import RunArtifacts
from fedemb.documents.users import UsersManifest
from fedemb.documents.utility import AnyUtility, utility_kind
from fedemb.errors import ArtifactError, FedEmbError
from fedemb.foundation.canonical_json import canonical_json, strict_json
from fedemb.foundation.digests import file_digest
from fedemb.foundation.document import Written, read

MODEL_FILES = {"backbone.keras", "model.json", "rounds.jsonl"}
"""What a model artifact holds, and nothing else."""


@dataclass(frozen=True)
class Evidence:
    """The documents of one run."""

    config: RunConfig
    plan: Written[PrivacyPlan]
    reservation: Written[ReservationDocument]
    users: Written[UsersManifest]
    model: Written[ModelCard]
    rounds: tuple[RoundLine, ...]
    model_files: Mapping[str, str]
    """Digest of every file of the model artifact."""
    tensors: tuple[Tensor, ...]
    """Names and shapes found inside `backbone.keras`."""
    audit: Written[AuditReport]
    utility: Written[AnyUtility]
    backbones: tuple[Path, Path] | None = None
    """Files of the public start and of the model; None where the start is not at hand."""

    @property
    def signed(self) -> tuple[Written[Any], ...]:
        """What steps before the report signed, the reservation apart."""
        return (self.plan, self.users, self.model, self.audit, self.utility)

    @property
    def unnamed(self) -> tuple[Written[Any], ...]:
        """Of these, what no record of the ledger names by digest, and can be made again."""
        return (self.audit, self.utility)

    def counting(self, reserved: int, reported: int) -> Iterator[tuple[Written[Any], int]]:
        """Each signed document, with the ledger record at which its key must be trusted.

        A key that was retired between reservation and report still counts for what the ledger
        names by its digest at reservation, bind or commit. What it does not name could be written
        later with a retired key, so its key must be trusted when the report is made.

        Args:
          reserved: record of the reservation.
          reported: last record that the privacy report takes into account.
        """
        for document in self.signed:
            yield document, reported if document in self.unnamed else reserved

    @property
    def config_sha(self) -> str:
        """Digest of what a reservation binds of the configuration."""
        return config_digest(self.config)


def write_rounds(lines: Sequence[RoundLine]) -> bytes:
    """The public round log: one line of canonical JSON per round."""
    return b"".join(canonical_json(line.model_dump(mode="json")) + b"\n" for line in lines)


def read_rounds(path: Path) -> tuple[RoundLine, ...]:
    """Reads the public round log, whose bytes must be those the trainer gives its content.

    Raises:
      ArtifactError: missing, a line is not that of a round, or its bytes say more than its content.
    """
    try:
        data = path.read_bytes()
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
      ArtifactError: one is missing or broken, or the model artifact holds other files.
    """
    folder = artifacts.model
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    if found != MODEL_FILES:
        raise ArtifactError(
            f"the model artifact holds {sorted(found ^ MODEL_FILES)} beside or instead of "
            "backbone, model.json and rounds.jsonl; run the training again"
        )
    evidence = gather(config, artifacts)
    files = artifacts.pretrained / "backbone.keras", folder / "backbone.keras"
    return replace(evidence, backbones=files)


def gather(config: RunConfig, artifacts: RunArtifacts) -> Evidence:
    """Reads the documents of a run, and of the folder `model` the files of a model and no other.

    Raises:
      ArtifactError: one is missing or broken.
    """
    model = read(artifacts.model / "model.json", ModelCard)
    backbone = artifacts.model / "backbone.keras"
    files = {name: _digest(artifacts.model / name) for name in sorted(MODEL_FILES)}
    # Another file than the trainer's is not looked into; the gate says that it is another.
    its_own = files[backbone.name] == model.body.weights_sha
    return Evidence(
        config=config,
        plan=read(artifacts.privacy_plan, PrivacyPlan),
        reservation=read(artifacts.reservation, ReservationDocument),
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
    """An error as a sentence; of one that is not ours only what kind of thing is missing."""
    if isinstance(error, FedEmbError):
        return str(error)
    if isinstance(error, KeyError):
        return f"the field {error} is missing"
    return f"a value has the wrong type or form ({type(error).__name__})"
