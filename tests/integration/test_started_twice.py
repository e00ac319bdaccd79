"""A step that a cluster started twice: the first process is stopped and continues later.

Kubernetes restarts what it lost sight of. The first process may be at any point; nothing the
second one did is drawn, charged or written again. Where both would write the same bytes they may;
elsewhere the first ends with a sentence before it changes anything.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from fedemb.storage import fencing
from tests.kit.pipeline_runs import evaluation_run, honest_run
from tests.kit.pipeline_runs.forked import Forked
from tests.kit.pipeline_runs.partition_run import reserve_for, reserved_config
from tests.kit.pipeline_runs.stopped_step import POINTS

QUICK = {("commit", "before record"), ("release", "before marker")}


def _contents(*kept: Path) -> dict[str, bytes]:
    """Everything below the folders, but for the fencing tokens and unfinished hidden trees."""
    return {
        str(path): path.read_bytes()
        for folder in kept
        for path in sorted([folder, *folder.rglob("*")])
        if path.is_file()
        and path.parent.name != fencing.TOKENS
        and not any(name.startswith(".") for name in path.relative_to(folder).parts[:-1])
    }


def _race_of(step: str, point: str, folder: Path, *names: str) -> tuple[int, str]:
    """Starts a step that stops itself, runs another to its end, and resumes the first."""
    command, kept = ("tests.kit.pipeline_runs.stopped_step", step), [folder / n for n in names]
    logs = kept[0].parent / "logs"
    stopped = Forked(logs / "first", *command, point, folder)
    try:
        assert stopped.wait_until_stopped(), stopped.output()
        finished = Forked(logs / "second", *command, "-", folder)
        assert finished.wait() == 0, finished.output()
        before = _contents(*kept)
        os.kill(stopped.pid, signal.SIGCONT)
        code, after = stopped.wait(), _contents(*kept)
        assert {name for name in before | after if before.get(name) != after.get(name)} == set()
        return code, stopped.output()
    finally:
        stopped.kill()


REPORTS = ("private", "keys", "report.json", "report.html")
STEPS = {
    "train_model": (
        "untrained",
        ("private", "ledger", "keys", "model"),
        {
            **dict.fromkeys(("a round", "a checkpoint", "the weights", "the card"), True),
            # The same bytes: the ledger knows its own record again.
            **dict.fromkeys(("the commit", "the end of the key"), False),
        },
    ),
    "partition_users": (
        "",
        ("private", "keys", "manifest.json"),
        dict.fromkeys(("a shard", "the cleaning", "the publication", "the tidying"), True),
    ),
    "audit_privacy": (
        "trained",
        REPORTS,
        {"the scores": True, "the figures": True, "the public report": False},
    ),
    "evaluate_model": (
        "trained",
        ("private", "report.json", "report.html"),  # keys get a marker for each evaluation
        {
            # Its evaluation comes second: it is counted, and writes the same bytes.
            "the evaluation record": False,
            "the figures of the model": True,
            "the page": False,  # the same bytes
            "the utility report": False,
        },
    ),
}
"""Step -> its prepared run, what may not change any more, whether points find it superseded."""
EACH_DAY = {"a round", "a checkpoint", "a shard"}


@pytest.mark.parametrize(
    ("step", "point"),
    [
        pytest.param(step, at, marks=pytest.mark.long if at in EACH_DAY else pytest.mark.slow)
        for step, (_, _, points) in STEPS.items()
        for at in points
    ],
)
def test_superseded_start_of_a_step_changes_nothing_when_resumed(request, tmp_path, step, point):
    (prepared, kept, points), folder = STEPS[step], tmp_path / "run"
    if prepared:
        shutil.copytree(request.getfixturevalue(prepared), folder)
    else:
        folder.mkdir()
        reserve_for(reserved_config(folder), folder)
    code, said = _race_of(step, point, folder, *kept)
    assert code == (3 if points[point] else 0), said
    assert ("was started again" in said) == points[point]
    if step == "evaluate_model":
        ledger = evaluation_run.FinishedRun(folder).context(evaluation_run.config()).ledger
        ledger.verify()
        assert len(ledger.state.evaluations) == 2, "each start counts"


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """Copies of a run right before each act on the ledger."""
    return honest_run.before_acts(tmp_path_factory.mktemp("ready"))


@pytest.mark.parametrize(
    ("act", "point"),
    [
        pytest.param(*at, marks=pytest.mark.long if at in QUICK else pytest.mark.slow)
        for at in POINTS
    ],
)
def test_concurrent_equal_commands_leave_one_record(ready, tmp_path, act, point):
    root = tmp_path / "run"
    shutil.copytree(ready / act, root)
    code, said = _race_of(act, point, root, "")
    assert code == 0, said
    honest_run.at(root).ledger().verify()
