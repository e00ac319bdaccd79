"""Exports of phones, services and data sets: each works, or is refused with what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fedemb.data.formats.exports import FILES, refuse_other_format
from fedemb.errors import InputError
from fedemb.serving.photo_parts import PhotoSource
from tests.components.data.test_webdataset import shard
from tests.pipelines.test_other_peoples_files import USERS, as_folders, as_parquet, rows, users_of
from tests.pipelines.test_tables_of_others import plain, table

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
        (("IMG-20240101-WA0001.jpg", "IMG-20240101-WA0002.jpg", "_chat.txt"), LOOSE),
        (("takeout-001.zip", "takeout-002.zip"), "has archives, such as takeout-001.zip.* Unpack"),
    ],
)
def test_folders_that_are_not_people_are_refused_with_what_to_do(tmp_path, names, says):
    """One person with photos of two years or two splits would be two users."""
    with pytest.raises(InputError, match=says):
        users_of(tree(tmp_path, *names), tmp_path)


def test_folders_that_look_like_dates_are_users_where_the_owner_says_so(tmp_path):
    root = as_folders(tmp_path / "in")
    for number, path in enumerate(sorted(root.iterdir())):
        path.rename(root / f"{1990 + number}")
    with pytest.raises(InputError, match=DATES):
        users_of(root, tmp_path)
    assert users_of(root, tmp_path, "--by-user", "--format", "image_folder") == USERS


@pytest.mark.parametrize("ending", [end for ends, _ in FILES.values() for end in ends])
def test_file_of_another_format_is_refused_with_what_to_do(tmp_path, ending):
    path = tmp_path / f"export{ending}"
    path.write_bytes(b"x")
    for use in (refuse_other_format, lambda uri: next(PhotoSource(uri).units())):
        with pytest.raises(InputError, match=r"Convert it first\. [A-Z]"):
            use(str(path))


def test_table_of_exports_of_the_page_is_what_is_tested():
    page = Path("docs/how_to/bring_your_files.md").read_text(encoding="utf-8")
    listed = re.findall(
        r"^\| ([^|]+?) +\|", page.partition("## Exports")[2].partition("\n## ")[0], re.M
    )
    assert listed[1:] == [*WORKS, "Open Images CSV", "dates, splits, loose photos", *FILES]
