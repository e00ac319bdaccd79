"""A real backbone through release: serving, signature, verification, and what must not get in."""

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml

from fedemb.data import photos
from fedemb.data.hostile_photos import hostile_photos
from fedemb.data.pixels import canonical_image, decode_pngs
from fedemb.documents.artifacts import Raw
from fedemb.errors import ArtifactError, GateDenied, Refused, SignatureInvalid
from fedemb.foundation.document import encode
from fedemb.foundation.files import write_bytes
from fedemb.keys import open_key_store
from fedemb.keys.trust import trust_of
from fedemb.models.inference import embed as embed_pixels
from fedemb.pipelines.cli.main import app
from fedemb.release import bundle
from fedemb.release.bundle import SAVED_MODEL_FILES
from fedemb.release.released import load_whitelisted, save_preprocessing
from fedemb.steps import release_model
from fedemb.storage.local import LocalStore
from tests.conftest import REPOSITORY
from tests.kit.pipeline_runs import honest_run, small_release
from tests.kit.sealed_bundle import seal_again
from tests.kit.servers import fake_serving
from tests.kit.verified import problems_of


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return small_release.released(tmp_path_factory.mktemp("release") / "run")


@pytest.fixture
def copy(released, tmp_path):
    """A copy of the bundle to bend."""
    shutil.copytree(released.document["uri"], tmp_path / "bundle")
    return tmp_path / "bundle"


def test_good_bundle_verifies_with_and_without_the_live_ledger(released):
    uri = released.document["uri"]
    assert problems_of(uri, released.trust) == []
    assert problems_of(uri, released.trust, released.ledger_uri) == []


def test_serving_signature_maps_pixels_to_unit_embeddings(released):
    import tensorflow as tf

    images = np.random.default_rng(0).integers(0, 255, (3, 28, 28, 1), dtype=np.uint8)
    loaded = tf.saved_model.load(f"{released.document['uri']}/saved_model")
    found = loaded.signatures["serving_default"](images=tf.constant(images))["embeddings"].numpy()
    np.testing.assert_allclose(found, embed_pixels(released.backbone, images), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


def test_graph_of_a_bundle_is_never_executed(released, copy, tmp_path):
    """A graph can write files of the person who runs it, also one that a release key signed."""
    import tensorflow as tf

    hostile, written = tf.Module(), tmp_path / "written"

    @tf.function(input_signature=[tf.TensorSpec([None, 28, 28, 1], tf.uint8, name="images")])
    def serve(images):
        tf.io.write_file(str(written), "as the person who embeds")
        return {"embeddings": tf.zeros([tf.shape(images)[0], 16])}

    hostile.serve, hostile.held = serve, tf.Variable(0.0)
    tf.saved_model.save(hostile, copy / "saved_model", signatures={"serving_default": serve})
    serve(np.zeros((1, 28, 28, 1), np.uint8))
    written.unlink()  # the attack works
    (copy / "saved_model" / "fingerprint.pb").unlink()
    (copy / "saved_model" / "assets").rmdir()
    seal_again(copy, open_key_store(released.context().keys_uri), released.ledger())
    (problem,) = problems_of(str(copy), released.trust)
    assert "of saved_model is not what" in problem
    photo = tmp_path / "photos" / "a.png"
    write_bytes(photo, next(iter(hostile_photos())).data)
    words = ["embed", str(photo.parent), "-m", str(copy), "-o"]
    for number, trusted in enumerate((["--trust", str(released.trust)], ["--insecure"])):
        app(args=[*words, str(tmp_path / f"{number}.parquet"), *trusted], standalone_mode=False)
    assert not written.exists()


PAGE = (REPOSITORY / "docs" / "how_to" / "use_the_model.md").read_text()


def code_of(title: str) -> str:
    """The code block of a section of the page about a released model."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return "\n".join(line[4:] for line in section.split("\n") if line.startswith("    "))


@pytest.mark.long
def test_examples_of_the_page_give_the_same_embeddings(released, tmp_path, monkeypatch):
    import onnxruntime
    import tensorflow as tf

    monkeypatch.chdir(tmp_path)
    address = released.document["uri"]
    Path("photos").mkdir()
    for number, photo in enumerate(hostile_photos()):
        Path("photos", f"{number:02d}.img").write_bytes(photo.data)
    app(args=["embed", "photos", "-m", address, "--trust", str(released.trust)],
        standalone_mode=False)  # fmt: skip

    loaded = {"bundle": address, "paths": sorted(Path("photos").iterdir())}
    exec(code_of("Load in Python"), loaded)
    search: dict = {}
    exec(code_of("Search"), search)
    pixels, wanted = loaded["pixels"], search["vectors"]
    np.testing.assert_allclose(loaded["vectors"], wanted, atol=1e-5)
    found = (wanted @ wanted[0])[search["nearest"][0]]  # in several encodings one photo is as near
    np.testing.assert_allclose(search["similarity"][0], found, atol=1e-5)
    np.testing.assert_allclose(found[0], 1, atol=1e-5)

    for line in code_of("Convert").replace("BUNDLE", address).splitlines():
        program, *words = line.split()
        command = [Path(sys.executable).with_name(program), *words]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    session = onnxruntime.InferenceSession("model.onnx")
    np.testing.assert_allclose(session.run(None, {"images": pixels})[0], wanted, atol=1e-4)
    lite = tf.lite.Interpreter("model.tflite").get_signature_runner("serving_default")
    np.testing.assert_allclose(lite(images=pixels)["embeddings"], wanted, atol=1e-4)

    service = yaml.safe_load(code_of("Serve"))["spec"]["predictor"]["model"]
    assert service["modelFormat"] == {"name": "tensorflow"}
    signature = loaded["model"].signatures["serving_default"]
    (_, inputs) = signature.structured_input_signature
    assert [(name, item.dtype) for name, item in inputs.items()] == [("images", tf.uint8)]
    assert list(signature.structured_outputs) == ["embeddings"]


def test_released_model_reads_every_photo_as_training_did(released):
    from fedemb.release.released import ReleasedModel

    model = ReleasedModel(Path(released.document["uri"]))
    model.check_parity()
    photos = list(hostile_photos())
    stored = [canonical_image(photo.data, model.reader)[1] for photo in photos]
    trained = embed_pixels(released.backbone, decode_pngs(stored, 28, 1))
    served = model.embed(np.stack([model.reader.read(photo.data) for photo in photos]))
    np.testing.assert_allclose(served, trained, atol=1e-5)


@pytest.mark.parametrize(
    ("line", "planted"),
    [
        ("ImageOps.exif_transpose(image)", "image"),
        ('Image.new("RGBA", image.size, "white")', 'Image.new("RGBA", image.size, "black")'),
        (
            "image.resize(inner, Image.Resampling.BILINEAR)",
            "image.resize(inner, Image.Resampling.NEAREST)",
        ),
        ('FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "HEIF", "AVIF")', 'FORMATS = ("PNG", "JPEG")'),
    ],
)
def test_release_refuses_a_bundled_reader_that_decodes_differently(
    released, tmp_path, monkeypatch, line, planted
):
    text = Path(photos.__file__).read_text()
    assert line in text
    bare = tmp_path / "photos.py"
    bare.write_text(text.replace(line, planted))
    bundle_copy = tmp_path / "bundle"
    shutil.copytree(released.document["uri"], bundle_copy)
    monkeypatch.setattr(photos, "__file__", str(bare))
    served = partial(embed_pixels, released.backbone)
    with pytest.raises(Refused, match="test photo"):
        save_preprocessing(released.backbone, released.config, bundle_copy, served)


def test_release_repeated_publishes_nothing_twice(released):
    again = release_model.run(released.context())
    assert again == released.document
    assert len(released.ledger().state.attempts["monday", 1].releases) == 1


def test_every_changed_or_missing_bundle_file_is_detected(released, copy):
    names = sorted(path for path in copy.rglob("*") if path.is_file())
    assert len(names) == len(bundle.FILES) + len(bundle.SAVED_MODEL_FILES)
    for path in names:
        original = path.read_bytes()
        path.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
        assert problems_of(str(copy), released.trust), f"{path.name} changed"
        path.unlink()
        assert problems_of(str(copy), released.trust), f"{path.name} dropped"
        path.write_bytes(original)
    assert problems_of(str(copy), released.trust) == []


def test_key_inside_the_bundle_is_not_trusted(released, copy, tmp_path):
    stranger = trust_of(open_key_store(str(tmp_path / "stranger")))
    stranger.save(tmp_path / "trust.json")
    shutil.copy(released.trust, copy / "trust.json")
    problems = problems_of(str(copy), tmp_path / "trust.json")
    (problem,) = problems
    assert "extra files: trust.json" in problem
    (copy / "trust.json").unlink()
    (problem,) = problems_of(str(copy), tmp_path / "trust.json")
    assert "no key of the trust file signed its first record" in problem


def test_ledger_without_the_release_record_is_found(released, tmp_path):
    shutil.copytree(released.ledger_uri, tmp_path / "ledger")
    (tmp_path / "ledger" / "weekly" / "00000004.json").unlink()
    shutil.rmtree(tmp_path / "ledger" / "weekly" / "heads")
    problems = problems_of(released.document["uri"], released.trust, str(tmp_path / "ledger"))
    assert problems == ["the ledger has no record of this release"]


def test_verdict_of_another_model_or_a_denial_releases_nothing(released, tmp_path):
    other = honest_run.start(tmp_path / "other", "wednesday", released.policy_root).until_gate()
    other.do_gate()
    with pytest.raises(GateDenied, match="run gate_release"):
        release_model.run(other.context(verdict=released.verdict))
    verdict = json.loads(other.verdict.read_text())
    other.verdict.write_bytes(other.verdict.read_bytes() + b"\n")
    with pytest.raises(ArtifactError, match="changed after it was written"):
        release_model.run(other.context())
    write_bytes(other.verdict, encode({**verdict, "allow": False}))
    with pytest.raises(Refused):
        release_model.run(other.context())
    assert not (other.root / "releases").exists()


def test_simulation_releases_nothing(tmp_path):
    run = honest_run.start(tmp_path, purpose="simulation").until_gate()
    run.do_gate()
    assert release_model.run(run.context()) == {}
    assert not (run.root / "releases").exists()


def test_release_refuses_another_public_backbone_than_training_started_from(released):
    start = released.root / "pretrained" / "backbone.keras"
    trained_from = start.read_bytes()
    start.write_bytes(trained_from + b"other")
    with pytest.raises(Refused, match="not the one that training started from"):
        released.do_release()
    start.write_bytes(trained_from)


def test_backbone_with_a_further_layer_is_refused(released, tmp_path):
    import keras

    from fedemb.models.backbone_files import save_backbone

    inputs = keras.Input((28, 28, 1))
    hidden = keras.layers.Dense(4, name="head")(keras.layers.Flatten()(inputs))
    grown = keras.Model(inputs, keras.layers.Dense(8, name="embedding")(hidden))
    save_backbone(grown, tmp_path / "grown.keras")
    start = released.root / "pretrained" / "backbone.keras"
    with pytest.raises(Refused, match="head"):
        load_whitelisted(tmp_path / "grown.keras", start, released.config.model)


def test_raw_artifact_cannot_get_into_a_bundle(tmp_path):
    (tmp_path / "scores.parquet").write_bytes(b"private")
    with pytest.raises(Refused, match="Raw"):
        bundle.place(Raw(tmp_path / "scores.parquet"), tmp_path, "scores.parquet")


def test_foreign_text_in_the_card_is_escaped():
    from fedemb.reports.report import as_text

    words = "mine\n## Privacy\r\nepsilon 0 <script>[x](https://evil) `a` \x1b[2J**b**"
    expected = r"mine \#\# Privacy epsilon 0 &lt;script&gt;\[x\](https://evil) \`a\` \[2J\*\*b\*\*"
    assert as_text(words) == expected
    assert as_text("CC BY 4.0, by Ada Löwe & co") == "CC BY 4.0, by Ada Löwe &amp; co"


def test_taken_version_is_refused_for_another_model(released, tmp_path):
    other = honest_run.start(tmp_path / "other", "tuesday", released.policy_root).until_gate()
    other.do_gate()
    with pytest.raises(Refused, match=r"another release\.version"):
        release_model.run(other.context(releases=released.releases_uri))


# ---- A bundle that a killed release left in place is reused as it is, if it is ours ----


MARKER = "glyphs/1.0.json"


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run that was killed between tree and marker."""
    run = honest_run.start(tmp_path_factory.mktemp("killed")).until_gate()
    run.do_gate()
    create = LocalStore.create

    def fatal(self, name, data):
        if name == MARKER:
            raise KeyboardInterrupt
        return create(self, name, data)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalStore, "create", fatal)
        with pytest.raises(KeyboardInterrupt):
            run.do_release()
    return run


@pytest.mark.parametrize("name", ["README.md", "privacy_report.html"])
def test_changed_leftover_of_a_killed_release_is_refused(killed, name):
    releases = killed.root / "releases"
    path = releases / "glyphs" / "1.0" / name
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"e", b"f", 1))
    with pytest.raises(SignatureInvalid, match="differs from the manifest"):
        killed.do_release()
    assert not (releases / MARKER).exists()
    path.write_bytes(whole)


# ---- A bundle that would not verify for its files is not published ----


@pytest.fixture(scope="module")
def allowed(allowed_run, tmp_path_factory):
    return honest_run.copy_of(allowed_run, tmp_path_factory.mktemp("allowed") / "run")


@pytest.mark.parametrize(
    ("written", "odd"),
    [
        (SAVED_MODEL_FILES[:-1], "saved_model/variables/variables.index"),
        ((*SAVED_MODEL_FILES, "assets/vocabulary.txt"), "saved_model/assets/vocabulary.txt"),
    ],
    ids=["missing", "extra"],
)
def test_bundle_with_other_files_is_not_published(allowed, monkeypatch, written, odd):
    monkeypatch.setattr(fake_serving, "SAVED_MODEL_FILES", written)
    with pytest.raises(Refused, match=f"Nothing is published.*{odd}"):
        allowed.do_release()
    assert not (allowed.root / "releases").exists()
    assert allowed.ledger().state.attempts[allowed.run_id, 1].releases == []


def test_bundle_with_the_right_files_is_published_after_a_refusal(allowed):
    allowed.do_release()
    assert allowed.problems() == []
