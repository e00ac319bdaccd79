"""A finished training, as evaluate_model and audit_privacy meet it: made by hand, in seconds.

Identities are random blobs; an image is its identity's blob, shifted and noised. A backbone that
averages over places tells them apart badly, one that keeps the pixels tells them apart well.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedemb.config import RunConfig
from fedemb.data.pixels import encode_png
from fedemb.data.records import UserRecord
from fedemb.documents.model import ModelCard
from fedemb.foundation.canonical_json import file_digest
from fedemb.foundation.document import read
from fedemb.keys.trust import Signer
from fedemb.ledger import read_reservation
from tests.kit.pipeline_runs import training_run
from tests.kit.pipeline_runs.partition_run import write_store
from tests.kit.pipeline_runs.training_run import RUN_ID, SIZE, ReadyRun
from tests.kit.signed_backbone import no_rehearsal, sign_start


def config(**overrides: Any) -> RunConfig:
    """A release of two rounds, from an imported backbone."""
    changes = {
        "purpose": "release",
        "data.source.uri": "builtin",
        "partition.virtual_clients": 4,
        "model": {"backbone": "lenet", "embedding_dim": 16, "image_size": SIZE},
        "pretraining": {"kind": "import", "import_path": "public.keras"},
        "mechanism.rounds": 2,
        "policy": {"users_lower_bound": 100, "delta": 1e-3, "epsilon_cap": 8.0},
        "evaluation": {"bootstrap_samples": 40, "batch_size": 32},
        "audit": {"bootstrap_samples": 40, "max_users": 60},
    }
    return training_run.config(**changes).updated(overrides)


def write_users(
    folder: Path, users: int, *, images: int = 4, seed: int = 0, groups: int = 1
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
class FinishedRun(ReadyRun):
    """A finished training."""

    config: RunConfig = field(default_factory=config)

    def reserve(self, settings: RunConfig, run_id: str = RUN_ID) -> None:
        """Plans, reserves and commits a run in the ledger."""
        from fedemb.steps import plan_privacy, reserve_budget

        context = self.context(settings, run_id=run_id)
        plan_privacy.run(context)
        sign_start(context)
        reserve_budget.run(context, input_fingerprint="private.parquet@1", rehearse=no_rehearsal)
        reserved = read_reservation(context.artifacts.reservation)
        ledger, keys = context.writable_ledger, context.keys
        digests = dict.fromkeys(("inputs_sha", "private_root"), "a" * 64)
        commitments = self.commitments(run_id)
        ledger.bind(reserved, commitments=commitments, **digests)
        ledger.commit(
            reserved,
            rounds_started=settings.mechanism.rounds,
            round_log_sha="c" * 64,
            card_sha="d" * 64,
            signer=Signer.load_or_create(keys, "trainer"),
            keys=keys,
        )

    def replace(self, people: str, users: int) -> None:
        """The same run with other people in one folder: partitioned, reserved and bound again."""
        shutil.rmtree(self.private / people)
        write_users(self.private / people, users)
        card = read(self.root / "model" / "model.json", ModelCard).body
        for store in ("ledger", "keys"):
            shutil.rmtree(self.root / store)
        self.finish(card)

    def finish(self, card: ModelCard) -> None:
        """Reserves and commits the run, and signs what its steps signed."""
        self.reserve(self.config)
        self.sign_users()
        self.sign(self.root / "model" / "model.json", card)


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

    from fedemb.models.keras_backend import preprocess

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
    from fedemb.models.backbones import build_backbone

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
    run.finish(ModelCard.of_fields(model))
    return run


_BUILT: dict[str, FinishedRun] = {}


def shared_run(make_folder: Any) -> FinishedRun:
    """One finished run for all tests of a process: read it, do not write into it."""
    if "run" not in _BUILT:
        _BUILT["run"] = finished_run(make_folder("finished-run"), held_out=72, groups=3)
    return _BUILT["run"]
