"""A finished training, as evaluate_model and audit_privacy meet it: made by hand, in seconds.

Identities are random blobs; an image is its identity's blob, shifted and noised. A backbone that
averages over places tells them apart badly, one that keeps the pixels tells them apart well.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedemb.config import RunConfig
from fedemb.data.pixels import encode_png
from fedemb.data.records import UserRecord
from fedemb.documents.artifacts import RunArtifacts
from fedemb.documents.model import Commitments, ModelCard, UsersManifest
from fedemb.foundation.canonical_json import file_digest, tree_digest
from fedemb.foundation.document import Document, read
from fedemb.keys import commit_to_people, commitment_key, open_key_store
from fedemb.keys.trust import Signer, write_signed
from fedemb.ledger import read_reservation
from fedemb.runtime.step_context import StepContext
from tests.kit.pipeline_runs.partition_run import write_store
from tests.kit.public_start import sign_start

SIZE = 12
RUN_ID = "run-1"


def config(**overrides: Any) -> RunConfig:
    tree = {
        "purpose": "release",
        "tuning": {"data": "public", "method": "on drawn glyphs"},
        "data": {"source": {"uri": "builtin"}},
        "partition": {"virtual_clients": 4},
        "model": {"backbone": "lenet", "embedding_dim": 16, "image_size": SIZE},
        "pretraining": {"kind": "import", "import_path": "public.keras"},
        "mechanism": {
            "kind": "group_poisson_gaussian",
            "rounds": 2,
            "noise_multiplier": 1.0,
            "sampling_probability": 0.5,
        },
        "policy": {"users_lower_bound": 100, "delta": 1e-3, "epsilon_cap": 8.0},
        "evaluation": {"bootstrap_samples": 40, "batch_size": 32},
        "audit": {"bootstrap_samples": 40, "max_users": 60},
    }
    return RunConfig.model_validate(tree).updated(overrides)


def write_users(
    folder: Path,
    users: int,
    *,
    images: int = 4,
    seed: int = 0,
    groups: int = 1,
) -> None:
    """Writes a user store by hand: `users` identities, one class each."""
    random = np.random.default_rng(seed)
    keys = np.sort(random.integers(0, 2**63, users, dtype=np.uint64))
    records = []
    for row, key in enumerate(keys):
        blob = random.uniform(0, 255, (SIZE // 3, SIZE // 3)).repeat(3, 0).repeat(3, 1)
        pictures = []
        for _ in range(images):
            pixels = np.clip(blob + 40 * random.normal(size=blob.shape), 0, 255)
            pictures.append(encode_png(pixels.astype(np.uint8)[..., None]))
        subgroup = f"group {row % groups}" if groups > 1 else ""
        labels = (int(key >> np.uint64(1)),) * images
        records.append(UserRecord(int(key), tuple(pictures), labels, subgroup))
    write_store(folder, records, SIZE)


@dataclass
class FinishedRun:
    """Paths of a finished training."""

    root: Path

    def context(
        self, settings: RunConfig, outputs: Path | None = None, run_id: str = RUN_ID
    ) -> StepContext:
        """What both steps are given; `outputs`: folder of reports and pages."""
        made = outputs or self.root
        artifacts = RunArtifacts(
            privacy_plan=self.root / "plan.json",
            reservation=self.root / "reservation.json",
            model=self.root / "model",
            pretrained=self.root / "pretrained",
            users=self.root / "users.json",
            utility_report=made / "report.json",
            utility_page=made / "report.html",
            audit_report=made / "report.json",
            audit_page=made / "report.html",
        )
        stores = {
            "private_root": str(self.root / "private"),
            "ledger": str(self.root / "ledger"),
            "keys": str(self.root / "keys"),
        }
        return StepContext(artifacts, config=settings, run_id=run_id, **stores)

    @property
    def private(self) -> Path:
        return self.root / "private" / RUN_ID

    def reserve(self, settings: RunConfig, run_id: str = RUN_ID) -> None:
        """Plans, reserves and commits a run in the ledger."""
        from fedemb.steps import plan_privacy, reserve_budget

        context = self.context(settings, run_id=run_id)
        plan_privacy.run(context)
        sign_start(context)
        reserve_budget.run(context, input_fingerprint="private.parquet@1")
        reserved = read_reservation(context.artifacts.reservation)
        ledger, keys = context.writable_ledger, context.keys
        digests = dict.fromkeys(("inputs_sha", "private_root"), "a" * 64)
        commitments = self.commitments(settings, run_id)
        ledger.bind(reserved, commitments=commitments, **digests)
        ledger.commit(
            reserved,
            rounds_started=settings.mechanism.rounds,
            round_log_sha="c" * 64,
            card_sha="d" * 64,
            signer=Signer.load_or_create(keys, "trainer"),
            keys=keys,
        )

    def commitments(self, settings: RunConfig, run_id: str = RUN_ID) -> dict[str, str]:
        """What partition_users says of both folders; of one that was not written, nothing true."""
        keys = open_key_store(str(self.root / "keys"))
        key = commitment_key(keys, settings.policy.policy_id)
        return {
            people: commit_to_people(key, run_id, 1, tree_digest(self.private / people))
            for people in ("users", "evaluation")
        }

    def replace(self, people: str, users: int) -> None:
        """The same run with other people in one folder: partitioned, reserved and bound again."""
        shutil.rmtree(self.private / people)
        write_users(self.private / people, users)
        card = read(self.root / "model" / "model.json", ModelCard).body
        for store in ("ledger", "keys"):
            shutil.rmtree(self.root / store)
        self.finish(config(), card)

    def finish(self, settings: RunConfig, card: ModelCard) -> None:
        """Reserves and commits the run, and signs what its steps signed."""
        sha = "0" * 64
        self.reserve(settings)
        users = UsersManifest(
            run_id=RUN_ID,
            config_sha=sha,
            reservation_sha=sha,
            virtual_clients=4,
            groupings=1,
            blocks=["all/0"],
            image_size=SIZE,
            channels=1,
            commitments=Commitments(**self.commitments(settings)),
        )
        self.sign(self.root / "users.json", users)
        self.sign(self.root / "model" / "model.json", card)

    def sign(self, path: Path, document: Document) -> None:
        """Writes a document as its step does."""
        keys = open_key_store(str(self.root / "keys"))
        write_signed(path, document, Signer.newest(keys, str(document.role)))


def train_a_little(backbone: Any, config: RunConfig, users: int = 60) -> None:
    """Teaches a backbone blobs of other identities: better than untrained, in seconds."""
    random = np.random.default_rng(99)
    blobs = random.uniform(0, 255, (users, SIZE // 3, SIZE // 3)).repeat(3, 1).repeat(3, 2)
    labels = np.repeat(np.arange(users), 6)
    images = np.clip(blobs[labels] + 40 * random.normal(size=(len(labels), SIZE, SIZE)), 0, 255)
    teach(backbone, images[..., None].astype(np.uint8), labels, random)


def teach(
    backbone: Any, images: Any, labels: Any, random: np.random.Generator, steps: int = 40
) -> None:
    """Teaches a backbone whose images are whose, without any privacy.

    Args:
      backbone: is changed.
      images: uint8 `[images, size, size, channels]`.
      labels: int `[images]`, 0..users-1.
      random: draws batches.
      steps: of 128 images at most.
    """
    import keras
    import tensorflow as tf

    from fedemb.training import preprocess

    glorot = keras.initializers.GlorotUniform(seed=1)
    head = keras.layers.Dense(int(labels.max()) + 1, kernel_initializer=glorot)
    optimizer = keras.optimizers.Adam(3e-3)
    inputs = preprocess(tf.constant(images))
    head.build((None, backbone.output_shape[-1]))
    variables = backbone.trainable_variables + head.trainable_variables
    optimizer.build(variables)

    @tf.function
    def step(batch: Any, wanted: Any) -> None:
        with tf.GradientTape() as tape:
            features = tf.math.l2_normalize(backbone(tf.gather(inputs, batch)), axis=1)
            logits = 8 * head(features)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(wanted, logits))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    for _ in range(steps):
        batch = random.permutation(len(labels))[:128]
        step(tf.constant(batch), tf.constant(labels[batch]))


def finished_run(
    root: Path, *, trained_users: int = 40, held_out: int = 60, groups: int = 1
) -> FinishedRun:
    """Writes users, evaluation, pretrained and model folders of a run."""
    from fedemb.training import build_backbone

    run, settings = FinishedRun(root), config()
    write_users(run.private / "users", trained_users, seed=1)
    write_users(run.private / "evaluation", held_out, seed=2, groups=groups)
    backbone = build_backbone(settings.model, seed=5)
    for name in ("pretrained", "model"):
        (root / name).mkdir()
        if name == "model":
            train_a_little(backbone, settings)
        backbone.save(root / name / "backbone.keras")
    weights_sha = file_digest(root / "model" / "backbone.keras")
    digests = ("config_sha", "plan_sha", "code_sha", "inputs_sha", "initial_weights_sha")
    model = {
        **dict.fromkeys(digests, "0" * 64),
        "run_id": RUN_ID,
        "attempt": 1,
        "weights_sha": weights_sha,
        "key_injected": False,
        "rounds_run": 2,
        "backbone": "lenet",
        "embedding_dim": 16,
        "tensors": [],
        "mechanism_audit": None,
    }
    run.finish(settings, ModelCard.of_fields(model))
    return run


_BUILT: dict[str, FinishedRun] = {}


def shared_run(make_folder: Any) -> FinishedRun:
    """One finished run for all tests of a process: read it, do not write into it."""
    if "run" not in _BUILT:
        _BUILT["run"] = finished_run(make_folder("finished-run"), held_out=72, groups=3)
    return _BUILT["run"]
