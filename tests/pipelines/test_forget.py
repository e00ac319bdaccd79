"""Forgetting a user: the next partition is that of a world in which they never were."""

import pytest
from typer.testing import CliRunner

from components.fedemb.errors import StorageError
from components.fedemb.privacy.keys import LocalKeyStore, open_key_store, partition_key
from components.partition_users.hashing import Hasher
from components.partition_users.tombstones import bury, check_store, read_tombstones
from pipelines.cli import app
from tests import ledger_kit
from tests.partition_run import KEY, Partitioner, rows_of


def test_forgotten_user_is_as_if_never_there(tmp_path):
    partition = Partitioner(tmp_path)
    rows, hasher = rows_of(12), Hasher(KEY)
    tombstones = str(tmp_path / "tombstones")
    assert bury(tombstones, hasher, hasher.user_key("user 3"))
    assert not bury(tombstones, hasher, hasher.user_key("user 3"))
    forgot = partition(rows, storage__tombstones=tombstones)
    never = partition([row for row in rows if row["user_id"] != "user 3"])
    assert forgot.records() == never.records()
    assert forgot.records("evaluation") == never.records("evaluation")
    assert forgot.groups() == never.groups()
    assert forgot.counts["dropped_forgotten"] == 3
    assert partition(rows).counts.get("dropped_forgotten", 0) == 0


def test_tombstone_tells_nothing_about_whom(tmp_path):
    hasher = Hasher(KEY)
    bury(str(tmp_path), hasher, hasher.user_key("user 3"))
    (name,) = read_tombstones(str(tmp_path))
    assert hasher.user_key("user 3").hex() not in name


def test_store_of_tombstones_that_is_gone_is_refused_not_taken_for_empty(tmp_path):
    keys = open_key_store(str(tmp_path / "keys"))
    there, uri = tmp_path / "tombstones", str(tmp_path / "tombstones")
    check_store(None, keys, "weekly")  # a policy that never had one
    check_store(uri, keys, "weekly")
    bury(uri, hasher := Hasher(KEY), hasher.user_key("user 3"))
    check_store(uri, keys, "weekly")
    assert len(read_tombstones(uri)) == 1
    there.rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="would train again; mount or restore"):
        check_store(uri, keys, "weekly")
    with pytest.raises(StorageError, match="name the store"):
        check_store(None, keys, "weekly")
    assert not there.exists()
    other = open_key_store(str(tmp_path / "other keys"))
    with pytest.raises(StorageError, match="does not hold"):
        check_store(str(tmp_path / "elsewhere"), other, "weekly")  # of another policy
    (tmp_path / "elsewhere").rename(there)
    check_store(uri, keys, "weekly")


def test_killed_while_the_store_of_tombstones_is_marked_goes_on(tmp_path, monkeypatch):
    keys, uri = open_key_store(str(tmp_path / "keys")), str(tmp_path / "tombstones")
    create = LocalKeyStore.create

    def killed(self, name):
        if name.startswith("tombstones/"):
            raise KeyboardInterrupt
        return create(self, name)

    with monkeypatch.context() as patched:
        patched.setattr(LocalKeyStore, "create", killed)
        with pytest.raises(KeyboardInterrupt):
            check_store(uri, keys, "weekly")
    check_store(uri, keys, "weekly")
    check_store(uri, keys, "weekly")


def test_no_store_of_tombstones_forgets_nobody():
    assert read_tombstones(None) == frozenset()


def test_command_without_a_policy_says_what_is_missing():
    done = CliRunner().invoke(app, ["forget", "--config", "quickstart"], input="someone\n")
    assert done.exit_code != 0
    assert "storage.tombstones must be set" in str(done.exception)


def test_command_names_releases_of_the_users_block_whatever_the_cohort_and_nobody_else(tmp_path):
    kit = ledger_kit.make(tmp_path, users=ledger_kit.users(cohort="month", buckets=4))
    hasher = Hasher(partition_key(kit.keys, "weekly"))
    secret = "ada.lovelace@example.org"
    mine = hasher.bucket(hasher.user_key(secret), 4)
    ledger = kit.open()
    shas = dict.fromkeys(("model_sha", "report_sha", "bundle_sha"), ledger_kit.sha("x"))
    theirs = (mine + 1) % 4
    runs = {"old": f"2025-11/{mine}", "other": f"2026-01/{theirs}", "open": f"2026-01/{mine}"}
    for run, block in runs.items():
        content = ledger_kit.content(noise=6.0, blocks=(block,))
        reservation = ledger.reserve(run_id=run, content=content)
        if run != "open":
            ledger_kit.bind(ledger, reservation)
            ledger_kit.commit(kit, ledger, reservation, 20)
            ledger.release(reservation, **shas, name="embedding", version=run)
    tombstones = tmp_path / "tombstones"
    stores = {"ledger": kit.ledger_uri, "keys": kit.keys_uri, "tombstones": str(tombstones)}
    command = ["forget", "--config", "quickstart", "--set", "policy.policy_id=weekly"]
    for name, uri in stores.items():
        command += ["--set", f"storage.{name}={uri}"]
    done = CliRunner().invoke(app, command, input=f" {secret}\n")
    assert done.exit_code == 0, done.exception
    assert "forgotten from the next partition on" in done.output
    assert "embedding old: epsilon" in done.output
    assert "embedding other" not in done.output
    assert "may hold this user: open" in done.output
    assert "all runs of the policy together by epsilon 4 at delta" in done.output
    assert secret not in done.output
    assert read_tombstones(str(tombstones)) == {hasher.tombstone(hasher.user_key(secret))}
    assert not any(secret in str(path) for path in tmp_path.rglob("*"))
    again = CliRunner().invoke(app, command, input=f"{secret}\n")
    assert "was forgotten before" in again.output
