"""Bad records are dropped one by one; broken infrastructure ends with one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedemb.data.client_data import GroupIndex, UserStore, VerifiedFolder
from fedemb.data.identity import Hasher
from fedemb.data.sources import Batch
from fedemb.documents.model import UsersManifest
from fedemb.errors import InputError, PlanMismatch
from fedemb.foundation.document import read
from fedemb.partition.prepare import Preparer
from tests.components.partition_users.test_partition_properties import POISSON
from tests.kit.pipeline_runs.partition_run import (
    KEY,
    Partitioner,
    context_of,
    make_config,
    picture,
    reserve_for,
    reserved_config,
    rows_of,
    user_key,
    write_parquet,
)

SECRET = "ada.lovelace@example.org"


def sentence(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert SECRET not in text
    assert "Traceback" not in text
    return text


def test_bad_images_are_dropped_one_by_one_and_listed_with_reasons(partition: Partitioner) -> None:
    good = rows_of(10)
    bad: dict[str, list[bytes | None]] = {
        "not_decodable": [picture(1)[:60], b"no image at all", b"\xff\xd8\xff\xe0 cut", b"GIF89a"],
        "image_empty": [b""],
        "image_missing": [None],
    }
    rows = good + [
        {"image": image, "user_id": f" {SECRET}", "label": "x"}
        for images in bad.values()
        for image in images
    ]
    result = partition(rows)
    assert {reason: result.counts[reason] for reason in bad} == {
        reason: len(images) for reason, images in bad.items()
    }
    listed = result.rejects()
    assert sorted(row["reason"] for row in listed) == sorted(r for r in bad for _ in bad[r])
    assert {row["user_id"] for row in listed} == {SECRET}
    assert result.records() == partition(good).records()


def test_bad_user_ids_are_dropped_and_spellings_are_one_user(partition: Partitioner) -> None:
    ids = [None, "", "  ", "\u200b", "Zoë", "Zoe\u0308", " Zoë\t", "Zo\u200bë", "zoë"]
    rows = [
        {"image": picture(n), "user_id": user_id, "label": "a"} for n, user_id in enumerate(ids)
    ]
    result = partition(rows, partition__evaluation={"by": "hash", "fraction": 1e-9})
    assert result.counts["user_id_missing"] == 4
    sizes = {key: len(record.images) for key, record in result.records().items()}
    assert sizes == {user_key("Zoë"): 4, user_key("zoë"): 1}


def test_duplicates_are_dropped_within_a_user_only(partition: Partitioner) -> None:
    rows = rows_of(12, images=2)
    rows += [dict(rows[0]), dict(rows[0]), {**rows[0], "user_id": "user 1"}]
    result = partition(rows)
    everyone = {**result.records(), **result.records("evaluation")}
    assert result.counts["duplicate"] == 2
    assert [row["reason"] for row in result.rejects()] == ["duplicate"] * 2
    assert len(everyone[user_key("user 0")].images) == 2
    assert len(everyone[user_key("user 1")].images) == 3


def test_partition_without_valid_records_writes_complete_artifacts(partition: Partitioner) -> None:
    result = partition([{"image": b"x", "user_id": "a", "label": "b"}])
    assert result.counts["not_decodable"] == 1
    assert len(UserStore(VerifiedFolder(result.root / "users"))) == 0
    index = GroupIndex(VerifiedFolder(result.root / "users"))
    assert index.user_count == 0
    assert len(index.user_keys) == 0
    assert index.members(1, 4).tolist() == []


def test_damaged_parquet_is_an_input_error_and_publishes_nothing(
    partition: Partitioner, tmp_path: Path
) -> None:
    path = Path(write_parquet(tmp_path / "rows.parquet", rows_of(20)))
    data = bytearray(path.read_bytes())
    data[200:4000] = bytes(3800)
    path.write_bytes(data)
    with pytest.raises(InputError) as error:
        partition(str(path))
    assert "damaged in the middle" in sentence(error)
    assert not list(tmp_path.rglob("manifest.json"))


def test_unexpected_worker_error_contains_no_user_data(
    partition: Partitioner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError(SECRET)

    monkeypatch.setattr(Preparer, "prepare", broken)
    with pytest.raises(Exception, match="KeyError") as error:
        partition(rows_of(2))
    sentence(error)
    assert SECRET not in caplog.text


# ---- the step itself ----------------------------------------------------------------------------


def test_step_publishes_a_manifest_without_counts_and_with_commitments(tmp_path: Path) -> None:
    from fedemb.foundation.canonical_json import tree_digest
    from fedemb.keys import commit_to_users, commitment_key, open_key_store
    from fedemb.steps.partition_users import run

    config = reserved_config(tmp_path)
    reserve_for(config, tmp_path)
    key = commitment_key(open_key_store(str(tmp_path / "keys")), config.policy.policy_id)
    manifest = run(context_of(config, tmp_path))
    assert read(tmp_path / "manifest.json", UsersManifest).json == manifest
    assert set(manifest) == {
        *("schema", "run_id", "config_sha", "reservation_sha", "virtual_clients", "groupings"),
        *("blocks", "image_size", "channels", "commitments", "signature"),
    }
    for kind in ("users", "evaluation"):
        digest = tree_digest(tmp_path / "private" / "run-1" / kind)
        assert manifest["commitments"][kind] == commit_to_users(key, "run-1", 1, digest)


def test_reservation_of_another_run_or_configuration_is_refused(tmp_path: Path) -> None:
    from fedemb.steps.partition_users import run

    config = reserved_config(tmp_path, users=2)
    reserve_for(config, tmp_path)
    with pytest.raises(PlanMismatch, match="run_id"):
        run(context_of(config, tmp_path, run_id="another"))
    with pytest.raises(PlanMismatch, match="config_sha"):
        run(context_of(config.updated({"mechanism.noise_multiplier": 2.0}), tmp_path))
    assert not (tmp_path / "private").exists()


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_private_folder_of_a_run_is_closed_to_other_accounts(tmp_path: Path, prefix: str) -> None:
    from fedemb.partition.shards import run_root

    run_root(f"{prefix}{tmp_path}/private", "run-1")
    assert (tmp_path / "private" / "run-1").stat().st_mode & 0o777 == 0o700


def test_without_user_ids_every_image_is_its_own_unit() -> None:
    """Known by its bytes: another order, or an image less, leaves the others who they were."""
    alone = {"policy__unit": "image", "data__source__columns__user_id": None}
    config = make_config("x.parquet", mechanism=POISSON, **alone)

    def units(images):
        preparer = Preparer(config, Hasher(KEY), None, set().__contains__)
        prepared = preparer.prepare(Batch(images, {"label": ["a"] * len(images)}))
        assert all(part[4] + part[5] == 1 for part in prepared.parts.values())
        return set(prepared.parts)

    images = [picture(n) for n in range(6)]
    assert len(units(images)) == 6
    assert units(images[::-1]) == units(images)
    assert units(images[1:]) < units(images)
