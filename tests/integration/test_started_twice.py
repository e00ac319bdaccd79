"""A private step that a cluster started twice: the first one is stopped, not dead, and goes on.

Kubernetes restarts what it lost sight of. Whatever the first process was about to do, the second
one's work is not drawn, written or committed twice, and the first ends with a sentence.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedemb.storage import turns
from tests.partition_run import make_config, reservation_for, rows_of, write_parquet

ROOT = Path(__file__).parents[2]


def _start(step: str, point: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.stopped_step", step, point, str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _contents(*folders: Path) -> dict[str, bytes]:
    """Everything below the folders, but for the record of turns."""
    return {
        str(path): path.read_bytes()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name != turns.TURNS
    }


def _race(step: str, point: str, folder: Path, *kept: Path) -> tuple[int, str]:
    """Stops a step at a point, runs it again to its end, lets the first go on; how that ends."""
    first = _start(step, point, folder)
    try:
        _, status = os.waitpid(first.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), first.communicate()[0]
        second = _start(step, "-", folder)
        said = second.communicate()[0]
        assert second.returncode == 0, said
        before = _contents(*kept)
        first.send_signal(signal.SIGCONT)
        said = first.communicate()[0]
        assert _contents(*kept) == before, said
        return first.returncode, said
    finally:
        first.kill()
        first.wait()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    from tests.training_run import prepare

    return prepare(tmp_path_factory.mktemp("trained") / "run").root


@pytest.mark.parametrize("point", ["a round", "a checkpoint", "the last act"])
def test_two_trainers_of_one_attempt(trained, tmp_path, point):
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    kept = [folder / name for name in ("private", "ledger", "keys", "model")]
    code, said = _race("train", point, folder, *kept)
    assert code == 3, said
    assert "Superseded: train_dp_fedemb was started again" in said


@pytest.mark.parametrize("point", ["the cleaning", "the publication", "the tidying"])
def test_two_partitions_of_one_run(tmp_path, point):
    from fedemb.data.input_version import fingerprint_input
    from fedemb.keys import commitment_key, open_key_store

    config = make_config(write_parquet(tmp_path / "rows.parquet", rows_of(20)))
    key = commitment_key(open_key_store(str(tmp_path / "keys")), config.policy.policy_id)
    bound = fingerprint_input(config.data.source.uri, key, "run-1")
    reservation_for(tmp_path / "reservation.json", config, input=bound)
    code, said = _race("partition", point, tmp_path, tmp_path / "private", tmp_path / "keys")
    assert code == 3, said
    assert "Superseded: partition_users was started again" in said


def test_two_audits_of_one_model(tmp_path):
    from tests.evaluation_run import finished_run

    finished_run(tmp_path)
    code, said = _race("audit", "the figures", tmp_path, tmp_path / "private")
    assert code == 3, said
    assert "Superseded: audit_privacy was started again" in said
