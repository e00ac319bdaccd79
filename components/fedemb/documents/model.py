"""Model card of the trainer, card of the public backbone, and public lines of the rounds."""

from __future__ import annotations

from typing import ClassVar

from fedemb.documents.fields import AnyJson, Count, Name, Sha, Tensor
from fedemb.documents.mechanism_audit import MechanismAudit
from fedemb.foundation.document import Document, Part


class PublicTraining(Part):
    """Result of one training on public images."""

    epochs: Count
    recall: float
    """Recall at a false accept rate of 0.01, on held-out public classes."""


class Pretrained(Document):
    """`pretrained.json`, written by pretrain_public beside `backbone.keras`."""

    kind: ClassVar[str] = "pretrained"
    role: ClassVar[str | None] = "pretrain"

    pretraining_kind: Name
    weights_sha: Sha
    """SHA-256 of `backbone.keras`."""
    model: AnyJson
    """`ModelConfig`."""
    images: Count
    classes: Count
    final_loss: float | None
    seed: int
    trainings: list[PublicTraining]
    """Trainings with `pretraining.doublings`, in order; the one with the highest recall was
    kept."""
    constant_images: Count
    """Public or drawn images that the constants of features were computed from."""


class ModelCard(Document):
    """`model.json`, written by train_dp_fedemb beside `backbone.keras`."""

    kind: ClassVar[str] = "model"
    role: ClassVar[str | None] = "trainer"

    run_id: Name
    attempt: Count
    config_sha: Sha
    plan_sha: Sha
    code_sha: Sha
    inputs_sha: Sha
    initial_weights_sha: Sha
    weights_sha: Sha
    key_injected: bool
    """Whether coins and noise may come from a key passed by the caller."""
    rounds_run: Count
    backbone: Name
    embedding_dim: Count
    tensors: list[Tensor]
    mechanism_audit: MechanismAudit | None
    """Audit of the mechanism; None: the run has no noise, or the trainer has not audited it yet."""


class RoundLine(Part):
    """Public line of a round in `rounds.jsonl`."""

    round: Count
    clients_planned: float
    """Public constant by which the sum was divided."""
    output_sha: Sha
    """Digest of the noised output."""
    event: AnyJson | None
    """Privacy event; None: the mechanism tracks participation and is priced as a whole."""


class RoundHead(Part):
    """Head of a round's record in the trainer's working state: one line of canonical JSON."""

    public: RoundLine
    mechanism_state: AnyJson
    """`Mechanism.round_state()` after the round."""
    tags_sha: Sha | None
    """`TagChain.sha` after the round; None: rounds are independent."""
    mean_sha: Sha
    """SHA-256 of the bytes after the head: the noised mean, or no bytes."""
