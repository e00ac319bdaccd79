"""One allowed and one released run for the session; every attack bends a copy."""

import pytest

from tests.adversary.attacks import World
from tests.kit.pipeline_runs import honest_run


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("attacked"))


@pytest.fixture(scope="session")
def allowed(world):
    """A run that the gate allows."""
    return world.allowed


@pytest.fixture(scope="session")
def other(allowed, tmp_path_factory):
    """Another allowed run of the same policy, with less noise, from another public backbone."""
    root = tmp_path_factory.mktemp("other")
    run = honest_run.copy_of(allowed, root / "policy of both")
    changes = {"mechanism.noise_multiplier": 1.9, "training.seed": 5, "release.version": "2"}
    other = honest_run.start(root / "run", "tuesday", run.policy_root, **changes).until_gate()
    assert other.do_gate()["allow"] is True
    return other


@pytest.fixture
def run(allowed, tmp_path):
    """A copy of the allowed run, to attack."""
    return honest_run.copy_of(allowed, tmp_path / "run")


@pytest.fixture
def bundle(world):
    """A copy of the released bundle, to attack, and the keys its reader pinned."""
    with world.bundle() as (folder, trust):
        yield folder, trust
