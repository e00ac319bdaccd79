"""Your own photos under somebody else's frozen net, through the whole DAG to embeddings.

What `fedemb embed` makes of the files of evaluation people is what evaluation measured.
"""

import json
import runpy
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps

from tests.kit.pipeline_runs.whole_run import closing_line, fedemb, finish, run_command
from tests.kit.verified_folder import as_committed

SMALL = [
    "data.source.label_scope=user",
    "partition.virtual_clients=20",
    "policy.users_lower_bound=240",
    "release.train_despite_noise=the run is small",
    "policy.delta=1e-3",
    "model.backbone=mobilenet",  # a name for reports: the net is the file's
    "model.image_size=32",
    "model.channels=3",
    "model.embedding_dim=16",
    "model.trainable=projection",
    "pretraining.kind=import",
    "pretraining.source=null",
    "evaluation.false_accept_rates=[0.001,0.1]",
    "release.min_gain_over_public=null",
    "mechanism.rounds=2",
    "mechanism.noise_multiplier=2.0",
    "evaluation.bootstrap_samples=20",
    "audit.bootstrap_samples=20",
    "audit.max_users=20",
]


def _application(path: Path) -> None:
    """A Keras application whose batch normalisation has seen images."""
    import keras

    net = keras.applications.MobileNetV2(
        input_shape=(32, 32, 3), alpha=0.35, include_top=False, pooling="avg", weights=None
    )
    # Random weights at rest tell nothing apart: all images come out alike.
    for layer in net.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.5
    patches = np.random.default_rng(0).uniform(-1, 1, (64, 4, 4, 3)).repeat(8, 1).repeat(8, 2)
    for _ in range(16):
        net(patches.astype(np.float32), training=True)
    net.save(path)


def _photos(folder: Path) -> None:
    """Three photos of each of 300 people, in other encodings and as a phone turns them."""
    random = np.random.default_rng(1)
    forms = (("jpg", "JPEG", "CMYK"), ("webp", "WEBP", "RGBA"), ("png", "PNG", "RGB"))
    for person in range(300):
        own = random.integers(0, 256, (2, 2, 3))
        (folder / f"p{person:03d}").mkdir(parents=True)
        for ending, form, mode in forms:
            noisy = np.clip(own + random.normal(0, 3, own.shape), 0, 255).astype(np.uint8)
            image = Image.fromarray(noisy).resize((45, 60)).convert(mode)
            way = int(random.integers(1, 9))
            image.getexif()[0x0112] = {6: 8, 8: 6}.get(way, way)  # what undoes that turn
            stored, exif = ImageOps.exif_transpose(image), Image.Exif()
            exif[0x0112] = way
            stored.save(folder / f"p{person:03d}" / f"photo.{ending}", form, exif=exif)


def _measured_again(run: Path, bundle: Path, photos: Path, out: Path) -> None:
    """The recall of the report, from the files of evaluation people and the bundle alone."""
    from fedemb.data.client_data import UserStore
    from fedemb.data.pixels import decode_pngs
    from fedemb.evaluation.metrics import recall

    config = json.loads((bundle / "config.json").read_bytes())["model"]
    shipped = runpy.run_path(str(bundle / "preprocessing.py"))["PhotoReader"]
    reader = shipped(config["image_size"], config["channels"], config["aspect_ratio"])
    rows = pq.read_table(out).to_pylist()
    assert not [row for row in rows if row["reason"]]
    by_pixels = {
        reader.read((photos / row["name"]).read_bytes()).tobytes(): row["embedding"] for row in rows
    }
    assert len(by_pixels) == len(rows) == 900
    (folder,) = run.glob("private/*/evaluation")
    store = UserStore(as_committed(folder))
    people = store.read(np.arange(len(store)))
    pixels = decode_pngs([i for p in people for i in p.images], store.image_size, store.channels)
    embeddings = np.array([by_pixels[image.tobytes()] for image in pixels])
    labels = np.repeat(np.arange(len(people)), [len(person.images) for person in people])
    report = json.loads((bundle / "utility_report.json").read_bytes())
    for rate, measured in report["recall_at_far"].items():
        again = recall(embeddings, labels, float(rate), samples=2).value
        assert again == pytest.approx(measured["value"], abs=1e-3)
    assert report["recall_at_far"]["0.1"]["value"] > 0.2, "or the figures could agree at nothing"


@pytest.mark.slow
def test_imported_application_is_released_after_a_waiver_and_embeds_photos(tmp_path):
    _application(tmp_path / "net.keras")
    settings = [*SMALL, f"pretraining.import_path={tmp_path / 'net.keras'}"]
    run, photos, policy = tmp_path / "runs" / "only", tmp_path / "photos", tmp_path / "policy"
    _photos(photos)
    own = ("--data", str(photos), "--policy", str(policy))
    refused = finish(run_command(run.parent, "--run-id", "only", *own, overrides=settings))
    assert refused.returncode == 3, refused.stdout + refused.stderr
    why = closing_line(refused.stdout, "release")
    assert "--waive pretraining_overlap_unchecked" in why
    assert "--from account_privacy" in why

    (model,) = run.glob("public/*/train-dp-fedemb/model/model.json")
    evidence = json.loads(model.read_text())["mechanism_audit"]
    assert evidence["replay"] == {"rounds": 2, "failed": []}
    assert not list(run.glob("private/*/train/*/features/*/*"))
    rule = ["--waive", "pretraining_overlap_unchecked", "--reason", "random weights", "--yes"]
    waived = finish(fedemb("approve", str(run), *rule, "--keys", str(policy / "keys")))
    assert waived.returncode == 0, waived.stdout + waived.stderr
    done = finish(fedemb("run", "--resume", str(run), "--from", "account_privacy"))
    assert done.returncode == 0, done.stdout + done.stderr

    bundle = closing_line(done.stdout, "release").partition(" (")[0].removeprefix("file://")
    trust = ["--trust", str(policy / "ledger" / "trust.json")]
    verified = finish(fedemb("verify", bundle, *trust))
    assert verified.returncode == 0, verified.stdout + verified.stderr
    out = tmp_path / "embeddings.parquet"
    embedded = finish(fedemb("embed", str(photos), "-m", bundle, *trust, "-o", str(out)))
    assert embedded.returncode == 0, embedded.stdout + embedded.stderr
    vectors = np.stack(pq.read_table(out)["embedding"].to_pylist())
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors.shape == (900, 16)
    _measured_again(run, Path(bundle), photos, out)
