"""Forgetting a user: the next partition is that of a world in which they never were."""

from typer.testing import CliRunner

from components.partition_users.hashing import Hasher
from components.partition_users.tombstones import bury, read_tombstones
from pipelines.cli import app
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


def test_no_store_of_tombstones_forgets_nobody():
    assert read_tombstones(None) == frozenset()


def test_command_without_a_policy_says_what_is_missing():
    done = CliRunner().invoke(app, ["forget", "--config", "quickstart"], input="someone\n")
    assert done.exit_code != 0
    assert "storage.tombstones must be set" in str(done.exception)
