"""kill -9 at every named point of reserve, bind, commit and release.

After each: the ledger verifies, charges at least what was started, the act repeated is finished
once, and no partial release is visible. The points are in tests/kit/pipeline_runs/killed_step.py.
"""

import json
import shutil

import pytest

from fedemb.keys import reservation_key_name, unbound_key_name
from tests.kit.pipeline_runs import honest_run, killed_step
from tests.kit.pipeline_runs.forked import Forked

ORDER = ("reserve", "bind", "commit", "release")
POINTS = [(act, point) for act in ORDER for point in killed_step.POINTS[act]]
QUICK = {
    ("reserve", "after record"),
    ("commit", "after record"),
    ("release", "inside tree"),
    ("release", "after marker"),
}


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """Copies of a run right before each act."""
    return honest_run.before_acts(tmp_path_factory.mktemp("ready"))


def test_points_are_counted():
    assert len(POINTS) == 22


@pytest.mark.parametrize(
    ("act", "point"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow, id=": ".join(case))
        for case in POINTS
    ],
)
def test_kill_leaves_nothing_broken_and_the_act_can_be_repeated(ready, tmp_path, act, point):
    root = tmp_path / "run"
    shutil.copytree(ready / act, root)
    run = honest_run.at(root)
    killed = Forked(
        tmp_path / "log", "tests.kit.pipeline_runs.killed_step", act, point, root, "SIGKILL"
    )
    assert killed.wait() == -9, killed.output()
    if (root / "policy" / "ledger" / "weekly").exists():
        ledger = run.ledger()
        ledger.verify()
        found = ledger.state.attempts.get(("monday", 1))
        if act != "reserve":  # rounds may have started: charged at least for them
            assert found.charge.rounds_charged == 6
            assert ledger.spent("all/0").epsilon > 0
    if (root / "releases" / "glyphs" / "1.0.json").exists():  # visible, so it must be whole
        assert set(run.problems()) <= {"the ledger has no record of this release"}
    getattr(run, f"do_{act}")()
    run.ledger().verify()
    assert len(run.ledger().state.attempts) == 1
    _finished(run, act)


def _finished(run, act):
    attempt = run.ledger().state.attempts["monday", 1]
    if act == "reserve":
        assert run.keys.exists(reservation_key_name("monday", 1))
        assert run.keys.exists(unbound_key_name("monday", 1))
        assert run.reservation.exists()
    if act == "commit":
        assert attempt.status == "committed"
        assert not run.keys.exists(reservation_key_name("monday", 1))
    if act == "release":
        assert len(attempt.releases) == 1
        assert run.problems() == []
        document = json.loads((run.root / "release.json").read_text())
        assert document["bundle_sha"] == attempt.releases[0].body["bundle_sha"]
