"""Tables as people save them: each works, or the message shows what was read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedemb.errors import InputError
from fedemb.partition.check import Check, check
from fedemb.pipelines.run.load_config import load_config
from tests.kit.cli import ended
from tests.kit.pipeline_runs.partition_run import Partitioner
from tests.pipelines.test_other_peoples_files import EACH, USERS, init, rows, users_of

PHOTOS = USERS * EACH
Spelled = Callable[[int, str, str], str]


def table(folder: Path, head: str, spelled: Spelled, encoding: str = "utf-8") -> Path:
    lines = [head]
    for number, (user, label, data) in enumerate(rows()):
        (folder / f"{number}.jpg").write_bytes(data)
        lines.append(spelled(number, user, label))
    (folder / "t.csv").write_text("\n".join(lines) + "\n", encoding)
    return folder / "t.csv"


def plain(number: int, user: str, label: str) -> str:
    return f"{number}.jpg,{user},{label}"


def checked(folder: Path) -> Check:
    return check(load_config(folder / "made.yaml"))


@pytest.mark.parametrize(
    ("head", "comma"),
    [
        ("file_name, user_id, label", ", "),
        (" file_name ,\tuser_id,label ", ","),
        ("File Name,User ID,Label", ","),
        ("\ufefffile_name,user_id,label", ","),
        ('"file_name","user_id","label"', ","),
    ],
)
def test_header_with_spaces_or_capitals_is_understood(tmp_path, head, comma):
    path = table(tmp_path, head, lambda *row: plain(*row).replace(",", comma))
    assert users_of(path, tmp_path) == USERS
    assert checked(tmp_path).used == PHOTOS


@pytest.mark.parametrize(("encoding", "name"), [("latin-1", "latin1"), ("utf-16", "utf-16")])
def test_header_in_another_encoding_is_refused_with_a_command(tmp_path, encoding, name):
    path = table(tmp_path, "file_name,user_id,Käfer", plain, encoding)
    with pytest.raises(InputError, match=f"Line 1 of t.csv.*iconv -f {name} -t utf-8"):
        init(path, tmp_path)


def test_ids_in_latin_1_are_refused_and_shown(tmp_path):
    path = table(
        tmp_path, "file_name,user_id,label", lambda n, u, lb: plain(n, f"Zoë {u}", lb), "latin-1"
    )
    with pytest.raises(InputError, match="60: user id of bytes that are not UTF-8") as refused:
        init(path, tmp_path)
    assert any("as Latin-1 'Zoë user-00'" in line for line in refused.value.details)


def test_classes_in_latin_1_are_bad_records_and_shown(tmp_path):
    path = table(tmp_path, "file_name,user_id,label", plain)
    init(path, tmp_path, "--alike", "class")
    path.write_text(path.read_text().replace("cat", "Käfer"), "latin-1")
    found = checked(tmp_path)
    assert [(text[:14], count) for text, count in found.bad] == [("class of bytes", USERS)]
    assert any(r"b'K\xe4fer' (as Latin-1 'Käfer')" in text for text in found.warnings)


def test_comma_outside_quotes_is_a_bad_record_and_shown(tmp_path):
    path = table(tmp_path, "file_name,user_id,label", plain)
    path.write_text(path.read_text().replace("0.jpg,user-00", "0.jpg,Smith, jr"))
    said = init(path, tmp_path)
    assert "for example: '0.jpg,Smith, jr,cat'" in said
    assert "1 not usable: line that is not a row" in said
    assert f"{PHOTOS} photos" in said


def open_quote(row: int, column: str) -> Spelled:
    def spelled(number: int, user: str, label: str) -> str:
        line = {"user": f'{number}.jpg,"{user},{label},x', "caption": plain(0, user, label) + ',"x'}
        return line[column] if number == row else plain(number, user, label) + ",x"

    return spelled


def test_rows_in_a_quote_that_is_not_closed_are_counted_one_by_one(tmp_path, partition_of):
    """They would be the name of one user, and their owners would be gone without a word."""
    path = table(tmp_path, "file_name,user_id,label,caption", open_quote(40, "user"))
    said = init(path, tmp_path)
    assert f"{PHOTOS - 40} not usable: line that is not a row" in said
    assert f"{PHOTOS} photos" in said
    counts = partition_of(path)
    assert (counts["rows"], counts["line_not_a_row"]) == (PHOTOS, PHOTOS - 40)


@pytest.fixture
def partition_of(tmp_path):
    def run(path: Path) -> dict[str, int]:
        columns = {"image_id": "file_name", "user_id": "user_id", "label": "label"}
        return Partitioner(tmp_path)(str(path), data__source__columns=columns).counts

    return run


@pytest.mark.parametrize("sign", [";", "\t", "|"])
def test_csv_with_another_separator_is_refused_and_the_separator_shown(tmp_path, sign):
    path = table(
        tmp_path, f"file_name{sign}user_id{sign}label", lambda *row: plain(*row).replace(",", sign)
    )
    with pytest.raises(InputError, match="separated by") as refused:
        init(path, tmp_path)
    assert repr(sign) in str(refused.value)


LOCALES = (
    {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
    {"PYTHONUTF8": "0", "LC_ALL": "C.UTF-8"},
    {"LC_ALL": "POSIX"},
)


@pytest.mark.long
@pytest.mark.parametrize("locale", LOCALES, ids=["ascii", "utf8", "posix"])
@pytest.mark.parametrize("kind", ["csv", "folder"])
def test_names_are_read_as_utf_8_in_every_locale(tmp_path, locale, kind):
    """In an ASCII locale `Zoë` and `Zoé` would be one user, and no photo of them would be found."""
    root = tmp_path / "Fötos 山田"
    names = ("Zoë", "Zoé", "山田")
    lines = ["file_name,user_id"]
    for number, (_, _, data) in enumerate(rows()):
        name = f"{names[number % 3]}/fôto {number}.jpg"
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
        lines.append(f"{name},{names[number % 3]}")
    if kind == "csv":
        (root / "tébl.csv").write_text("\n".join(lines) + "\n")
    data = root / "tébl.csv" if kind == "csv" else root
    command = [sys.executable, "-m", "fedemb", "init", "--data", str(data), "-o"]
    command += [str(tmp_path / "é.yaml"), "--users-lower-bound", "2", "--public", "none"]
    done = subprocess.run(
        [*command, "--epsilon", "8", "--alike=user"],
        env={"PATH": os.environ["PATH"], **locale},
        capture_output=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert b"60 photos; 3 usable users" in done.stdout
    assert load_config(tmp_path / "é.yaml").data.source.uri == str(data)


@pytest.mark.parametrize("found", [0, 1])
def test_csv_with_missing_images_is_not_probed_completely(tmp_path, found, monkeypatch):
    monkeypatch.setattr("fedemb.partition.check._PROBED", 8)
    path = table(tmp_path, "file_name,user_id,label", plain)
    assert users_of(path, tmp_path) == USERS
    for photo in sorted(tmp_path.glob("*.jpg"))[found:]:
        photo.unlink()
    if found:
        assert checked(tmp_path).used == 1
        return
    with pytest.raises(InputError, match="None of the first") as refused:
        checked(tmp_path)
    assert "set data.source.image_root" in refused.value.details[0]


def test_class_in_two_spellings_is_a_warning(tmp_path):
    path = table(tmp_path, "file_name,user_id,label", lambda n, user, _: f"{n}.jpg,{user},a{n % 2}")
    init(path, tmp_path, "--alike", "class")
    assert "differ" not in " ".join(checked(tmp_path).warnings)
    path.write_text(path.read_text().replace(",a1", ",A0 "))
    code, said, _ = ended("check-data", "-c", tmp_path / "made.yaml", "--json")
    found = json.loads(said)
    assert (code, len(found["problems"])) == (2, 2)  # no held-out user, few classes
    assert "Classes differ in case only: 'A0' and 'a0'. Merge" in " ".join(found["warnings"])
    assert found["rows"] == PHOTOS
