"""Somebody else's net, frozen under a projection, through the whole DAG to embeddings of photos."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.whole_run import closing_line, fedemb, finish, run_command

SMALL = [
    "data.builtin.users=300",
    "data.builtin.images_per_user=3",
    "partition.virtual_clients=20",
    "policy.users_lower_bound=240",
    "policy.delta=1e-3",
    "model.backbone=mobilenet",  # a name for reports: the net is the file's
    "model.image_size=32",
    "model.channels=3",
    "model.embedding_dim=16",
    "model.trainable=projection",
    "pretraining.kind=import",
    "pretraining.source=null",
    "release.min_gain_over_public=null",
    "mechanism.rounds=2",
    "mechanism.noise_multiplier=2.0",
    "evaluation.bootstrap_samples=20",
    "audit.bootstrap_samples=20",
    "audit.max_users=20",
]


def _application(path: Path) -> None:
    """A Keras application, with batch normalisation that is not at rest."""
    import keras

    net = keras.applications.MobileNetV2(
        input_shape=(32, 32, 3), alpha=0.35, include_top=False, pooling="avg", weights=None
    )
    random = np.random.default_rng(0)
    for layer in net.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.set_weights([random.uniform(0.7, 1.3, w.shape) for w in layer.get_weights()])
    net.save(path)


@pytest.mark.slow
def test_imported_application_is_released_after_a_waiver_and_embeds_photos(tmp_path):
    _application(tmp_path / "net.keras")
    settings = [*SMALL, f"pretraining.import_path={tmp_path / 'net.keras'}"]
    run = tmp_path / "runs" / "only"
    refused = finish(run_command(run.parent, "--run-id", "only", overrides=settings))
    assert refused.returncode == 3, refused.stdout + refused.stderr
    why = closing_line(refused.stdout, "release")
    assert "waive pretraining_overlap_unchecked" in why
    assert "--from account_privacy" in why

    (model,) = run.glob("public/*/train-dp-fedemb/model/model.json")
    evidence = json.loads(model.read_text())["mechanism_audit"]
    assert evidence["replay"] == {"rounds": 2, "failed": []}
    assert not list(run.glob("private/*/train/*/features/*/*"))
    stores = ["--ledger", str(run / "policy" / "ledger"), "--keys", str(run / "policy" / "keys")]
    rule = ["pretraining_overlap_unchecked", "--model", str(model), "--reason", "random weights"]
    assert finish(fedemb("ledger", "waive", *rule, *stores)).returncode == 0
    done = finish(fedemb("run", "--resume", str(run), "--from", "account_privacy"))
    assert done.returncode == 0, done.stdout + done.stderr

    bundle = closing_line(done.stdout, "release").removeprefix("file://")
    trust = ["--trust", str(run / "policy" / "ledger" / "trust.json")]
    verified = finish(fedemb("verify", bundle, *trust))
    assert verified.returncode == 0, verified.stdout + verified.stderr
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 30, 3), np.uint8)
        Image.fromarray(pixels).save(photos / f"{number}.png")
    out = tmp_path / "embeddings.parquet"
    embedded = finish(fedemb("embed", str(photos), "-m", bundle, "-o", str(out)))
    assert embedded.returncode == 0, embedded.stdout + embedded.stderr
    vectors = np.stack(pq.read_table(out)["embedding"].to_pylist())
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors.shape == (3, 16)
