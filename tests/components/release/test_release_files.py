"""A bundle that would not verify for its files is not published."""

import pytest

from fedemb.errors import Refused
from fedemb.release.bundle import SAVED_MODEL_FILES
from tests.kit.pipeline_runs import honest_run
from tests.kit.servers import fake_serving


@pytest.fixture(scope="module")
def allowed(allowed_run, tmp_path_factory):
    return honest_run.copy_of(allowed_run, tmp_path_factory.mktemp("allowed") / "run")


@pytest.mark.parametrize(
    ("written", "odd"),
    [
        (SAVED_MODEL_FILES[:-1], "saved_model/variables/variables.index"),
        ((*SAVED_MODEL_FILES, "assets/vocabulary.txt"), "saved_model/assets/vocabulary.txt"),
    ],
    ids=["missing", "extra"],
)
def test_bundle_with_other_files_is_not_published(allowed, monkeypatch, written, odd):
    monkeypatch.setattr(fake_serving, "SAVED_MODEL_FILES", written)
    with pytest.raises(Refused, match=f"Nothing is published.*{odd}"):
        allowed.do_release()
    assert not (allowed.root / "releases").exists()
    assert allowed.ledger().state.attempts[allowed.run_id, 1].releases == []


def test_bundle_with_the_right_files_is_published_after_a_refusal(allowed):
    allowed.do_release()
    assert allowed.problems() == []
