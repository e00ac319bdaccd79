"""One allowed and one released run for the session; every attack bends a copy."""

import shutil

import honest_run
import pytest


@pytest.fixture(scope="session")
def allowed(tmp_path_factory):
    """A run that the gate allows."""
    run = honest_run.start(tmp_path_factory.mktemp("allowed") / "run").until_gate()
    assert run.do_gate()["allow"] is True
    return run


@pytest.fixture(scope="session")
def released(allowed, tmp_path_factory):
    """The same, released."""
    run = honest_run.copy_of(allowed, tmp_path_factory.mktemp("released") / "run")
    run.do_release()
    assert run.problems() == []
    return run


@pytest.fixture
def run(allowed, tmp_path):
    """A copy of the allowed run, to attack."""
    return honest_run.copy_of(allowed, tmp_path / "run")


@pytest.fixture
def bundle(released, tmp_path):
    """A copy of the released bundle, to attack, and the keys its reader pinned."""
    shutil.copytree(released.root / "releases" / "glyphs" / "1.0", tmp_path / "bundle")
    return tmp_path / "bundle", released.policy_root / "ledger" / "trust.json"
