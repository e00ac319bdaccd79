"""A marker is signed by nobody: it counts for what lies where it points, and for nothing else."""

import json
import shutil

import honest_run
import pytest

from fedemb.documents.artifacts import canonical_json
from fedemb.errors import Refused

MARKER = "glyphs/1.0.json"


@pytest.fixture(scope="module")
def allowed(tmp_path_factory):
    """A run that the gate allowed and nobody released."""
    run = honest_run.start(tmp_path_factory.mktemp("allowed") / "run").until_gate()
    run.do_gate()
    return run


@pytest.fixture(scope="module")
def released(allowed, tmp_path_factory):
    """The same, released: a genuine bundle with its marker."""
    run = _copy(allowed, tmp_path_factory.mktemp("released") / "run")
    run.do_release()
    return run


def _copy(run, root):
    shutil.copytree(run.root, root)
    return honest_run.HonestRun(root, run.run_id, run.config, root / "policy")


def _marker(run, **changes):
    """What whoever may write to the store can know: the run's public names and digests."""
    model = json.loads((run.model / "model.json").read_text())
    return {
        "schema": "fedemb/release/1",
        "name": "glyphs",
        "version": "1.0",
        "uri": (run.root / "releases" / "glyphs" / "1.0").as_posix(),
        "model_sha": model["weights_sha"],
        "run_id": run.run_id,
        "attempt": 1,
        "report_sha": "a" * 64,
        "bundle_sha": "b" * 64,
        **changes,
    }


def _plant(run, marker):
    path = run.root / "releases" / MARKER
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(canonical_json(marker))
    return path


def _releases(run):
    attempts = run.ledger().state.attempts.values()
    return [record.body for attempt in attempts for record in attempt.releases]


@pytest.mark.parametrize("uri", ["s3://evil/bundle", "/elsewhere/glyphs/1.0", None, "here"])
def test_marker_without_a_bundle_of_ours_is_refused_and_recorded_nowhere(allowed, tmp_path, uri):
    run = _copy(allowed, tmp_path / "run")
    path = _plant(run, _marker(run) if uri == "here" else _marker(run, uri=uri))
    with pytest.raises(Refused, match="remove the marker, then release again"):
        run.do_release()
    assert _releases(run) == []
    assert not (run.root / "release.json").exists()
    path.unlink()
    assert run.do_release()["uri"] == _marker(run)["uri"]
    assert run.problems() == []


def test_marker_that_points_to_a_bundle_of_a_stranger_is_refused(allowed, tmp_path):
    """A whole bundle of the same name, model and run, signed by keys of another policy owner."""
    run = _copy(allowed, tmp_path / "run")
    stranger = honest_run.start(tmp_path / "stranger")
    shutil.copytree(run.model, stranger.model)
    stranger.until_gate().do_gate()
    published = stranger.do_release()
    shutil.copytree(stranger.root / "releases", run.root / "releases")
    marker = json.loads((run.root / "releases" / MARKER).read_text())
    assert marker["bundle_sha"] == published["bundle_sha"]
    _plant(run, _marker(run, bundle_sha=marker["bundle_sha"], report_sha=marker["report_sha"]))
    with pytest.raises(Refused, match="no bundle"):
        run.do_release()
    assert _releases(run) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"bundle_sha": "b" * 64},
        {"report_sha": "a" * 64},
        {"uri": "s3://evil/bundle"},
        {"name": "other"},
        {"note": "and one field more"},
    ],
    ids=str,
)
def test_bent_marker_of_a_genuine_bundle_is_refused(released, tmp_path, changes):
    run = _copy(released, tmp_path / "run")
    genuine = json.loads((released.root / "releases" / MARKER).read_text())
    _plant(run, {**genuine, "uri": _marker(run)["uri"]})
    (run.root / "release.json").unlink()
    before = _releases(run)
    run.do_release()  # taken over as it is
    assert _releases(run) == before
    _plant(run, {**genuine, "uri": _marker(run)["uri"], **changes})
    with pytest.raises(Refused, match="names no bundle"):
        run.do_release()
    assert _releases(run) == before


def test_genuine_marker_of_a_bundle_that_was_changed_is_refused(released, tmp_path):
    run = _copy(released, tmp_path / "run")
    genuine = json.loads((run.root / "releases" / MARKER).read_text())
    _plant(run, {**genuine, "uri": _marker(run)["uri"]})
    card = run.root / "releases" / "glyphs" / "1.0" / "MODEL_CARD.md"
    card.write_bytes(card.read_bytes() + b"\n")
    with pytest.raises(Refused, match="changed since"):
        run.do_release()
