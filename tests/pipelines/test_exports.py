"""Exports of phones, services and data sets that work, and the error of other formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedemb.data.columns import guess_source
from fedemb.data.image_files import is_side_file
from fedemb.errors import InputError
from fedemb.pipelines.run.load_config import load_config
from tests.pipelines.test_other_peoples_files import USERS, as_parquet, rows, users_of
from tests.pipelines.test_tables_of_others import PHOTOS, checked, plain, table

Make = Callable[[Path], Path]


def people(folder: Path, inside: str, beside: dict[str, str]) -> Path:
    """One folder per person with photos below `inside`, and files of `beside` next to each."""
    for number, (user, _, data) in enumerate(rows()):
        path = folder / "in" / user / inside / f"IMG_{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        for ending, text in beside.items():
            path.with_name(path.name + ending).write_text(text)
    return folder / "in"


def open_images(folder: Path) -> Path:
    return table(folder, "ImageID,Author,Title", lambda n, user, _: f'{n},{user},"a, b"')


WORKS: dict[str, Make] = {
    "Google Takeout": lambda f: people(
        f, "Takeout/Google Photos/Photos from 2024", {".supplemental-metadata.json": "{}"}
    ),
    "Apple Photos": lambda f: people(f, "Originals/2024", {".aae": "x", ".mov": "x"}),
    "Nextcloud": lambda f: people(f, "files/InstantUpload/2024/05", {".md.txt": "x"}),
    "LabelMe": lambda f: people(f, "", {".json": '{"shapes": []}'}),
    "Hugging Face Parquet": lambda f: as_parquet(f / "train-00000-of-00001.parquet"),
    "Kaggle CSV": lambda f: table(f, "file_name,user_id,label", plain),
}


@pytest.mark.parametrize("export", WORKS)
def test_init_counts_the_users_of_common_photo_exports(tmp_path, export):
    assert users_of(WORKS[export](tmp_path), tmp_path) == USERS


@pytest.mark.parametrize("beside", ["train", "train_images", "img_align_celeba"])
def test_images_of_a_table_are_found_in_a_folder_beside_it(tmp_path, beside):
    path = open_images(tmp_path).rename(tmp_path / "train.csv")
    (tmp_path / beside).mkdir()
    (tmp_path / "another").mkdir()
    for photo in tmp_path.glob("*.jpg"):
        photo.rename(tmp_path / beside / photo.name)
    assert users_of(path, tmp_path, "--alike=user", "--column", "image_id=ImageID") == USERS
    assert load_config(tmp_path / "made.yaml").data.source.image_root == str(tmp_path / beside)


def test_images_of_tables_in_several_folders_are_relative_to_each_table(tmp_path):
    """Hugging Face's image folders have one metadata.csv per split."""
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        named = table(tmp_path / split, "file_name,user_id,label", plain)
        named.rename(named.with_name("metadata.csv"))
    assert users_of(tmp_path / "*" / "metadata.csv", tmp_path) == USERS
    assert checked(tmp_path).used == PHOTOS  # the same photos in both splits: read once
    with pytest.raises(InputError, match=r"has test/metadata\.csv and train/metadata\.csv"):
        users_of(tmp_path, tmp_path)


def tree(folder: Path, *names: str) -> Path:
    data = [data for _, _, data in rows()]
    for number, name in enumerate(names):
        path = folder / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data[number])
    return folder / "in"


def test_photos_outside_user_folders_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"has no folder per user"):
        users_of(tree(tmp_path, "1.jpg", "2.jpg"), tmp_path)


def test_archive_is_refused_with_the_unpack_command(tmp_path):
    (tmp_path / "photos.tar").write_bytes(b"x")
    with pytest.raises(InputError, match="Unpack archives"):
        users_of(tmp_path / "photos.tar", tmp_path)


@pytest.mark.parametrize(
    ("inside", "label"), [("cup", "label"), ("DCIM/100APPLE", None), ("", None)]
)
def test_one_folder_inside_each_users_folder_is_a_class(tmp_path, inside, label):
    """Deeper folders are those of an export: photos of one year would be trained to be alike."""
    root = people(tmp_path, inside, {".json": "{}"})
    assert guess_source(str(root), {}).columns.label == label
    assert guess_source(str(root), {"label": "label"}).columns.label == "label"


@pytest.mark.parametrize(
    "beside",
    [
        *("ada/files_trashbin/files/1.jpg.d1", "ada/files_versions/1.jpg.v1"),
        *("appdata_oc12/preview/1/256.jpg", "__groupfolders/1/1.jpg"),
        *("#recycle/user-003/1.jpg", "$RECYCLE.BIN/1.jpg", "lost+found/1.jpg", "@eaDir/x/1.jpg"),
        *("Catalog Previews.lrdata/1.jpg", "ada/P.photoslibrary/resources/derivatives/1.jpeg"),
    ],
)
def test_thumbnails_and_trash_of_photo_servers_are_not_read(tmp_path, beside):
    """Deleted photos and thumbnails are not photos of a user."""
    assert users_of(tree(tmp_path, "ada/files/1.jpg", "bo/files/1.jpg", beside), tmp_path) == 2
    assert is_side_file(beside)


@pytest.mark.parametrize(
    "beside",
    [
        *("README.md", "data/dataset.json", "data/train.idx", "data/LICENSE", "data/a.unknown"),
        *("data/_SUCCESS", "data/_committed_12", "data/_common_metadata"),
    ],
)
def test_side_files_do_not_change_the_format_of_a_folder_of_shards(tmp_path, beside):
    as_parquet(tmp_path / "in" / "data" / "train-00000-of-00001.parquet")
    (tmp_path / "in" / beside).write_text("x")
    assert users_of(tmp_path / "in", tmp_path) == USERS
