"""An older ledger is refused: key store or rollback anchor hold more markers."""

import shutil
from pathlib import Path

import pytest

from fedemb.errors import FedEmbError, LedgerError, Refused
from fedemb.keys import LocalKeyStore, open_key_store
from fedemb.keys.trust import Signer, TrustStore
from fedemb.ledger import check_high_water, mark_high_water, rotate_keys
from fedemb.steps import reserve_budget
from tests.kit.cli import fedemb
from tests.kit.ledger_kit import connect
from tests.kit.pipeline_runs import honest_run


class Team:
    """Weekly runs that share a policy; ledger, keys and anchor can be restored from a backup."""

    def __init__(self, root: Path, rollback_anchor: Path | None = None):
        """A rollback anchor is a link, which has one address for the team and for its copies."""
        self.root, self.policy = root, root / "policy"
        self.changes = {"storage.rollback_anchor": str(rollback_anchor)} if rollback_anchor else {}
        if rollback_anchor:
            (self.policy / "rollback_anchor").mkdir(parents=True, exist_ok=True)
            rollback_anchor.unlink(missing_ok=True)
            rollback_anchor.symlink_to(self.policy / "rollback_anchor")

    @property
    def rollback_anchor(self):
        return self.changes.get("storage.rollback_anchor")

    def start(self, name):
        run = honest_run.start(self.root / name, name, self.policy, **self.changes)
        run.do_plan()
        return run

    def reserve(self, name):
        run = self.start(name)
        run.do_reserve()
        return run

    def backup(self, name="backup"):
        shutil.copytree(self.policy, self.root / name)

    def restore(self, *parts, backup="backup"):
        for part in parts:
            shutil.rmtree(self.policy / part, ignore_errors=True)
            if (self.root / backup / part).exists():
                shutil.copytree(self.root / backup / part, self.policy / part)

    def cut(self, records):
        """Deletes the last records and their heads."""
        folder = self.policy / "ledger" / "weekly"
        last = max(int(path.stem) for path in folder.glob("*.json"))
        for number in range(last, last - records, -1):
            for path in (folder / f"{number:08d}.json", folder / "heads" / f"{number:08d}.json"):
                path.unlink(missing_ok=True)


@pytest.fixture(scope="module", params=[False, True], ids=["no rollback anchor", "rollback_anchor"])
def month(request, tmp_path_factory):
    """Four weeks; a backup after each: `after-1`, ..."""
    root = tmp_path_factory.mktemp("month")
    team = Team(root, root.with_name(f"{root.name}-anchor") if request.param else None)
    for week in range(1, 5):
        team.reserve(f"week-{week}")
        team.backup(f"after-{week}")
    return team


@pytest.fixture
def team(month, tmp_path):
    """A copy, to attack."""
    shutil.copytree(month.root, tmp_path / "month")
    return Team(tmp_path / "month", Path(month.rollback_anchor) if month.rollback_anchor else None)


def _emptied_and_policy_key_gone(team):
    shutil.rmtree(team.policy / "ledger" / "weekly")
    (team.policy / "keys" / "policy" / "weekly").unlink()


def _gone_but_trust(team):
    for path in (team.policy / "ledger" / "weekly").rglob("*.json"):
        path.unlink()


def _forked(weeks):
    """A backup that was gone on with elsewhere, with its keys: as long as the ledger, or longer."""

    def attack(team):
        team.backup("now")
        team.restore("ledger", "keys", "rollback_anchor", backup="after-2")
        for week in range(weeks):
            team.reserve(f"elsewhere-{week}")
        team.restore("keys", "rollback_anchor", backup="now")

    return attack


ATTACKS = {
    **{
        f"backup of week {weeks}": lambda team, weeks=weeks: team.restore(
            "ledger", backup=f"after-{weeks}"
        )
        for weeks in (1, 2, 3)
    },
    **{f"{n} records cut": lambda team, n=n: team.cut(n) for n in (1, 2, 3, 4, 5)},
    "emptied": lambda team: shutil.rmtree(team.policy / "ledger" / "weekly"),
    "emptied, policy key gone": _emptied_and_policy_key_gone,
    "all records deleted": _gone_but_trust,
    **{f"fork of {weeks} weeks": _forked(weeks) for weeks in (1, 2, 3, 4)},
}


def _at(team):
    return ("--ledger", str(team.policy / "ledger"), "--keys", str(team.policy / "keys"))


def _also_anchor(team):
    return ("--rollback-anchor", team.rollback_anchor) if team.rollback_anchor else ()


def _settings(team):
    path = team.root / "settings.json"
    path.write_text(honest_run.config(**team.changes).model_dump_json())
    return str(path)


ACTS = {
    "reserve": lambda team: team.reserve("week-5"),
    "init": lambda team: fedemb("ledger", "init", "--config", _settings(team), *_at(team)),
    "rotate": lambda team: fedemb(
        "ledger", "rotate-keys", *_at(team), "--reason=x", *_also_anchor(team)
    ),
    "show": lambda team: fedemb("ledger", "show", *_at(team), *_also_anchor(team)),
    "verify": lambda team: fedemb("ledger", "verify", *_at(team), *_also_anchor(team)),
    "void": lambda team: fedemb(
        "ledger", "void", "week-1", *_at(team), "--reason=x", *_also_anchor(team)
    ),
}
FAST = ("backup of week 3", "2 records cut", "fork of 3 weeks")


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(
    "attack", [pytest.param(a, marks=() if a in FAST else pytest.mark.long) for a in ATTACKS]
)
def test_older_or_other_ledger_is_refused_by_every_command(team, attack, act):
    ATTACKS[attack](team)
    before = _state(team)
    with pytest.raises(FedEmbError):
        ACTS[act](team)
    assert _state(team) == before


@pytest.mark.parametrize("named", [None, "/elsewhere"])
@pytest.mark.parametrize(
    "words",
    [("void", "week-1"), ("rotate-keys",), ("approvers", "ada=ada.pub")],
    ids=lambda words: words[0],
)
def test_owner_commands_require_the_rollback_anchor(month, tmp_path, words, named):
    """Otherwise a run without the anchor would accept a restored ledger and key store."""
    if month.rollback_anchor is None:
        pytest.skip("this policy has no rollback anchor")
    before, also = _state(month), ("--rollback-anchor", named) if named else ()
    with pytest.raises(
        Refused, match=r"has a rollback anchor for life, and (none|another store) was"
    ):
        fedemb("ledger", *words, *_at(month), "--reason=x", *also)
    assert _state(month) == before


def _state(team):
    """Every file of ledger and keys, locks apart."""
    return {
        path: path.read_bytes()
        for part in ("ledger", "keys", "rollback_anchor")
        for path in (team.policy / part).rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("act", ACTS)
def test_valid_ledger_is_accepted_by_every_command(team, act):
    """Control for the tests above."""
    ACTS[act](team)


@pytest.mark.parametrize("weeks", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("act", ACTS)
def test_joint_rollback_of_ledger_and_keys_needs_the_anchor(team, weeks, act):
    team.restore("ledger", "keys", backup=f"after-{weeks}")
    if team.rollback_anchor is None:
        ACTS[act](team)  # what docs/explanation/ledger.md says cannot be seen
        return
    with pytest.raises(LedgerError, match=r"the rollback anchor .* has more markers"):
        ACTS[act](team)


@pytest.mark.parametrize("other", [None, "elsewhere"])
def test_a_run_without_the_policys_rollback_anchor_is_refused(team, tmp_path, other):
    """Otherwise an attacker who restores ledger and keys passes no anchor, or an empty one."""
    team.restore("ledger", "keys", backup="after-1")
    had = team.rollback_anchor
    team.changes = {"storage.rollback_anchor": str(tmp_path / other)} if other else {}
    if had is None:
        team.reserve("week-5")  # a policy may be given its first rollback anchor
        return
    with pytest.raises(Refused, match=r"storage\.rollback_anchor .* for life"):
        team.reserve("week-5")


def _added_key(trust, stranger):
    return [*trust.keys, stranger]


def _exchanged_key(trust, stranger):
    return [stranger, *(key for key in trust.keys if key.role != stranger.role)]


@pytest.mark.parametrize("changed", [_added_key, _exchanged_key])
def test_trust_file_with_an_unknown_key_is_refused(team, tmp_path, changed):
    """A writer of the ledger's folder without a key cannot sign as a step."""
    file = team.policy / "ledger" / "trust.json"
    stranger = Signer.load_or_create(LocalKeyStore(tmp_path / "stranger"), "evaluate")
    trust = TrustStore.load(file)
    TrustStore(changed(trust, stranger.trusted())).save(file)
    for act in ("reserve", "show"):
        with pytest.raises(LedgerError, match=r"created with another trust\.json"):
            ACTS[act](team)


def test_ledger_verify_states_whether_markers_were_checked(team):
    words = ("ledger", "verify", "--ledger", str(team.policy / "ledger"))
    assert "not checked" in fedemb(*words)
    assert "5 records of its charges" in fedemb(*words, "--keys", str(team.policy / "keys"))


def test_run_killed_before_its_marker_does_not_train_and_is_repaired_by_the_next(
    tmp_path, monkeypatch
):
    team = Team(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(reserve_budget, "mark_high_water", _killed)
        with pytest.raises(KeyboardInterrupt):
            team.reserve("week-1")
    assert not list((team.policy / "keys").glob("reservation/*"))
    run = team.reserve("week-2")
    names = {path.name for path in Path(run.keys_uri, "ledger").iterdir()}
    assert names == {f"weekly+{number}" for number in (1, 2, 3)}


def _killed(*_):
    raise KeyboardInterrupt


def test_ledger_restored_from_before_a_key_rotation_is_refused(team):
    keys_uri, ledger_uri = str(team.policy / "keys"), str(team.policy / "ledger")
    team.backup("before")
    keys = connect(ledger_uri, keys_uri, "weekly") and honest_run.open_key_store(keys_uri)
    rotate_keys(
        ledger_uri,
        keys,
        "leaked",
        ["ledger"],
        rollback_anchors=[team.rollback_anchor] if team.rollback_anchor else (),
    )
    team.restore("ledger", backup="before")
    with pytest.raises(LedgerError, match="older than its markers"):
        check_high_water(connect(ledger_uri, keys_uri, "weekly"), keys, team.rollback_anchor)


def test_run_killed_between_markers_leaves_no_gap(tmp_path, monkeypatch):
    """A policy and a reservation without markers; the process dies after its first marker."""
    team = Team(tmp_path)
    run = team.reserve("week-1")
    marks = sorted((team.policy / "keys" / "ledger").iterdir())
    assert len(marks) > 1
    for mark in marks:
        mark.unlink()
    keys = open_key_store(str(team.policy / "keys"))
    create = type(keys).create

    def killed(self, name, key=None):
        create(self, name, key)
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(type(keys), "create", killed)
        with pytest.raises(KeyboardInterrupt):
            mark_high_water(run.ledger(), keys)
    mark_high_water(run.ledger(), keys)
    assert sorted((team.policy / "keys" / "ledger").iterdir()) == marks
