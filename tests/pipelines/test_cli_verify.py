"""`fedemb verify` as a user meets it: what they print, and exit codes."""

import json
import shutil
import sys

import pytest

from tests.kit.cli import ended
from tests.kit.pipeline_runs import honest_run
from tests.kit.verified import problems_of


@pytest.fixture
def bundle(released_run, tmp_path):
    """A copy of the bundle, somewhere else and under another folder name."""
    shutil.copytree(released_run.bundle, tmp_path / "anywhere")
    with honest_run.stand_in_for_serving():
        yield tmp_path / "anywhere"


def test_verify_of_a_moved_bundle_prints_its_signed_name_and_version(capsys, released_run, bundle):
    words = ("verify", bundle, "--trust", released_run.trust)
    code, out, _ = ended(*words, "--ledger", released_run.ledger_uri)
    assert code == 0
    assert out.startswith("verified: glyphs 1.0, of run monday\nReleased; epsilon of one user ")
    code, out, _ = ended(*words, "--json")
    found = json.loads(out)
    assert (code, found["verified"], found["problems"]) == (0, True, [])
    assert found["version"] == "1.0"


def test_verify_without_tensorflow_reports_a_problem(released_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    monkeypatch.delitem(sys.modules, "fedemb.release.released", raising=False)
    problems = problems_of(str(released_run.bundle), released_run.trust)
    assert "without tensorflow" in " ".join(problems)
