"""A released bundle in use: photos embedded, stopped, gone on with, and searched."""

from __future__ import annotations

import io
import json
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from fedemb.data.hostile_photos import hostile_photos
from fedemb.errors import ArtifactError, FedEmbError, InputError, Refused
from fedemb.pipelines.cli.inference_commands import embed, search
from fedemb.serving import photo_parts
from fedemb.serving.embed_photos import embed_photos, read_embeddings
from fedemb.serving.export import FORMS
from fedemb.serving.export import export as export_model
from fedemb.serving.photo_parts import SPACE, KeptParts, PhotoSource
from fedemb.serving.released import ReleasedModel
from fedemb.serving.search import PhotoIndex, collapsed, require_embeddings, threshold

BUNDLE = Path(__file__).parents[2] / "golden" / "v1" / "bundle"
ENDINGS = {
    "jpeg": "jpg",
    "png": "png",
    "webp": "webp",
    "gif": "gif",
    "heic": "heic",
    "avif": "avif",
}


@pytest.fixture(scope="module")
def model():
    return ReleasedModel(BUNDLE)


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


def test_every_photo_is_a_row_and_what_is_none_has_a_reason(model, folder, tmp_path):
    output = tmp_path / "embeddings.parquet"
    done, bad, left_out = embed_photos(str(folder), model, output)
    assert left_out == 1
    table = pq.read_table(output)
    assert (done, bad) == (len(list(hostile_photos())) + 2, 2)
    reasons = {row["name"]: row["reason"] for row in table.to_pylist() if row["reason"]}
    assert reasons == {"none.jpg": "not_decodable", "deep/er/empty.png": "image_empty"}
    assert table.schema.metadata[SPACE].decode() == model.space_id
    names, values = read_embeddings(output, model.space_id, 8)
    place = names.index("deep/jpeg_exif_6.jpg")
    (photo,) = (photo for photo in hostile_photos() if photo.name == "jpeg exif 6")
    wanted = model.embed(model.reader.read(photo.data)[None])[0]
    np.testing.assert_allclose(values[place], wanted, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(values, axis=1), 1, atol=1e-5)


def test_stopped_and_run_again_it_goes_on_and_gives_the_same(model, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(photo_parts, "PART", 7)
    whole, stopped = tmp_path / "whole.parquet", tmp_path / "stopped.parquet"
    embed_photos(str(folder), model, whole)

    class Stop(Exception):
        pass

    def stop(done: int) -> None:
        if done == 14:
            raise Stop

    with pytest.raises(Stop):
        embed_photos(str(folder), model, stopped, progress=stop)
    assert not stopped.exists()
    embedded: list[int] = []
    honest = model.embed
    monkeypatch.setattr(
        model, "embed", lambda images: embedded.append(len(images)) or honest(images)
    )
    monkeypatch.setattr(model, "check_parity", lambda: None)
    embed_photos(str(folder), model, stopped)
    assert sum(embedded) == len(list(hostile_photos())) + 2 - 14 - sum(
        row is None for row in pq.read_table(whole)["embedding"].to_pylist()[14:]
    )
    assert pq.read_table(stopped).equals(pq.read_table(whole))


@pytest.mark.parametrize("special", ["e.parquet", "e.parquet.parts"])
def test_output_that_is_a_pipe_or_a_link_is_refused_and_left(model, folder, tmp_path, special):
    (tmp_path / "elsewhere").mkdir()
    if special == "e.parquet":
        os.mkfifo(tmp_path / special)
    else:
        (tmp_path / special).symlink_to(tmp_path / "elsewhere")
    before = (tmp_path / special).lstat()
    with pytest.raises(InputError, match="could not write"):
        embed_photos(str(folder), model, tmp_path / "e.parquet")
    assert (tmp_path / special).lstat().st_ino == before.st_ino
    assert not list((tmp_path / "elsewhere").iterdir())


def test_files_of_others_beside_the_kept_parts_stay(model, folder, tmp_path):
    parts = tmp_path / "e.parquet.parts"
    parts.mkdir()
    (parts / "thesis.docx").write_bytes(b"theirs")
    (parts / ".000000-000009.parquet.0a1b2c3d").write_bytes(b"of a killed run")
    embed_photos(str(folder), model, tmp_path / "e.parquet")
    assert [path.name for path in parts.iterdir()] == ["thesis.docx"]


def test_photo_of_any_ending_is_a_row_and_every_other_file_has_a_reason_or_is_counted(
    model, tmp_path
):
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


def test_part_ends_by_its_bytes_too(model, folder, tmp_path, monkeypatch):
    """Two thousand photos of a phone are ten gigabytes."""
    whole, small = tmp_path / "whole.parquet", tmp_path / "small.parquet"
    embed_photos(str(folder), model, whole)
    monkeypatch.setattr(photo_parts, "PART_BYTES", 3000)
    source = PhotoSource(str(folder))
    parts = [part for unit in source.units() for _, part in source.parts(unit)]
    assert len(parts) > 5
    assert all(sum(len(data) for _, data in part[:-1]) < 3000 for part in parts)
    embed_photos(str(folder), model, small)
    assert pq.read_table(small).equals(pq.read_table(whole))


def test_photo_whose_name_is_no_unicode_is_a_row(model, tmp_path):
    (tmp_path / "in").mkdir()
    photo = next(iter(hostile_photos()))
    (tmp_path / "in" / "caf\udce9.jpg").write_bytes(photo.data)
    assert embed_photos(str(tmp_path / "in"), model, tmp_path / "e.parquet") == (1, 0, 0)
    assert pq.read_table(tmp_path / "e.parquet")["name"].to_pylist() == ["caf?.jpg"]


def test_search_among_no_photo_that_could_be_read_is_a_sentence(model, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(b"none")
    embed_photos(str(tmp_path / "in"), model, tmp_path / "e.parquet")
    with pytest.raises(InputError, match="no photo was readable"):
        read_embeddings(tmp_path / "e.parquet", model.space_id, 8)


@pytest.mark.parametrize("name", ["deep/jpeg_exif_1.jpg", "none.jpg", "aaa.jpg"])
def test_parts_of_other_photos_are_refused(model, folder, tmp_path, monkeypatch, name):
    """One is new, or is another photo under the name that it had."""
    output = tmp_path / "e.parquet"
    monkeypatch.setattr(KeptParts, "remove", lambda _: None)  # stopped right before its end
    embed_photos(str(folder), model, output)
    with pytest.raises(InputError, match="exists"):
        embed_photos(str(folder), model, output)
    output.unlink()
    (folder / name).write_bytes((folder / "deep" / "jpeg_exif_6.jpg").read_bytes())
    with pytest.raises(Refused, match="other photos"):
        embed_photos(str(folder), model, output)


def test_beam_gives_the_same_file_and_goes_on_after_a_stop(model, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(photo_parts, "PART", 7)
    whole, spread = tmp_path / "whole.parquet", tmp_path / "spread.parquet"
    embed_photos(str(folder), model, whole)
    options = ["--direct_num_workers=1"]
    honest = KeptParts.write
    kept: list[str] = []

    def dies_at_the_third(self, part, embeddings):
        if len(kept) == 2:
            raise RuntimeError("a name that must not be shown")
        kept.append(part.name)
        return honest(self, part, embeddings)

    monkeypatch.setattr(KeptParts, "write", dies_at_the_third)
    with pytest.raises(FedEmbError, match="while embedding photos") as stopped:
        embed_photos(str(folder), model, spread, beam_options=options)
    assert "must not be shown" not in str(stopped.value)
    assert not spread.exists()
    monkeypatch.setattr(KeptParts, "write", lambda *a: kept.append(a[1].name) or honest(*a))
    photos = len(list(hostile_photos())) + 2
    assert embed_photos(str(folder), model, spread, beam_options=options) == (photos, 2, 1)
    assert len(kept) == len(set(kept)) == -(-photos // 7), "no part was embedded twice"
    assert pq.read_table(spread).equals(pq.read_table(whole))
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".parts")] == []


def test_workers_take_no_model_but_the_one_that_was_verified(model, folder, tmp_path):
    copy = tmp_path / "e.parquet.parts" / f"model-{model.space_id}"
    shutil.copytree(BUNDLE, copy)
    (copy / "extra.txt").write_text("not of the release")
    with pytest.raises(Refused, match="not the one that was verified"):
        embed_photos(
            str(folder), model, tmp_path / "e.parquet", beam_options=["--direct_num_workers=1"]
        )


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


def test_nearest_to_a_photo_is_the_photo_however_it_was_stored(model, folder, tmp_path):
    output = tmp_path / "e.parquet"
    embed_photos(str(folder), model, output)
    index = PhotoIndex(output, model)
    wide = next(photo for photo in hostile_photos() if photo.name == "jpeg wide")
    (best, similarity), *_ = index.nearest(wide.data, 3)
    assert best == "deep/jpeg_wide.jpg"
    assert similarity == pytest.approx(1, abs=1e-5)


def test_embeddings_of_another_space_are_refused(model, folder, tmp_path):
    output = tmp_path / "e.parquet"
    embed_photos(str(folder), model, output)
    other = pq.read_table(output).replace_schema_metadata({SPACE: b"es-other"})
    pq.write_table(other, tmp_path / "other.parquet")
    with pytest.raises(Refused, match="space es-other"):
        PhotoIndex(tmp_path / "other.parquet", model)


def test_threshold_is_one_that_was_measured(model):
    rate, least = threshold(BUNDLE, None)
    assert (rate, least) == ("0.001", 0.7)
    assert threshold(BUNDLE, "0.1") == ("0.1", 0.3)
    with pytest.raises(InputError, match=r"one of 0\.001, 0\.1"):
        threshold(BUNDLE, "0.5")


def test_installation_that_reads_otherwise_is_refused(model, folder, tmp_path, monkeypatch):
    from fedemb.data import photos

    monkeypatch.setattr(photos.ImageOps, "exif_transpose", lambda image: image)
    with pytest.raises(Refused, match=r"test photo jpeg exif \d "):
        embed_photos(str(folder), model, tmp_path / "e.parquet")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """What a release of a classifier holds, as far as it is used here."""
    from fedemb.engine import build_backbone
    from fedemb.models.loading import save_backbone
    from fedemb.steps.release_model.serving import save_for_serving
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
    with pytest.raises(InputError, match="search needs embeddings"):
        require_embeddings(classifier)


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["model", "classifier"])
def test_every_export_is_read_back_and_gives_the_same(request, tmp_path, form, kind):
    model = request.getfixturevalue(kind)
    path = export_model(model, form, tmp_path)
    size, channels = model.reader.image_size, model.reader.channels
    pixels = np.random.default_rng(1).integers(0, 256, (5, size, size, channels), np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the runtimes, about their own future
        found = FORMS[form][1](path.read_bytes())(pixels)
    np.testing.assert_allclose(found, model.embed(pixels), atol=1e-4)


def test_export_that_gives_something_else_is_not_written(model, tmp_path, monkeypatch):
    honest = model.embed
    monkeypatch.setattr(model, "embed", lambda images: honest(images) + np.float32(1e-3))
    with pytest.raises(Refused, match=r"differ by 0\.001"):
        export_model(model, "keras", tmp_path)
    assert not (tmp_path / "model.keras").exists()
    with pytest.raises(InputError, match="onnx, tflite, keras"):
        export_model(model, "pickle", tmp_path)


def test_what_is_no_bundle_is_a_sentence(tmp_path):
    with pytest.raises(ArtifactError, match="release_model"):
        ReleasedModel(tmp_path)


def test_list_of_photos_is_not_taken_for_a_folder(tmp_path):
    with pytest.raises(InputError, match="Pass the folder of the photos"):
        next(PhotoSource(str(tmp_path / "photos.csv")).units())


def test_commands_embed_and_search(folder, tmp_path):
    app = typer.Typer()
    app.command()(embed)
    app.command()(search)
    runner, output = CliRunner(), str(tmp_path / "e.parquet")
    used = ("-m", str(BUNDLE), "--trust", str(BUNDLE.parent / "ledger" / "trust.json"))
    done = runner.invoke(app, ["embed", str(folder), *used, "-o", output])
    assert done.exit_code == 0, done.output
    assert "2 without an embedding" in done.output
    query = str(folder / "deep" / "jpeg_tall.jpg")
    found = runner.invoke(app, ["search", query, "--in", output, *used, "-k", "2"])
    assert found.exit_code == 0, found.output
    assert found.output.splitlines()[0].split() == ["1.000", "match", "deep/jpeg_tall.jpg"]


def test_grey_bundle_reads_grey(model):
    grey = Image.new("L", (30, 20), 77)
    sink = io.BytesIO()
    grey.save(sink, "PNG")
    assert set(model.reader.read(sink.getvalue()).ravel()) == {77}


def stored(path, model, rows, kind=None, **columns):
    """A file of embeddings as somebody else wrote it, of this model's space."""
    table = {
        "name": [f"{n}.jpg" for n in range(len(rows))],
        "embedding": pa.array(rows, kind or pa.list_(pa.float32())),
        **columns,
    }
    schema = {SPACE: model.space_id.encode()}
    pq.write_table(pa.table(table).replace_schema_metadata(schema), path)
    return path


def unit(place):
    return [1.0 if n == place else 0.0 for n in range(8)]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([unit(0)[:7], [*unit(1), 0.0]], "photo 0 has another number of values than 8"),
        ([unit(0), [*unit(1), *unit(2)]], "photo 1 has another number of values than 8"),
        ([unit(0), [float("nan")] * 8], "photo 1 has a value that is not finite"),
        ([unit(0), [float("inf"), *unit(1)[1:]]], "photo 1 has a value that is not finite"),
        ([unit(0), [None, *unit(0)[1:]]], "photo 1 has a value that is not finite"),
        ([unit(0), [2.0, *unit(1)[1:]]], "photo 1 is not of unit length"),
        ([unit(0), [0.0] * 8], "photo 1 is not of unit length"),
    ],
)
def test_damaged_embeddings_are_refused_and_no_vector_moves(model, tmp_path, rows, problem):
    path = stored(tmp_path / "theirs.parquet", model, rows)
    with pytest.raises(InputError, match=problem) as refused:
        PhotoIndex(path, model)
    assert "theirs.parquet" in str(refused.value)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"name": [1]}, "the column 'name' of type int64"),
        ({"embedding": [7.0]}, "the column 'embedding' of type double"),
        ({"embedding": [["a"] * 8]}, "expected a list of floats"),
        ({"name": pa.array([None], pa.string())}, "photo 0 has no name"),
    ],
)
def test_file_of_other_columns_is_refused(model, tmp_path, columns, problem):
    path = stored(tmp_path / "theirs.parquet", model, [unit(0)], **columns)
    with pytest.raises(InputError, match=problem):
        PhotoIndex(path, model)


def test_embeddings_of_every_list_type_are_read(model, tmp_path):
    for kind in (pa.list_(pa.float32(), 8), pa.large_list(pa.float32()), pa.list_(pa.float64())):
        fixed = pa.types.is_fixed_size_list(kind)  # Arrow reads none back that is null
        rows = [unit(3), unit(2) if fixed else None, unit(1)]
        path = stored(tmp_path / "theirs.parquet", model, rows, kind)
        names, values = read_embeddings(path, model.space_id, 8)
        assert names == ["0.jpg", *["1.jpg"] * fixed, "2.jpg"]
        assert values.tolist() == [row for row in rows if row]


def test_stored_embeddings_in_a_pipe_are_not_waited_for(model, tmp_path):
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(InputError, match="holds no embeddings"):
        PhotoIndex(tmp_path / "pipe.parquet", model)


def test_model_that_does_not_distinguish_photos_is_named(model, tmp_path):
    same = PhotoIndex(stored(tmp_path / "a.parquet", model, [unit(0)] * 3), model)
    apart = PhotoIndex(stored(tmp_path / "b.parquet", model, [unit(0), unit(1)]), model)
    assert "does not distinguish these 3 photos" in collapsed(same, 0.9)
    assert "does not distinguish photos" in collapsed(apart, 0.99999)
    assert not collapsed(apart, 0.9)
