"""What private steps say: every one runs as its pod does, well and not, and all its output is read.

Noise is planted in the process by tests/kit/pipeline_runs/logged_step.py; only the closed set of
lines may leave.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedemb.foundation import step_logging as events
from fedemb.pipelines.steps import all_steps
from tests.kit.pipeline_runs.forked import Forked
from tests.kit.pipeline_runs.logged_step import SECRET
from tests.kit.pipeline_runs.partition_run import reserve_for, reserved_config

ROOT = Path(__file__).parents[2]
KINDS = {"step_started", "step_finished", "step_failed"}
PRIVATE = [name for name, step in all_steps().items() if step.private]
PREPARED = {
    "train_model": "untrained",
    "train_model-classifier": "untrained_classifier",
    "evaluate_model-classifier": "trained_classifier",
    "partition_users": "unpartitioned",
    "evaluate_model": "trained",
    "audit_privacy": "trained",
}
"""Step -> the fixture that prepares its run; a new private step needs an entry."""
CLASSIFIERS = ("train_model-classifier", "evaluate_model-classifier")
"""Runs of the other task, through the same `step_process`."""


def _pattern(line: str) -> str:
    """A line of the closed set with its places open, after level and logger."""
    places = re.sub(r"%[ds]", "\0", line)
    return r"(INFO|WARNING) fedemb[\w.]*: " + re.escape(places).replace("\0", ".*")


def _not_of_the_set(output: str) -> list[str]:
    """Lines that no entry of `events` allows, and events of an unknown kind."""
    lines = [_pattern(line) for line in events.LINES]
    found = []
    for line in output.splitlines():
        if line.startswith(events.EVENT_PREFIX):
            kind = json.loads(line.removeprefix(events.EVENT_PREFIX))["kind"]
            if kind not in KINDS:
                found.append(line)
        elif not any(re.fullmatch(pattern, line) for pattern in lines):
            found.append(line)
    return found


def _run(step: str, fault: str, folder: Path, **environment: str) -> tuple[int, str]:
    words, env = (step, fault, folder), {**os.environ, **environment}
    if (step, fault) == ("train_model", "none"):  # says what TensorFlow says while it is loaded
        command = [sys.executable, "-m", "tests.kit.pipeline_runs.logged_step", *map(str, words)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        code, output = done.returncode, done.stdout
    else:
        forked = Forked(
            folder.parent / "logs", "tests.kit.pipeline_runs.logged_step", *words, env=env
        )
        code, output = forked.wait(), forked.output()
    return code, output.partition(json.dumps({"before": step}) + "\n")[2]


@pytest.fixture(scope="module")
def trained_classifier(untrained_classifier, tmp_path_factory):
    from tests.kit.pipeline_runs.training_run import ReadyRun, classifier_config

    folder = tmp_path_factory.mktemp("trained_classifier") / "run"
    shutil.copytree(untrained_classifier, folder)
    ReadyRun(folder, classifier_config()).train()
    return folder


@pytest.fixture(scope="module")
def unpartitioned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpartitioned")
    reserve_for(reserved_config(folder), folder)
    return folder


def _each_step_and_fault():
    """Embeddings' steps while all goes well; one fails in every way; the rest at night."""
    for step in (*PRIVATE, *CLASSIFIERS):
        for fault, code in (("none", 0), ("bug", 1), ("refused", 3)):
            at_night = step in CLASSIFIERS or (fault != "none" and step != "train_model")
            marks = [pytest.mark.slow] if at_night else []
            yield pytest.param(step, fault, code, id=f"{step}-{fault}", marks=marks)


@pytest.mark.long
@pytest.mark.parametrize(("step", "fault", "code"), _each_step_and_fault())
def test_private_step_logs_only_allowed_messages(step, fault, code, request, tmp_path):
    folder = tmp_path / "run"
    prepared = request.getfixturevalue(PREPARED[step])
    shutil.copytree(prepared, folder)
    if step == "partition_users":  # the reservation binds the address of its input
        shutil.rmtree(folder)
        folder = prepared
    ended, output = _run(step, fault, folder)
    assert SECRET not in output
    allowed = _not_of_the_set(output)
    if fault == "bug":  # places in the code, which quote no value
        assert allowed
        assert all(re.match(r' +(File "|\S)|^$', line) for line in allowed), allowed
    else:
        assert allowed == []
        assert ended == code or (fault == "refused" and ended == 2), output
    assert f'"step": "{step.partition("-")[0]}"' in output


@pytest.mark.long
def test_fedemb_log_everything_disables_the_log_filter(trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    _, output = _run("evaluate_model", "bug", folder, FEDEMB_LOG="everything")
    assert SECRET in output, "so the noise is heard where nothing is closed"
