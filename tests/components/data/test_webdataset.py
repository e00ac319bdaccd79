"""Webdataset shards: what other writers make works, and what is odd is counted or refused."""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fedemb.config import SourceConfig
from fedemb.data import image_files
from fedemb.data.columns import guess_source
from fedemb.data.image_files import BadRecord
from fedemb.data.input_version import braces
from fedemb.data.photos import PhotoReader
from fedemb.data.sources import find_parts, read_part
from fedemb.errors import InputError
from fedemb.partition.check import BAD, LEFT_OUT
from fedemb.release.embed_photos import decoded
from fedemb.release.photo_source import PhotoSource
from tests.components.partition_users.test_partition_sources import same_users
from tests.kit.pipeline_runs.partition_run import Partitioner, picture, rows_of

Files = list[tuple[str, bytes] | tarfile.TarInfo]


def shard(path: Path, files: Files, mode: str = "w", kind: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, format=kind) as archive:
        for item in files:
            if isinstance(item, tarfile.TarInfo):
                archive.addfile(item)
                continue
            info = tarfile.TarInfo(item[0])
            info.size = len(item[1])
            archive.addfile(info, io.BytesIO(item[1]))
    return path


def sample(key: str, row: dict[str, Any], image: str = "png") -> Files:
    values = json.dumps({"user_id": row["user_id"], "label": row["label"]}).encode()
    return [(f"{key}.{image}", row["image"]), (f"{key}.json", values)]


def read(path: Path, columns: tuple[str, ...] = ("user_id",), **source: Any) -> list[Any]:
    """Returns `(image or reason, *values)` of each record."""
    described = SourceConfig.model_validate({"uri": str(path), **source})
    found = []
    for part in find_parts(described, columns):
        for batch in read_part(described, part, columns):
            values = [batch.columns[name] for name in columns]
            for image, *row in zip(batch.images, *values, strict=True):
                found.append((image.reason if isinstance(image, BadRecord) else image, *row))
    return found


def reasons(path: Path) -> Counter[str]:
    return Counter(image for image, *_ in read(path) if isinstance(image, str))


def link(name: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/hostname"
    return info


# ---- what works ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tgz"])
def test_shards_give_the_users_of_parquet(
    partition: Partitioner, tmp_path: Path, ending: str
) -> None:
    rows = rows_of(10)
    mode = "w" if ending == ".tar" else "w:gz"
    for number in range(3):
        files = [
            file
            for place, row in enumerate(rows[number::3])
            for file in sample(f"{number:02d}/{place:06d}", row)
        ]
        shard(tmp_path / "in" / f"s-{number:03d}{ending}", files, mode)
    expected = partition(rows)
    for address in (f"s-{{000..002}}{ending}", f"*{ending}", "s-{000,001,002}*"):
        found = partition(f"{tmp_path}/in/{address}", data__source__format="webdataset")
        assert same_users(found, expected)
        assert found.counts["rows"] == len(rows)


@pytest.fixture
def partition(tmp_path: Path) -> Partitioner:
    return Partitioner(tmp_path)


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_dialect_of_tar_is_read(tmp_path, kind):
    long = "/".join(["folder" * 8] * 4)
    names = [f"{long}/0001", "plain", "./dot/0002"]
    if kind != tarfile.USTAR_FORMAT:
        names += ["Zoë 山田/" + "x" * 200]
    files = [file for name in names for file in sample(name, {**rows_of(1)[0], "user_id": name})]
    path = shard(tmp_path / "a.tar", files, kind=kind)
    assert read(path) == [(picture(0), name) for name in names]


@pytest.mark.parametrize(
    ("members", "user", "label"),
    [
        ({"json": b'{"user_id": "ada", "label": "cat"}'}, "ada", "cat"),
        ({"user_id": b"ada\n", "label": b"cat"}, b"ada\n", b"cat"),
        ({"user_id.txt": b"ada", "LABEL.TXT": b"cat"}, b"ada", b"cat"),
        ({"json": b'{"user_id": 7.0}', "label": b"3"}, 7.0, b"3"),
        ({"json": b'{"user_id": "7"}', "user_id": b" 7.0 ", "label": b"3"}, b" 7.0 ", b"3"),
        ({"label": b"3"}, None, b"3"),
    ],
)
def test_values_come_from_json_or_from_members_with_text(tmp_path, members, user, label):
    files: Files = [("0.jpg", b"image"), *((f"0.{name}", data) for name, data in members.items())]
    assert read(shard(tmp_path / "a.tar", files), ("user_id", "label")) == [(b"image", user, label)]


def test_image_of_several_is_named_by_its_ending(tmp_path):
    files: Files = [
        ("0.left.jpg", b"left"),
        ("0.right.jpg", b"right"),
        ("0.json", b'{"user_id":1}'),
    ]
    path = shard(tmp_path / "a.tar", files)
    assert read(path, columns=("user_id",))[0][0] == "several_images"
    assert read(path, ("user_id",))[0][1] == 1
    described = SourceConfig.model_validate({"uri": str(path), "columns": {"image": "Right.JPG"}})
    batches = [
        batch for part in find_parts(described, []) for batch in read_part(described, part, [])
    ]
    assert [batch.images for batch in batches] == [[b"right"]]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([("ada/0.jpg", b"x"), ("bob/0.jpg", b"x")], "unpack it with `tar -xf`"),
        ([("0.bin", b"x"), ("0.json", b"{}")], "no member has an image ending"),
        ([("0.jpg", b"x"), ("0.json", b'{"url": 1}')], "no column of .* user_id .* 'url'"),
    ],
)
def test_archive_that_names_no_owner_is_refused_with_what_to_do(tmp_path, files, says):
    with pytest.raises(InputError, match=says):
        guess_source(str(shard(tmp_path / "a.tar", files)), {})


def test_files_of_a_desktop_between_two_members_do_not_part_a_sample(tmp_path):
    image, values = sample("0", rows_of(1)[0])
    path = shard(tmp_path / "a.tar", [("._0.png", b"mac"), image, ("._0.json", b"mac"), values])
    assert [record[1] for record in read(path)] == [None, None, "user 0"]


# ---- what is counted -----------------------------------------------------------------------------


def test_odd_members_are_counted_one_by_one_and_good_ones_are_used(partition, tmp_path):
    rows = rows_of(6)
    good = [file for n, row in enumerate(rows) for file in sample(f"good{n:03d}", row)]
    row = rows[0]
    odd: dict[str, Files] = {
        "member_twice": [*sample("twice", row), sample("twice", row)[0]],
        "several_images": [*sample("two", row), ("two.jpg", row["image"])],
        "member_name": [("/etc/0.png", b"x"), ("../0.png", b"x"), ("a/../0.png", b"x")],
        "member_not_a_file": [
            link("link.png"),
            link("hard.png", tarfile.LNKTYPE),
            link("pipe.png", tarfile.FIFOTYPE),
            link("device", tarfile.CHRTYPE),
        ],
        "sample_without_image": [("alone.json", b'{"user_id": "ada"}')],
        "json_not_valid": [
            ("j1.png", row["image"]),
            ("j1.json", b"{"),
            ("j2.png", row["image"]),
            ("j2.json", b'{"user_id": "a", "user_id": "b"}'),
            ("j3.png", row["image"]),
            ("j3.json", b"[" * 100_000),
            ("j4.png", row["image"]),
            ("j4.json", b'["user_id"]'),
            ("j5.png", row["image"]),
            ("j5.json", b'{"user_id": ' + b"1" * 5000 + b"}"),
        ],
        "values_differ": [*sample("differ", row), ("differ.user_id", b"somebody else")],
        "user_id_missing": [
            ("ownerless.png", row["image"]),
            ("ownerless.cls", b"1"),
            ("ownerless.label", b"a"),
        ],
        "side_file": [
            ("README", b"x"),
            ("._good.png", b"x"),
            ("film.mp4", b"x"),
            ("@eaDir/0.png", b"x"),
        ],
    }
    expected = {
        reason: 5 if reason == "json_not_valid" else len(files) if reason in EACH else 1
        for reason, files in odd.items()
    }
    files = [*good, *(file for some in odd.values() for file in some)]
    folder = tarfile.TarInfo("folder")
    folder.type = tarfile.DIRTYPE
    result = partition(str(shard(tmp_path / "a.tar", [folder, *files])))
    assert {reason: result.counts[reason] for reason in odd} == expected
    assert same_users(result, partition(rows))
    assert result.counts["rows"] == len(rows) + sum(expected.values())
    assert odd.keys() <= BAD.keys() | LEFT_OUT.keys()


EACH = ("member_name", "member_not_a_file", "side_file")
"""Reasons for which each member is a record."""


def test_bad_records_pass_the_filter_of_the_source_and_are_counted(tmp_path):
    files: Files = [("0.jpg", b"x"), ("0.json", b'{"user_id": 1, "part": "b"}'), ("../1.jpg", b"x")]
    path = shard(tmp_path / "a.tar", files)
    assert read(path, where={"part": ["a"]}) == [("member_name", None)]


def test_sparse_member_is_not_read(tmp_path):
    for number, name in enumerate(("GNU.sparse.map", "GNU.sparse.major")):
        info = tarfile.TarInfo("0.png")
        info.pax_headers = {name: "0,1"}
        assert reasons(shard(tmp_path / f"{number}.tar", [info])) == {"member_not_a_file": 1}
    old = bytearray(shard(tmp_path / "s.tar", [("0.png", b"x"), ("1.png", b"y")]).read_bytes())
    old[156:157], old[482:483] = b"S", b"\x01"
    old[148:156] = b"%06o\0 " % (sum(old[:148]) + sum(old[156:512]) + 8 * 32)
    (tmp_path / "s.tar").write_bytes(old[:512] + bytes(512) + old[512:])
    assert reasons(tmp_path / "s.tar") == {"member_not_a_file": 1}
    assert read(tmp_path / "s.tar")[1][0] == b"y"


def test_large_member_is_counted_without_being_read(tmp_path, monkeypatch):
    monkeypatch.setattr(image_files, "MAX_BYTES", 1000)
    files: Files = [
        ("0.png", bytes(1001)),
        ("0.json", b"{}"),
        ("1.png", b"x"),
        ("1.mp4", bytes(9999)),
    ]
    assert read(shard(tmp_path / "a.tar", files)) == [("file_too_large", None), (b"x", None)]


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_shard_cut_anywhere_is_refused(tmp_path, mode):
    """Also between two members, where a reader of tar sees nothing wrong."""
    files = [file for n, row in enumerate(rows_of(2)) for file in sample(f"{n}", row)]
    path = shard(tmp_path / "a.tar", files, mode)
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0")) if mode == "w" else len(whole) - 9
    for cut in [*range(0, end, 97), *range(0, end, 512), end]:
        path.write_bytes(whole[:cut])
        with pytest.raises(InputError, match="cut or damaged"):
            read(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data + data, "data after its end"),
        (lambda data: b"\xff" + data[1:], "cut or damaged"),
        (lambda data: b"BZh9" + data, "cut or damaged"),
        (lambda data: b"PK\x03\x04" + data, "cut or damaged"),
        (lambda _: b"", "cut or damaged"),
    ],
)
def test_file_that_is_not_one_whole_archive_is_refused(tmp_path, change, says):
    path = shard(tmp_path / "a.tar", sample("0", rows_of(1)[0]))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=says):
        read(path)


@pytest.mark.parametrize(("more", "is_read"), [(-100, True), (1, False)])
def test_extended_header_above_our_limit_is_refused(tmp_path, more, is_read):
    info = tarfile.TarInfo("0.png")
    info.size, info.pax_headers = 1, {"comment": "x" * (image_files.LARGEST_HEADER + more)}
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO(b"x"))
    if is_read:
        assert read(tmp_path / "a.tar") == [(b"x", None)]
        return
    with pytest.raises(InputError, match="cut or damaged"):
        read(tmp_path / "a.tar")


def test_shard_that_braces_name_and_that_is_missing_is_refused(tmp_path):
    """Its users would be gone without a word."""
    for number in (0, 2):
        shard(tmp_path / f"s-{number:03d}.tar", sample("0", rows_of(1)[0]))
    with pytest.raises(InputError, match=r"1 files that the braces .*s-001\.tar"):
        find_parts(SourceConfig(uri=f"{tmp_path}/s-{{000..002}}.tar"), [])
    parts = find_parts(SourceConfig(uri=f"{tmp_path}/s-{{000,002}}.tar"), [])
    assert [part.name for part in parts] == ["s-000.tar", "s-002.tar"]
    (tmp_path / "x{0..1}").mkdir()
    shard(tmp_path / "x{0..1}" / "a.tar", sample("0", rows_of(1)[0]))
    assert len(find_parts(SourceConfig(uri=f"{tmp_path}/x{{0..1}}/a.tar"), [])) == 1


@pytest.mark.parametrize("text", ["{0..99999999999999999999}", "{9..1}", "{0..999}{0..999}"])
def test_braces_for_too_many_names_or_none_are_refused(text):
    with pytest.raises(InputError, match="names, expected 1 to 100,000"):
        braces(text)


# ---- embed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["", "s-*.tar", "s-{0..1}.tar", "s-0.tar"])
def test_embed_gives_each_key_a_row_or_a_reason(tmp_path, address):
    row = rows_of(1)[0]
    for number in range(2):
        files = [*sample("a/0", row), ("bad.jpg", b"x"), ("../x.jpg", b"x"), link("l.png")]
        shard(tmp_path / "in" / f"s-{number}.tar", files)
    source = PhotoSource(f"{tmp_path}/in/{address}".rstrip("/"))
    reader = PhotoReader(8, 1)
    (pixels,) = decoded(source.photos(), reader)
    names = pixels.names
    shards = 1 if address == "s-0.tar" else 2
    assert pixels.reasons == [None, "member_name", "not_decodable", "member_not_a_file"] * shards
    assert names[0].endswith("s-0.tar/a/0")
    assert len(set(names)) == len(names)
