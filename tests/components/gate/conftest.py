"""One good run for the session; every test bends a copy."""

import shutil

import pytest

from tests.kit.pipeline_runs import honest_run


@pytest.fixture(scope="session")
def good_run(tmp_path_factory):
    root = tmp_path_factory.mktemp("good")
    run = honest_run.start(root / "run").until_gate()
    assert run.do_gate()["allow"] is True
    return run


@pytest.fixture
def run(good_run, tmp_path):
    """A copy of the good run that the test may change."""
    shutil.copytree(good_run.root, tmp_path / "run")
    return honest_run.HonestRun(
        tmp_path / "run", good_run.run_id, good_run.config, tmp_path / "run" / "policy"
    )
