"""Audits whether a model distinguishes its training users from held-out users. Level `monitoring`.

Runs a membership attack on real users (`scoring`). The attack can detect a leak; it can never prove
the absence of a leak, and it does not bound epsilon. Its figures are exact functions of training
users, so in a release run they are Raw: individual scores and sums stay in the private root. The
public report contains the method, the self-test and the location of the figures. A simulation does
not protect users, and its report contains the figures.
"""

from __future__ import annotations

import io
import logging
from itertools import chain
from typing import Any

import numpy as np
from kfp import dsl

from fedemb.config import RunConfig
from fedemb.config.run import config_digest
from fedemb.data.client_data import UserStore
from fedemb.data.pixels import decode_pngs
from fedemb.data.records import UserRecord
from fedemb.documents.artifacts import Public
from fedemb.documents.audit import AttackFigures, AuditReport
from fedemb.evaluation.membership import MIN_USERS, Scoring, attack, scoring_of, self_test
from fedemb.foundation import step_logging as events
from fedemb.foundation.canonical_json import JsonObject
from fedemb.foundation.document import written
from fedemb.foundation.files import write_bytes
from fedemb.keys.trust import Signer, write_signed
from fedemb.models.backbone_files import load_backbone
from fedemb.models.inference import SharedFeatures
from fedemb.privacy.registry import plan_mechanism
from fedemb.reports.pages import audit_page
from fedemb.reports.utility_text import audit_sentence
from fedemb.runtime.private_inputs import PrivateFolder, open_private
from fedemb.runtime.provenance import code_digest
from fedemb.runtime.signed_inputs import read_model, read_public_backbone, read_users
from fedemb.runtime.step import Rights, step
from fedemb.runtime.step_context import StepContext
from fedemb.storage import Store, open_store
from fedemb.storage.fencing import FencedStore, FencingToken


@step(
    image="trainer",
    resources="embed",
    outputs={"audit_report": Public, "audit_page": Public},
    rights=Rights(
        private={"users": "read", "evaluation": "read", "audit": "write"},
        ledger="read",
        signing=("audit",),
        keys={"policy": "read"},  # checks users against their commitment
    ),
)
def audit_privacy(
    config: str,
    run_id: str,
    private_root: str,
    ledger: str,
    keys: str,
    users: dsl.Input[dsl.Dataset],
    pretrained: dsl.Input[dsl.Model],
    model: dsl.Input[dsl.Model],
    audit_report: dsl.Output[dsl.Artifact],
    audit_page: dsl.Output[dsl.HTML],
):
    """Attacks the model: can it tell training users from held-out ones?"""
    from fedemb.runtime.step import step_process
    from fedemb.steps.audit_privacy import run

    with step_process("audit_privacy", locals()) as context:
        report = run(context)
        audit_report.metadata.update(model_sha=report["model_sha"])


IMAGES_PER_USER = 8
"""Maximum images per user; more images hardly improve a score."""
_DRAW_SEED, _BOOTSTRAP_SEED = 61, 67

logger = logging.getLogger(__name__)


def run(context: StepContext) -> JsonObject:
    """Attacks the model of a run and writes report, page and, in the private root, the figures.

    Args:
      context: reads `users`, `model`, `pretrained` (what a score is compared with) and all users in
        the private root; writes `audit_report`, `audit_page` and, in the private root,
        `audit/{scores.parquet,audit.json,audit.html}`.

    Returns:
      The public report; its figures are None in a release run.

    Raises:
      ArtifactError: an artifact is missing, damaged or of another run.
      SignatureInvalid: model, users or public backbone are not signed by the steps that write them.
      StorageError: the private root cannot be read or written.
    """
    config, run_id, artifacts = context.config, context.run_id, context.artifacts
    model = read_model(context)
    read_users(context)
    read_public_backbone(context)
    place = context.private("audit")
    store = FencedStore(open_store(place), FencingToken(place, "audit_privacy"))
    scoring = scoring_of(config)
    figures = _attack_real_users(context, scoring, store)
    fields: dict[str, Any] = {
        "run_id": run_id,
        "config_sha": config_digest(config, "audit"),
        "model_sha": model.weights_sha,
        "code_sha": code_digest(config),
        "attack": scoring.attack,
        "unit": config.policy.unit,
        "self_test": self_test(scoring),
        "split_by_value": config.partition.evaluation.by == "value",
        "users_at_most": config.audit.max_users,
        "bootstrap_samples": config.audit.bootstrap_samples,
        "mechanism": model.model_dump(mode="json")["mechanism_audit"],
    }
    private = AuditReport.of_fields({**fields, "figures": "open", "measured": figures})
    closed = AuditReport.of_fields({**fields, "figures": "private", "measured": None})
    signer = Signer.newest(context.keys, "audit")
    plan = plan_mechanism(config)
    store.write("audit.json", written(private, signer.sign(private.content())).data)
    store.write("audit.html", audit_page(private, plan).encode())
    report = private if config.purpose == "simulation" else closed
    write_bytes(artifacts.audit_page, audit_page(report, plan).encode())
    logger.info(events.AUDITED, audit_sentence(report))
    return write_signed(artifacts.audit_report, report, signer).json


def _attack_real_users(
    context: StepContext, scoring: Scoring, private: Store
) -> AttackFigures | None:
    """Scores both sides, stores the scores in the private root, returns the figures. Raw."""
    config = context.config
    folders = {"after": context.artifacts.model, "before": context.artifacts.pretrained}
    models = {
        name: load_backbone(folder / "backbone.keras", config.model)
        for name, folder in folders.items()
    }
    shown = SharedFeatures(models, config.model.trainable, scoring.apply)
    keys: list[np.ndarray] = []
    sizes: list[int] = []
    values: dict[str, list[np.ndarray]] = {name: [] for name in models}
    owners: list[np.ndarray] = []
    sides: tuple[PrivateFolder, PrivateFolder] = ("users", "evaluation")
    for side, people in enumerate(sides):
        with open_private(context, people) as folder:
            store = UserStore(folder)
            rows = _draw(store, config, side, scoring.least_images)
            keys.append(store.user_keys[rows])
            sizes.append(0)
            for users in store.read_in_pieces(rows):
                images, labels, owner = _images(store, users)
                owners.append(owner + sum(sizes))
                sizes[-1] += len(users)
                for name, outputs in shown(images, config.evaluation.batch_size).items():
                    values[name].append(scoring.values(outputs, labels))
    # Measurements of training users must not affect whether the run continues, or its exit code.
    # The evaluation reports a diverged model.
    measured = chain(*values.values())
    if min(sizes) < MIN_USERS or not all(np.isfinite(piece).all() for piece in measured):
        return None
    owner_of = np.concatenate(owners)
    after, before = (
        scoring.scores(np.concatenate(pieces), owner_of, sum(sizes)) for pieces in values.values()
    )
    members = np.arange(sum(sizes)) < sizes[0]
    private.write("scores.parquet", _scores_table(np.concatenate(keys), members, after, before))
    plain, calibrated = (
        attack(
            scores[members],
            scores[~members],
            samples=config.audit.bootstrap_samples,
            seed=_BOOTSTRAP_SEED,
        )
        for scores in (after, after - before)
    )
    return AttackFigures.model_validate(
        {"plain": plain.to_json(), "calibrated": calibrated.to_json()}
    )


def _draw(store: UserStore, config: RunConfig, side: int, least_images: int) -> np.ndarray:
    """Returns rows of at most `audit.max_users` units with at least so many images, ascending."""
    rows = np.flatnonzero(store.image_counts >= least_images)
    random = np.random.default_rng(np.random.SeedSequence([config.training.seed, _DRAW_SEED, side]))
    return np.sort(random.permutation(rows)[: config.audit.max_users])


def _images(store: UserStore, users: list[UserRecord]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns users' images, uint8 [n, size, size, channels], with labels and owners."""
    kept = [user.images[:IMAGES_PER_USER] for user in users]
    images = decode_pngs(
        [image for images in kept for image in images], store.image_size, store.channels
    )
    labels = [label for user in users for label in user.labels[:IMAGES_PER_USER]]
    owners = np.repeat(np.arange(len(users)), [len(images) for images in kept])
    return images, np.array(labels, np.int64), owners


def _scores_table(
    keys: np.ndarray, members: np.ndarray, after: np.ndarray, before: np.ndarray
) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {"user_key": keys, "member": members, "score": after, "score_before_training": before}
    )
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()
