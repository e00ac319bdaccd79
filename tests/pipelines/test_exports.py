"""Exports of phones, services and data sets: each works, or is refused with what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fedemb.data.columns import guess_source
from fedemb.data.formats.exports import FILES, refuse_other_format
from fedemb.data.formats.image_files import is_side_file
from fedemb.errors import InputError
from fedemb.pipelines.run.load_config import load_config
from fedemb.serving.photo_source import PhotoSource
from tests.components.data.test_webdataset import shard
from tests.pipelines.test_other_peoples_files import USERS, as_folders, as_parquet, rows, users_of
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


def webdataset(folder: Path) -> Path:
    files = []
    for number, (user, _, data) in enumerate(rows()):
        values = json.dumps({"user_id": user, "url": "x"}).encode()
        files += [(f"{number:09d}.jpg", data), (f"{number:09d}.json", values)]
    return shard(folder / "00000.tar", files)


def open_images(folder: Path) -> Path:
    return table(folder, "ImageID,Author,Title", lambda n, user, _: f'{n},{user},"a, b"')


WORKS: dict[str, Make] = {
    "Google Takeout": lambda f: people(
        f, "Takeout/Google Photos/Photos from 2024", {".supplemental-metadata.json": "{}"}
    ),
    "Apple Photos": lambda f: people(f, "Originals/2024", {".aae": "x", ".mov": "x"}),
    "Lightroom": lambda f: people(f, "2024/2024-05-01", {".xmp": "<x/>"}),
    "Nextcloud": lambda f: people(f, "files/InstantUpload/2024/05", {".md.txt": "x"}),
    "LabelMe": lambda f: people(f, "", {".json": '{"shapes": []}'}),
    "phone card": lambda f: people(f, "DCIM/100APPLE", {".THM.db": "x"}),
    "Hugging Face Parquet": lambda f: as_parquet(f / "train-00000-of-00001.parquet"),
    "Kaggle CSV": lambda f: table(f, "file_name,user_id,label", plain),
    "webdataset": webdataset,
}


@pytest.mark.parametrize("export", WORKS)
def test_export_with_one_folder_or_id_per_person_works(tmp_path, export):
    assert users_of(WORKS[export](tmp_path), tmp_path) == USERS


def test_open_images_needs_the_name_of_its_image_column(tmp_path):
    path = open_images(tmp_path)
    with pytest.raises(InputError, match=r"'ImageID'.*--column image_id=NAME"):
        users_of(path, tmp_path)
    named = ("--by-user", "--column", "image_id=ImageID")
    assert users_of(path, tmp_path, *named) == USERS


@pytest.mark.parametrize("beside", ["train", "train_images", "img_align_celeba"])
def test_images_of_a_table_are_found_in_a_folder_beside_it(tmp_path, beside):
    path = open_images(tmp_path).rename(tmp_path / "train.csv")
    (tmp_path / beside).mkdir()
    (tmp_path / "another").mkdir()
    for photo in tmp_path.glob("*.jpg"):
        photo.rename(tmp_path / beside / photo.name)
    assert users_of(path, tmp_path, "--by-user", "--column", "image_id=ImageID") == USERS
    assert load_config(tmp_path / "made.yaml").data.source.image_root == str(tmp_path / beside)


def test_folder_of_the_images_of_a_table_can_be_named(tmp_path):
    path = table(tmp_path, "file_name,user_id,label", plain)
    elsewhere = tmp_path / "far" / "away"
    elsewhere.mkdir(parents=True)
    for photo in tmp_path.glob("*.jpg"):
        photo.rename(elsewhere / photo.name)
    assert users_of(path, tmp_path, "--image-root", str(elsewhere)) == USERS
    assert load_config(tmp_path / "made.yaml").data.source.image_root == str(elsewhere)
    with pytest.raises(InputError, match=r"No folder at .*/nowhere"):
        users_of(path, tmp_path, "--image-root", str(tmp_path / "nowhere"))


def test_folder_of_images_is_refused_where_no_table_names_them(tmp_path):
    root = as_folders(tmp_path / "in")
    with pytest.raises(InputError, match=r"--image-root is .* not a CSV\. Remove the option"):
        users_of(root, tmp_path, "--image-root", str(tmp_path))


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


def test_raw_photos_alone_are_refused_with_the_reason(tmp_path):
    with pytest.raises(InputError, match=r"2: .*raw photo"):
        users_of(tree(tmp_path, "ada/1.NEF", "bo/1.dng"), tmp_path)


@pytest.mark.parametrize(("name", "says"), [("ids.txt", "is a text file"), ("x.bin", "unknown")])
def test_file_that_is_no_table_is_refused_and_not_called_missing(tmp_path, name, says):
    (tmp_path / name).write_text("000001.jpg 2880")
    with pytest.raises(InputError, match=says):
        users_of(tmp_path / name, tmp_path)


def tree(folder: Path, *names: str) -> Path:
    data = [data for _, _, data in rows()]
    for number, name in enumerate(names):
        path = folder / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data[number])
    return folder / "in"


DATES = "are dates .* one folder per person"
PARTS = "are parts of a data set .* CSV with the columns file and user_id"
LOOSE = "beside each other.* one folder per person"


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("Photos from 2019/1.jpg", "Photos from 2020/1.jpg"), DATES),
        (("2019/01/1.jpg", "2020/02/1.jpg"), DATES),
        (("2019-01-02/1.jpg", "2020_02_03/1.jpg"), DATES),
        (("100APPLE/1.jpg", "101APPLE/1.jpg"), DATES),
        (("train2017/1.jpg", "val2017/1.jpg", "annotations/a.jpg"), PARTS),
        (("images/1.jpg", "labels/1.txt"), PARTS),
        (("train/cat/1.jpg", "test/cat/1.jpg"), PARTS),
        (("JPEGImages/1.jpg", "Annotations/1.xml"), PARTS),
        (("Rome, 1 May 2024/1.jpg", "Oslo, 2 June 2024/1.jpg"), DATES),
        (("Rome, May 1, 2024/1.jpg", "May 2, 2024/1.jpg"), DATES),
        (("2024-05-01 Wedding/1.jpg", "2024-06-02 Trip/1.jpg"), DATES),
        (("Photos from 2019/1.jpg", "Holiday in Rome/1.jpg"), "are albums of one account .* one"),
        (
            ("takeout-20240101T000000Z-001/Takeout/1.jpg", "takeout-20240101T000000Z-002/T/2.jpg"),
            "are parts of one download .* one folder per person",
        ),
        (("WhatsApp Images/1.jpg", "WhatsApp Stickers/1.webp"), "belong to one phone"),
        (("DCIM/100APPLE/1.jpg", "Pictures/1.jpg"), "belong to one phone"),
        (("WhatsApp Chat - Ada/1.jpg", "WhatsApp Chat - Bo/1.jpg"), "are chats .* a CSV"),
        (("library/ada/1.jpg", "thumbs/ada/1.jpg"), "photo server .* Pass the one"),
        (("data.bin", "index.bin"), "such as data.bin.* to Parquet"),
        (("data-00000-of-00001.arrow", "state.json"), "another format, data-0.* Write Parquet"),
        (("a.jpg", "a.npy"), LOOSE),
        (("IMG-20240101-WA0001.jpg", "IMG-20240101-WA0002.jpg", "_chat.txt"), LOOSE),
        (
            ("takeout-001.zip", "takeout-002.zip"),
            "has an archive, takeout-001.zip, and no photos.* Unpack",
        ),
    ],
)
def test_folders_that_are_not_people_are_refused_with_what_to_do(tmp_path, names, says):
    """One person with photos of two years or two splits would be two users."""
    with pytest.raises(InputError, match=says):
        users_of(tree(tmp_path, *names), tmp_path)


@pytest.mark.parametrize("name", ["ada/Rome, 1 May 2024", "ada", "may 2019-07", "2019-01-0001"])
def test_one_folder_or_an_id_like_a_date_is_a_user(tmp_path, name):
    root = tree(tmp_path, f"{name}/1.jpg", f"{name}/2.jpg")
    assert users_of(root, tmp_path) == 1


@pytest.mark.parametrize(
    "inside",
    [
        *("Takeout/Google Photos/Holiday", "2024/2024-05-01", "files/Photos", "Camera Uploads"),
        *("DCIM/100APPLE", "Rome, 1 May 2024"),
    ],
)
def test_folders_of_exports_inside_the_users_folders_are_not_classes(tmp_path, inside):
    """Photos of one year, which all users have, would be trained to be alike."""
    root = people(tmp_path, inside, {})
    assert guess_source(str(root), {}).columns.label is None
    assert guess_source(str(root), {"label": "label"}).columns.label == "label"


def test_folders_of_things_inside_the_users_folders_are_classes(tmp_path):
    root = people(tmp_path, "cup", {})
    assert guess_source(str(root), {}).columns.label == "label"


@pytest.mark.parametrize(
    "beside",
    [
        *("ada/files_trashbin/files/1.jpg.d1", "ada/files_versions/1.jpg.v1"),
        *("appdata_oc12/preview/1/256.jpg", "__groupfolders/1/1.jpg"),
        *("Catalog Previews.lrdata/1.jpg", "ada/P.photoslibrary/resources/derivatives/1.jpeg"),
    ],
)
def test_photos_that_a_server_or_catalogue_keeps_are_not_read(tmp_path, beside):
    """Deleted photos and thumbnails are not photos of a user."""
    assert users_of(tree(tmp_path, "ada/files/1.jpg", "bo/files/1.jpg", beside), tmp_path) == 2
    assert is_side_file(beside)


@pytest.mark.parametrize("beside", ["README.md", "data/dataset.json", "data/train.idx"])
def test_folder_of_a_data_set_with_its_description_has_the_format_of_its_shards(tmp_path, beside):
    as_parquet(tmp_path / "in" / "data" / "train-00000-of-00001.parquet")
    (tmp_path / "in" / beside).write_text("x")
    assert users_of(tmp_path / "in", tmp_path) == USERS


def test_folder_with_several_tables_is_refused_with_the_names_of_the_tables(tmp_path):
    root = tree(tmp_path, "train/1.jpg")
    for name in ("train.csv", "metadata.jsonl"):
        (root / name).write_text("x")
    with pytest.raises(InputError, match=r"has metadata.jsonl and train.csv, .* JSON Lines to CSV"):
        users_of(root, tmp_path)


def test_folders_that_look_like_dates_are_users_where_the_owner_says_so(tmp_path):
    root = as_folders(tmp_path / "in")
    for number, path in enumerate(sorted(root.iterdir())):
        path.rename(root / f"{1990 + number}")
    with pytest.raises(InputError, match=DATES):
        users_of(root, tmp_path)
    assert users_of(root, tmp_path, "--by-user", "--format", "image_folder") == USERS
    (warning,) = checked(tmp_path).warnings  # a configuration written by hand has no other check
    assert "'1990', '1991', '1992'" in warning


def test_folders_of_people_are_checked_without_a_warning(tmp_path):
    users_of(as_folders(tmp_path / "in"), tmp_path, "--by-user")
    assert checked(tmp_path).warnings == ()


@pytest.mark.parametrize("ending", [end for ends, _ in FILES.values() for end in ends])
def test_file_of_another_format_is_refused_with_what_to_do(tmp_path, ending):
    path = tmp_path / f"export{ending}"
    path.write_bytes(b"x")
    for use in (refuse_other_format, lambda uri: next(PhotoSource(uri).units())):
        with pytest.raises(InputError, match=r"Convert it first\. [A-Z]"):
            use(str(path))


def test_folder_with_files_of_another_format_is_refused_by_embed_too(tmp_path):
    root = tree(tmp_path, "data-00000-of-00001.arrow", "state.json")
    with pytest.raises(InputError, match=r"data-0.*\.arrow, and no photos\. .*Write Parquet"):
        next(PhotoSource(str(root)).units())
    assert next(PhotoSource(str(tree(tmp_path, "one.jpg"))).units()).files


def test_table_of_exports_of_the_page_is_what_is_tested():
    page = Path("docs/how_to/bring_your_files.md").read_text(encoding="utf-8")
    listed = re.findall(
        r"^\| ([^|]+?) +\|", page.partition("## Exports")[2].partition("\n## ")[0], re.M
    )
    assert listed[1:] == [
        *WORKS,
        "Open Images CSV",
        "dates, splits, albums, chats, loose photos",
        *FILES,
    ]
