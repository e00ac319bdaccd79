"""SIGKILL at random moments of a real process, then resume: the bits of an unbroken run."""

import shutil
import subprocess
import sys

import numpy as np
import pytest

from components.fedemb.artifacts import file_digest
from tests.conftest import REPOSITORY
from tests.training_run import config, prepare

ROUNDS = 30


def _train(root, kills):
    times = [f"{seconds:.2f}" for seconds in kills]
    done = subprocess.run(
        [sys.executable, "-m", "tests.training_run", str(root), *times],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    status = done.stdout.strip().splitlines()[-1]
    assert status.endswith(" 0"), done.stderr[-2000:]
    return status


def _kill_and_compare(tmp_path, kills, seed):
    settings = config(**{"mechanism.rounds": ROUNDS, "training.local.epochs": 4})
    prepare(tmp_path / "whole", settings, users=120)
    (tmp_path / "whole" / "config.json").write_text(settings.model_dump_json())
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")  # the same keys: the same coins, noise
    seconds = float(_train(tmp_path / "whole", []).split()[3])
    times = np.random.default_rng(seed).uniform(0.2, 0.9, kills) * seconds
    assert "-9" in _train(tmp_path / "killed", times)  # at least one kill met a living trainer
    for file in ("backbone.keras", "rounds.jsonl"):
        whole, killed = (tmp_path / name / "model" / file for name in ("whole", "killed"))
        assert file_digest(whole) == file_digest(killed)


def test_killed_at_random_moments_resumes_bit_identical(tmp_path):
    _kill_and_compare(tmp_path, kills=2, seed=5)


@pytest.mark.slow
def test_killed_twenty_times_resumes_bit_identical(tmp_path):
    _kill_and_compare(tmp_path, kills=20, seed=6)
