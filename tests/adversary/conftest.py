"""One allowed and one released run for the session; every attack bends a copy."""

import shutil

import pytest

from fedemb.ledger import rotate_keys
from tests.kit.pipeline_runs import honest_run


@pytest.fixture(scope="session")
def allowed(tmp_path_factory):
    """A run that the gate allows, in a policy whose first signing keys are retired."""
    root = tmp_path_factory.mktemp("allowed")
    first = honest_run.start(root / "first", "sunday", root / "run" / "policy")
    first.do("plan reserve")
    rotate_keys(first.ledger_uri, first.keys, "a year is over")
    run = honest_run.start(root / "run").until_gate()
    assert run.do_gate()["allow"] is True
    return run


@pytest.fixture(scope="session")
def other(allowed, tmp_path_factory):
    """Another allowed run of the same policy, with less noise, from another public backbone."""
    root = tmp_path_factory.mktemp("other")
    run = honest_run.copy_of(allowed, root / "policy of both")
    changes = {"mechanism.noise_multiplier": 1.9, "training.seed": 5, "release.version": "2"}
    other = honest_run.start(root / "run", "tuesday", run.policy_root, **changes).until_gate()
    assert other.do_gate()["allow"] is True
    return other


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
