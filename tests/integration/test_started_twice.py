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

from fedemb.storage import fencing as turns
from tests.kit.pipeline_runs import evaluation_run, honest_run
from tests.kit.pipeline_runs.forked import Forked
from tests.kit.pipeline_runs.partition_run import reserve_for, reserved_config
from tests.kit.pipeline_runs.stopped_step import ACTS

QUICK = {("commit", "before record"), ("release", "before marker")}


def _contents(*kept: Path) -> dict[str, bytes]:
    """Everything below the folders, but for the record of turns and unfinished hidden trees."""
    return {
        str(path): path.read_bytes()
        for folder in kept
        for path in sorted([folder, *folder.rglob("*")])
        if path.is_file()
        and path.parent.name != turns.TURNS
        and not any(name.startswith(".") for name in path.relative_to(folder).parts[:-1])
    }


def _race(first: list[str | Path], second: list[str | Path], *kept: Path) -> tuple[int, str]:
    """Starts a step that stops itself, runs another to its end, and resumes the first."""
    logs = kept[0].parent / "logs"
    stopped = Forked(logs / "first", *first)
    try:
        assert stopped.wait_until_stopped(), stopped.output()
        finished = Forked(logs / "second", *second)
        assert finished.wait() == 0, finished.output()
        before = _contents(*kept)
        os.kill(stopped.pid, signal.SIGCONT)
        code, after = stopped.wait(), _contents(*kept)
        assert {name for name in before | after if before.get(name) != after.get(name)} == set()
        return code, stopped.output()
    finally:
        stopped.kill()


def _race_of(step: str, point: str, folder: Path, *kept: str) -> tuple[int, str]:
    command = ["tests.kit.pipeline_runs.stopped_step", step]
    places = [folder / name for name in kept]
    return _race([*command, point, folder], [*command, "-", folder], *places)


@pytest.mark.parametrize(
    ("point", "superseded"),
    [
        pytest.param("a round", True, marks=pytest.mark.long),
        pytest.param("a checkpoint", True, marks=pytest.mark.long),
        pytest.param("the weights", True, marks=pytest.mark.slow),
        pytest.param("the card", True, marks=pytest.mark.slow),
        # The same bytes: the ledger knows its own record again.
        pytest.param("the commit", False, marks=pytest.mark.slow),
        pytest.param("the end of the key", False, marks=pytest.mark.slow),
    ],
)
def test_two_trainers_of_one_attempt(untrained, tmp_path, point, superseded):
    folder = tmp_path / "run"
    shutil.copytree(untrained, folder)
    code, said = _race_of("train_model", point, folder, "private", "ledger", "keys", "model")
    assert code == (3 if superseded else 0), said
    assert ("Superseded: train_model was started again" in said) == superseded


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("a shard", marks=pytest.mark.long),
        pytest.param("the cleaning", marks=pytest.mark.slow),
        pytest.param("the publication", marks=pytest.mark.slow),
        pytest.param("the tidying", marks=pytest.mark.slow),
    ],
)
def test_two_partitions_of_one_run(tmp_path, point):
    reserve_for(reserved_config(tmp_path), tmp_path)
    code, said = _race_of("partition_users", point, tmp_path, "private", "keys", "manifest.json")
    assert code == 3, said
    assert "Superseded: partition_users was started again" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "superseded"),
    [("the scores", True), ("the figures", True), ("the public report", False)],
)
def test_two_audits_of_one_model(trained, tmp_path, point, superseded):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    code, said = _race_of(
        "audit_privacy", point, folder, "private", "keys", "report.json", "report.html"
    )
    assert code == (3 if superseded else 0), said
    assert ("Superseded: audit_privacy was started again" in said) == superseded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "superseded"),
    [
        # Its evaluation comes second: it is counted, and writes the same bytes.
        ("the evaluation record", False),
        ("the figures of the model", True),
        ("the page", False),  # the same bytes
        ("the utility report", False),
    ],
)
def test_two_evaluations_of_one_model(trained, tmp_path, point, superseded):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    kept = ("private", "keys", "report.json", "report.html")
    code, said = _race_of("evaluate_model", point, folder, *kept)
    assert code == (3 if superseded else 0), said
    assert ("was started again while this process ran" in said) == superseded
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
        pytest.param(act, point, marks=[] if (act, point) in QUICK else pytest.mark.slow)
        for act, points in ACTS.items()
        for point in points
    ],
)
def test_two_of_one_act_leave_one_record_and_the_same_documents(ready, tmp_path, act, point):
    root = tmp_path / "run"
    shutil.copytree(ready / act, root)
    code, said = _race_of(act, point, root, "")
    assert code == 0, said
    honest_run.at(root).ledger().verify()
