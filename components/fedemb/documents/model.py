"""The model card of the trainer, the public start before it, and the public lines of its rounds."""

from __future__ import annotations

from typing import Annotated, ClassVar

from fedemb.documents.fields import Count, Json, Name, Sha, Share, Tensor
from fedemb.documents.mechanism_audit import Independence, MechanismAudit
from fedemb.foundation.document import Document, Part, Since


class PublicTraining(Part):
    """A training on public images that was tried."""

    epochs: Count
    recall: float
    """At a false accept rate of 1 in 100, of public classes that did not train."""


class Pretrained(Document):
    """`pretrained.json`, written by pretrain_public beside `backbone.keras`."""

    kind: ClassVar[str] = "pretrained"
    newest: ClassVar[int] = 2
    role: ClassVar[str | None] = "pretrain"

    pretraining_kind: Name
    weights_sha: Sha
    """Of `backbone.keras`."""
    model: Json
    """`ModelConfig`."""
    images: Count
    classes: Count
    final_loss: float | None
    seed: int
    trainings: Annotated[list[PublicTraining], Since(2, before=[])]
    """With `pretraining.doublings`, in order; the one of the highest recall was kept."""


class ModelCard(Document):
    """`model.json`, written by train_dp_fedemb beside `backbone.keras`."""

    kind: ClassVar[str] = "model"
    newest: ClassVar[int] = 3
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
    """Whether coins and noise may have come from a key that was handed in."""
    rounds_run: Count
    backbone: Name
    embedding_dim: Count
    tensors: list[Tensor]
    mechanism_audit: Annotated[MechanismAudit | None, Since(2, before=None)]
    """None: there was no noise to look for, or the trainer did not look yet."""
    independence: Annotated[Independence | None, Since(3, before=None)]
    """None as above, or the trainer is older and did not compare."""


class Average(Part):
    """Another average of the weights than the released one."""

    decay: Share
    weights_sha: Sha
    """Of its `.keras` file."""


class Averages(Document):
    """`averages.json`, written by train_dp_sgd: in a folder of its own, as nobody releases them."""

    kind: ClassVar[str] = "averages"
    role: ClassVar[str | None] = "trainer"

    run_id: Name
    model_sha: Sha
    """Weights of the released model, which the same training made."""
    others: list[Average]
    """As `training.server.other_ema_decays` lists them; `average_file` names their files."""


def average_file(number: int) -> str:
    """Name of the file of an average beside `averages.json`; the released one would be number 0."""
    return f"average-{number}.keras"


class RoundLine(Part):
    """The public line of a round in `rounds.jsonl`."""

    round: Count
    clients_planned: float
    """Public constant the sum was divided by."""
    output_sha: Sha
    """Digest of the noised output."""
    event: Json | None
    """None: the mechanism tracks participation and is priced as a whole."""


class RoundHead(Document):
    """Head of a round's record in the trainer's working state."""

    kind: ClassVar[str] = "round"

    inputs_sha: Sha
    public: RoundLine
    mechanism_state: Json
    """`Mechanism.state_to_json()` after the round."""
    mean_sha: Sha
    """Of the bytes after the head: the noised mean, or none."""
