"""`fedemb verify` as a user meets it: what they print, and exit codes."""

import json
import shutil

import pytest

from fedemb.pipelines.cli import main as cli
from tests.kit.pipeline_runs import honest_run


def call(capsys, *words):
    """Exit code, output and errors of a command."""
    try:
        cli.main([str(word) for word in words])
        code = 0
    except SystemExit as stopped:
        code = stopped.code or 0
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A released run, its SavedModel a stand-in."""
    return honest_run.start(tmp_path_factory.mktemp("released") / "run").until_release()


@pytest.fixture
def bundle(run, tmp_path):
    """A copy of the bundle, somewhere else and under another folder name."""
    shutil.copytree(run.root / "releases" / "glyphs" / "1.0", tmp_path / "anywhere")
    with honest_run.stand_in_for_serving():
        yield tmp_path / "anywhere"


def _trust(run):
    return ("--trust", f"{run.ledger_uri}/trust.json")


def test_good_bundle_is_called_by_its_name_wherever_it_lies(capsys, run, bundle):
    code, out, _ = call(capsys, "verify", bundle, *_trust(run), "--ledger", run.ledger_uri)
    assert code == 0
    assert out.startswith("verified: glyphs 1.0, of run monday\nReleased; epsilon of one user ")
    code, out, _ = call(capsys, "verify", bundle, *_trust(run), "--json")
    found = json.loads(out)
    assert (code, found["verified"], found["problems"]) == (0, True, [])
    assert found["version"] == "1.0"


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "privacy_report.json", "ledger.jsonl",
     "backbone.keras", "verdict.json", "config.json", "saved_model/saved_model.pb"],
)  # fmt: skip
@pytest.mark.parametrize("left", [0.5, 0.0, None], ids=["half", "empty", "gone"])
def test_truncated_bundle_is_refused_in_sentences(capsys, run, bundle, name, left):
    path = bundle / name
    data = path.read_bytes()
    path.unlink() if left is None else path.write_bytes(data[: int(len(data) * left)])
    code, out, error = call(capsys, "verify", bundle, *_trust(run))
    assert code == 3
    assert error.startswith("Refused: Verification failed")
    assert "Traceback" not in error + out
    assert "verified" not in out


def test_verify_without_tensorflow_says_so_and_does_not_pass(capsys, run, monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "tensorflow", None)
    monkeypatch.delitem(sys.modules, "fedemb.serving.released", raising=False)
    bundle = run.root / "releases" / "glyphs" / "1.0"
    code, _, error = call(capsys, "verify", bundle, *_trust(run))
    assert code == 3
    assert "without tensorflow" in error
