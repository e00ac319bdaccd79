"""A released bundle embeds photos."""

from __future__ import annotations

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedemb.data.hostile_photos import hostile_photos
from fedemb.errors import ArtifactError, InputError, Refused
from fedemb.release import embed_photos as module
from fedemb.release.embed_photos import SPACE, embed_photos
from fedemb.release.photo_source import PhotoSource
from fedemb.release.released import ReleasedModel
from tests.kit.cli import fedemb


@pytest.fixture(scope="module")
def model(small_release):
    return ReleasedModel(small_release / "bundle")


@pytest.fixture
def folder(tmp_path):
    """Every hostile photo as a file, one that is none, and one that is cut."""
    root = tmp_path / "photos"
    (root / "deep" / "er").mkdir(parents=True)
    for photo in hostile_photos():
        kind = photo.name.split()[0]
        ending = {"jpeg": "jpg"}.get(kind, kind)
        (root / "deep" / f"{photo.name.replace(' ', '_')}.{ending}").write_bytes(photo.data)
    (root / "none.jpg").write_bytes(b"no photo")
    (root / "deep" / "er" / "empty.png").write_bytes(b"")
    (root / "notes.txt").write_text("not read")
    return root


def test_every_photo_has_a_row_and_other_files_a_reason(model, folder, tmp_path):
    output = tmp_path / "embeddings.parquet"
    done, bad, left_out = embed_photos(str(folder), model, output)
    assert left_out == 1
    table = pq.read_table(output)
    assert (done, bad) == (len(list(hostile_photos())) + 2, 2)
    reasons = {row["name"]: row["reason"] for row in table.to_pylist() if row["reason"]}
    assert reasons == {"none.jpg": "not_decodable", "deep/er/empty.png": "image_empty"}
    assert table.schema.metadata[SPACE].decode() == model.space_id
    read = table.filter(table["embedding"].is_valid())
    names, values = read["name"].to_pylist(), np.stack(read["embedding"].to_pylist())
    place = names.index("deep/jpeg_exif_6.jpg")
    (photo,) = (photo for photo in hostile_photos() if photo.name == "jpeg exif 6")
    wanted = model.embed(model.reader.read(photo.data)[None])[0]
    np.testing.assert_allclose(values[place], wanted, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(values, axis=1), 1, atol=1e-5)


def test_output_to_a_pipe_is_refused(model, folder, tmp_path):
    os.mkfifo(tmp_path / "e.parquet")
    before = (tmp_path / "e.parquet").lstat()
    with pytest.raises(InputError, match="could not write"):
        embed_photos(str(folder), model, tmp_path / "e.parquet")
    assert (tmp_path / "e.parquet").lstat().st_ino == before.st_ino


def test_photos_of_any_extension_are_rows(model, tmp_path):
    root = tmp_path / "photos"
    root.mkdir()
    jpeg, heic, avif = (
        next(photo.data for photo in hostile_photos() if photo.name == name)
        for name in ("jpeg wide", "heic", "avif")
    )
    for name in ("a.jfif", "b.jpe", "c.MPO", "d.pjpeg", "e", "f.backup", "g.IMG_0001"):
        (root / name).write_bytes(jpeg)
    (root / "h.heif").write_bytes(heic)
    (root / "i.avif").write_bytes(avif)
    (root / "broken.jpg").write_bytes(jpeg[:9])
    for name in ("j.mov", "k.JSON", "Thumbs.db", "raw.dng"):
        (root / name).write_bytes(b"beside")
    done = embed_photos(str(root), model, tmp_path / "e.parquet")
    assert done == (10, 1, 4)
    rows = pq.read_table(tmp_path / "e.parquet").to_pylist()
    assert {row["name"]: row["reason"] for row in rows if row["reason"]} == {
        "broken.jpg": "not_decodable"
    }


def test_batches_are_limited_in_bytes_without_changing_embeddings(
    model, folder, tmp_path, monkeypatch
):
    """Two thousand photos of a phone are ten gigabytes."""
    whole, small = tmp_path / "whole.parquet", tmp_path / "small.parquet"
    embed_photos(str(folder), model, whole)
    monkeypatch.setattr(module, "MOST_BYTES", 3000)
    source = PhotoSource(str(folder))
    assert len(list(module.decoded(source.photos(), model.reader))) > 5
    embed_photos(str(folder), model, small)
    assert pq.read_table(small).equals(pq.read_table(whole))


def test_set_without_a_readable_photo_is_a_failure_and_leaves_no_file(model, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(b"no photo")
    with pytest.raises(InputError, match="None of the 1 files"):
        embed_photos(str(tmp_path / "in"), model, tmp_path / "e.parquet")
    assert not (tmp_path / "e.parquet").exists()


def test_photo_with_a_non_unicode_name_is_a_row(model, tmp_path):
    (tmp_path / "in").mkdir()
    photo = next(iter(hostile_photos()))
    (tmp_path / "in" / "caf\udce9.jpg").write_bytes(photo.data)
    assert embed_photos(str(tmp_path / "in"), model, tmp_path / "e.parquet") == (1, 0, 0)
    assert pq.read_table(tmp_path / "e.parquet")["name"].to_pylist() == ["caf?.jpg"]


def test_parquet_rows_keep_their_place_over_row_groups_and_files(model, tmp_path):
    data = [photo.data for photo in hostile_photos()][:5]
    (tmp_path / "set").mkdir()
    for name in ("a", "b"):
        path = tmp_path / "set" / f"{name}.parquet"
        pq.write_table(pa.table({"photo": data}), path, row_group_size=2)
    embed_photos(str(tmp_path / "set" / "*.parquet"), model, tmp_path / "e.parquet")
    table = pq.read_table(tmp_path / "e.parquet")
    assert table["name"].to_pylist() == [f"{f}.parquet#{n}" for f in "ab" for n in range(5)]
    pixels = np.stack([model.reader.read(photo) for photo in data])
    wanted = np.tile(model.embed(pixels), (2, 1))
    np.testing.assert_allclose(np.stack(table["embedding"].to_pylist()), wanted, atol=1e-6)


def test_parquet_rows_are_named_by_a_column_or_by_their_place(model, tmp_path):
    data = [photo.data for photo in hostile_photos()][:3]
    pq.write_table(pa.table({"photo": [*data, None], "sku": list("abcd")}), tmp_path / "p.parquet")
    for column, wanted in (("sku", list("abcd")), (None, [f"p.parquet#{n}" for n in range(4)])):
        output = tmp_path / f"{column}.parquet"
        assert embed_photos(str(tmp_path / "p.parquet"), model, output, id_column=column) == (
            4,
            1,
            0,
        )
        assert pq.read_table(output)["name"].to_pylist() == wanted


def test_installation_that_decodes_differently_is_refused(model, folder, tmp_path, monkeypatch):
    from fedemb.data import photos

    monkeypatch.setattr(photos.ImageOps, "exif_transpose", lambda image: image)
    with pytest.raises(Refused, match=r"test photo jpeg exif \d "):
        embed_photos(str(folder), model, tmp_path / "e.parquet")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """What a release of a classifier holds, as far as it is used here."""
    from fedemb.models.backbone_files import save_backbone
    from fedemb.models.backbones import build_backbone
    from fedemb.release.released import save_for_serving
    from tests.kit.pipeline_runs.training_run import classifier_config

    config, bundle = classifier_config(), tmp_path_factory.mktemp("classifier")
    backbone = build_backbone(config.model, seed=0)
    for weight in backbone.weights:  # the head starts at zero
        weight.assign(weight + np.random.default_rng(0).normal(size=weight.shape, scale=0.3))
    save_backbone(backbone, bundle / "backbone.keras")
    save_for_serving(backbone, config.model, bundle / "saved_model")
    (bundle / "config.json").write_text(config.model_dump_json())
    return ReleasedModel(bundle)


def test_a_classifier_writes_probabilities_under_the_names_of_its_classes(
    classifier, folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(classifier, "check_parity", lambda: None)  # no step wrote its parity file
    whole, classes = tmp_path / "whole.parquet", classifier.config.model.classes
    photos, bad, _ = embed_photos(str(folder), classifier, whole)
    table = pq.read_table(whole)
    assert table.column_names == ["name", "probabilities", "reason", "class"]
    assert json.loads(table.schema.metadata[b"classes"]) == list(classes)
    assert 0 < bad == table["class"].null_count == table["probabilities"].null_count < photos
    read = table.filter(table["probabilities"].is_valid())
    chances = np.stack(read["probabilities"].to_pylist())
    np.testing.assert_allclose(chances.sum(axis=1), 1, atol=1e-5)
    assert [classes[best] for best in chances.argmax(axis=1)] == read["class"].to_pylist()


def test_folder_without_a_bundle_is_an_artifact_error(tmp_path):
    with pytest.raises(ArtifactError, match="release_model"):
        ReleasedModel(tmp_path)


def test_embedding_a_csv_instead_of_a_photo_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="Pass the folder of the photos"):
        next(PhotoSource(str(tmp_path / "photos.csv")).photos())


def test_embed_command_reports_files_without_an_embedding(small_release, folder, tmp_path):
    bundle, trust = small_release / "bundle", small_release / "ledger" / "trust.json"
    said = fedemb("embed", folder, "-m", bundle, "--trust", trust, "-o", tmp_path / "e.parquet")
    assert "2 without an embedding" in said
