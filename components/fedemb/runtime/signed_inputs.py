"""Reads artifacts of earlier steps of the same run: verifies signatures and file digests.

Signatures are verified first: unsigned content is neither followed nor passed to a library.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from fedemb.config import ModelConfig
from fedemb.documents.ledger_record import LedgerRecord
from fedemb.documents.model import ModelCard, Pretrained, UsersManifest
from fedemb.errors import ArtifactError, LedgerError, PlanMismatch, Refused
from fedemb.foundation.canonical_json import file_digest
from fedemb.foundation.document import D, Written, read
from fedemb.keys.trust import TrustStore
from fedemb.ledger import Reservation
from fedemb.ledger.records import check_record
from fedemb.runtime.step_context import StepContext


def read_reserved(context: StepContext) -> Written[LedgerRecord]:
    """Reads the reservation and checks that the ledger contains the same reservation.

    Raises:
      ArtifactError: the reservation is missing or broken.
      SignatureInvalid: the reservation is not signed by reserve_budget.
      PlanMismatch: the reservation belongs to another run.
      LedgerError: the ledger does not contain the reservation.
      Refused: the reservation was refunded.
    """
    document = read(context.artifacts.reservation, LedgerRecord)
    check_record(document, context.ledger.chain.trust)
    if document.body.run_id != context.run_id:
        raise PlanMismatch(
            f"the reservation's run_id is {document.body.run_id!r}, this run's is "
            f"{context.run_id!r}; reserve a budget for this run"
        )
    if context.ledger.attempt(Reservation.of(document)).void is not None:
        raise Refused(f"run {context.run_id!r} was given up; reserve it again")
    return document


def read_users(context: StepContext) -> UsersManifest:
    """Reads the manifest of the users.

    Raises:
      ArtifactError: the manifest is missing, broken, or belongs to another run.
      SignatureInvalid: the manifest is not signed by partition_users.
    """
    return _read(context, context.artifacts.users, UsersManifest).body


def read_model(context: StepContext) -> ModelCard:
    """Reads the card of the trained model and checks the digest of the model stored with it.

    Raises:
      ArtifactError: the card is missing, broken, of another run, or names another model.
      SignatureInvalid: the card is not signed by train_model.
    """
    card = _read(context, context.artifacts.model / "model.json", ModelCard).body
    _check_weights(context.artifacts.model, card.weights_sha)
    return card


def read_public_backbone(context: StepContext) -> Pretrained:
    """Reads the document of a reserved run's public backbone; see `check_public_backbone`."""
    return check_public_backbone(context, context.ledger.chain.trust, at=_reserved_at(context))


def check_public_backbone(context: StepContext, trust: TrustStore, *, at: int | None) -> Pretrained:
    """Checks the public backbone against its signature, its weights and the configuration.

    Args:
      context: context of the step, which takes `pretrained`.
      trust: trusted keys.
      at: number of the record that reserved the run; None if the run is not reserved yet.

    Raises:
      ArtifactError: the document is missing or broken, or names a different backbone.
      SignatureInvalid: the document is not signed by pretrain_public.
      PlanMismatch: the backbone was made with another configuration.
    """
    document = read(context.artifacts.pretrained / "pretrained.json", Pretrained)
    trust.check(document, at=at)
    start, config = document.body, context.config
    wanted = (config.pretraining.kind, config.model, config.training.seed)
    if (start.pretraining_kind, _model_of(start), start.seed) != wanted:
        raise PlanMismatch(
            "the public backbone is not the one that pretrain_public signed for this configuration;"
            " run pretrain_public again, and find out who may write to the public root"
        )
    _check_weights(context.artifacts.pretrained, start.weights_sha)
    return start


def _model_of(start: Pretrained) -> ModelConfig | None:
    """Returns its model configuration; None if not readable."""
    try:
        return ModelConfig.model_validate(start.model)
    except ValidationError:
        return None


def _reserved_at(context: StepContext) -> int:
    """Returns the number of the ledger record that reserved the run."""
    ledger, run_id = context.ledger, context.run_id
    attempt = ledger.state.attempts.get((run_id, ledger.state.last_attempt(run_id)))
    if attempt is None:
        raise LedgerError(
            f"the ledger of policy {ledger.policy_id!r} holds no reservation of run {run_id!r}, so "
            f"nothing of it can be trusted; name the ledger the run was reserved in"
        )
    return attempt.reserve.sequence


def _read(context: StepContext, path: Path, kind: type[D]) -> Written[D]:
    """Reads a document of a reserved run, signed by a key that was trusted at the reservation."""
    run_id = context.run_id
    reserved_at = _reserved_at(context)
    document = read(path, kind)
    context.ledger.chain.trust.check(document, at=reserved_at)
    if getattr(document.body, "run_id", run_id) != run_id:
        raise ArtifactError(
            f"{path.name} belongs to another run than {run_id}; pass this run's own"
        )
    return document


def _check_weights(folder: Path, sha: str, name: str = "backbone.keras") -> None:
    try:
        found = file_digest(folder / name)
    except OSError as error:
        raise ArtifactError(
            f"{name} in {folder.name} cannot be read; run the step that writes it again"
        ) from error
    if found != sha:
        raise ArtifactError(
            f"{name} in {folder.name} is not the one its step signed; run that step again, "
            "and find out who may write to the public root"
        )
