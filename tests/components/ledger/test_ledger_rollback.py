"""An older ledger in the place of the newest is refused: key store or witness knows more."""

import shutil
from pathlib import Path

import honest_run
import pytest

from fedemb.errors import LedgerError
from fedemb.ledger import check_high_water, mark_high_water, rotate_keys


class Team:
    """Three weekly runs that share a policy; ledger and keys may be put back to an older state."""

    def __init__(self, root: Path, **changes):
        self.root, self.changes = root, changes

    def reserve(self, name):
        run = honest_run.start(self.root / name, name, self.root / "policy", **self.changes)
        run.do_plan()
        run.do_reserve()
        return run

    def backup(self):
        shutil.copytree(self.root / "policy", self.root / "backup")

    def restore(self, part):
        shutil.rmtree(self.root / "policy" / part)
        shutil.copytree(self.root / "backup" / part, self.root / "policy" / part)


@pytest.fixture
def team(tmp_path):
    return Team(tmp_path)


def test_an_old_backup_of_the_ledger_is_refused(team):
    team.reserve("week-1")
    team.backup()
    team.reserve("week-2")
    team.restore("ledger")
    with pytest.raises(LedgerError, match=r"key store .* says there were more: an older ledger"):
        team.reserve("week-3")


def test_records_and_heads_that_were_deleted_are_missed(team):
    run = team.reserve("week-1")
    last = run.ledger().head
    folder = Path(run.ledger_uri, last.policy_id)
    for name in (f"{last.sequence:08d}.json", f"heads/{last.sequence:08d}.json"):
        (folder / name).unlink()
    with pytest.raises(LedgerError, match="an older ledger was put in its place"):
        team.reserve("week-2")


def test_a_fork_of_the_same_length_is_refused(team, tmp_path):
    team.reserve("week-1")
    team.backup()
    team.reserve("week-2")
    forked = Team(tmp_path)
    shutil.move(tmp_path / "policy", tmp_path / "policy of the first")
    shutil.copytree(tmp_path / "backup", tmp_path / "policy")
    forked.reserve("week-2-again")
    shutil.rmtree(tmp_path / "policy" / "keys")
    shutil.copytree(tmp_path / "policy of the first" / "keys", tmp_path / "policy" / "keys")
    with pytest.raises(LedgerError, match="it was rewritten"):
        forked.reserve("week-3")


def test_ledger_and_keys_put_back_together_are_noticed_by_a_witness(tmp_path):
    team = Team(tmp_path, **{"storage.witness": str(tmp_path / "witness")})
    team.reserve("week-1")
    team.backup()
    team.reserve("week-2")
    team.restore("ledger")
    team.restore("keys")
    with pytest.raises(LedgerError, match=r"the witness .* says there were more"):
        team.reserve("week-3")


def test_killed_before_its_mark_the_next_run_makes_up_for_it(team, monkeypatch):
    from fedemb.steps.reserve_budget import reserve

    with monkeypatch.context() as patch:
        patch.setattr(reserve, "mark_high_water", _killed)
        with pytest.raises(KeyboardInterrupt):
            team.reserve("week-1")
    run = team.reserve("week-2")
    names = {path.name for path in Path(run.keys_uri, "ledger").iterdir()}
    assert names == {f"{run.ledger().policy_id}+{number}" for number in (1, 2, 3)}


def _killed(*_):
    raise KeyboardInterrupt


def test_no_run_trains_before_its_mark(team, monkeypatch):
    from fedemb.steps.reserve_budget import reserve

    monkeypatch.setattr(reserve, "mark_high_water", _killed)
    with pytest.raises(KeyboardInterrupt):
        team.reserve("week-1")
    assert not list((team.root / "policy" / "keys").glob("reservation/*"))


def test_a_rotation_cannot_be_taken_back(team):
    run = team.reserve("week-1")
    team.backup()
    rotate_keys(run.ledger_uri, run.keys, "leaked", ["ledger"])
    team.restore("ledger")
    with pytest.raises(LedgerError, match="an older ledger"):
        check_high_water(run.ledger(), run.keys)


def test_marking_again_marks_nothing(team):
    run = team.reserve("week-1")
    before = sorted(Path(run.keys_uri).rglob("*"))
    mark_high_water(run.ledger(), run.keys)
    assert sorted(Path(run.keys_uri).rglob("*")) == before
