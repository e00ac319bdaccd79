"""Features of a frozen backbone in the working state: signed, resumed, and deleted at the end."""

import shutil

import pytest

from fedemb.engine import feature_cache
from fedemb.errors import SignatureInvalid
from fedemb.foundation.canonical_json import tree_digests
from fedemb.steps import train_dp_sgd as classifier
from tests.kit.pipeline_runs.training_run import ReadyRun, classifier_config, prepare

HEAD = {
    "model.trainable": "head",
    "training.unit_gradient": {"images_per_unit": 2, "microbatch": 4},
}
KEY = bytes(range(32))


class Killed(BaseException):
    """Raised where a kill would strike."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("prepared") / "run", classifier_config(**HEAD), users=60)


@pytest.fixture
def stopped(prepared, tmp_path, monkeypatch):
    """A training killed after it stored features."""
    run = copy(prepared, tmp_path / "stopped")
    monkeypatch.setattr(feature_cache, "_BLOCK", 7)
    save = feature_cache.FeatureCache.save

    def killing(cache):
        save(cache)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(feature_cache.FeatureCache, "save", killing)
        with pytest.raises(Killed):
            train(run)
    return run


def copy(run, root):
    shutil.copytree(run.root, root)
    return ReadyRun(root, run.config)


def train(run):
    return classifier.run(run.context(), root_key=KEY)


def blocks(run):
    return sorted((run.private / "train" / "attempt-1" / "features").rglob("*.npz"))


@pytest.mark.parametrize("forgery", ["byte", "unsigned"])
def test_features_that_the_training_did_not_write_are_refused(stopped, forgery):
    block = blocks(stopped)[0]
    data = block.read_bytes()
    block.write_bytes(data[:-1] + b"x" if forgery == "byte" else data.partition(b"\n")[2])
    with pytest.raises(SignatureInvalid, match="of the working state"):
        train(stopped)


def test_training_killed_while_it_computes_features_resumes_to_the_same_bits(
    stopped, prepared, tmp_path
):
    assert blocks(stopped)
    train(stopped)
    whole = copy(prepared, tmp_path / "whole")
    train(whole)
    assert tree_digests(stopped.root / "model") == tree_digests(whole.root / "model")
    assert not blocks(stopped)
    assert not blocks(whole)
