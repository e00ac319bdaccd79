"""SIGKILL at random moments of a real process, then resume: the bits of an unbroken run."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedemb.foundation.canonical_json import file_digest
from tests.kit.pipeline_runs.training_run import ReadyRun, config, prepare, round_times

# Not conftest's: `random_kills.py` comes here when rooms are imported already.
REPOSITORY = Path(__file__).parents[3]


def _train(root, kills):
    times = [f"{seconds:.4f}" for seconds in kills]
    done = subprocess.run(
        [sys.executable, "-m", "tests.kit.pipeline_runs.training_run", str(root), *times],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    status = json.loads(done.stdout.strip().splitlines()[-1])
    assert status["last"] == 0, done.stderr[-2000:]
    return status["statuses"]


def kill_and_compare(tmp_path, kills, seed):
    """Returns how many kills met a living trainer."""
    settings = config(**{"mechanism.rounds": 3 * kills, "training.local.epochs": 4})
    prepare(tmp_path / "whole", settings, users=120)
    (tmp_path / "whole" / "config.json").write_text(settings.model_dump_json())
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")  # the same keys: the same coins, noise
    _train(tmp_path / "whole", [])
    round_seconds = np.median(np.diff(round_times(ReadyRun(tmp_path / "whole", settings))))
    # Every trainer commits a round, then dies somewhere in the next one or two.
    times = np.random.default_rng(seed).uniform(0, 1.5, kills) * round_seconds
    statuses = _train(tmp_path / "killed", times)
    assert statuses.count(-signal.SIGKILL) >= 0.8 * kills  # they met a living trainer
    for file in ("backbone.keras", "rounds.jsonl"):
        whole, killed = (tmp_path / name / "model" / file for name in ("whole", "killed"))
        assert file_digest(whole) == file_digest(killed)
    return statuses.count(-signal.SIGKILL)


@pytest.mark.slow
def test_killed_twenty_times_resumes_bit_identical(tmp_path):
    kill_and_compare(tmp_path, kills=20, seed=6)
