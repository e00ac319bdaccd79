"""A marker counts if it is signed and names a bundle of ours in its own store."""

import json
import shutil

import pytest

from fedemb.documents.verdict import ReleaseManifest
from fedemb.errors import Refused, SignatureInvalid
from fedemb.foundation.document import encode, parse
from fedemb.keys.trust import Signer, sign_document
from fedemb.release import bundle as parts
from fedemb.steps import release_model
from tests.kit.pipeline_runs import honest_run
from tests.kit.sealed_bundle import seal_again

MARKER = "glyphs/1.0.json"


def _plant(run, marker):
    path = run.root / "releases" / MARKER
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(marker))
    return path


def _releases(run):
    attempts = run.ledger().state.attempts.values()
    return [record.body for attempt in attempts for record in attempt.releases]


def _signed(run, marker):
    """The marker as somebody inside the release step could sign it."""
    body = {key: value for key, value in marker.items() if key != "signature"}
    return sign_document(body, Signer.load_or_create(run.keys, "release"))


def _genuine(run):
    return json.loads((run.root / "releases" / MARKER).read_text())


@pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "signed"])
def test_marker_without_a_bundle_of_ours_is_refused_and_recorded_nowhere(
    allowed_run, released_run, tmp_path, signed
):
    run = honest_run.copy_of(allowed_run, tmp_path / "run")
    marker = _genuine(released_run)
    path = _plant(run, _signed(run, marker) if signed else marker)
    with pytest.raises(Refused, match="remove the marker"):
        run.do_release()
    assert _releases(run) == []
    assert not (run.root / "release.json").exists()
    path.unlink()
    assert run.do_release()["uri"] == run.bundle.as_posix()
    assert run.problems() == []


def test_marker_that_is_not_the_manifest_of_its_bundle_is_refused(released_run):
    """Else an older signed bundle behind it would be verified under the newer one's name."""
    genuine = parse(encode(_genuine(released_run)), ReleaseManifest, MARKER)
    found = parts.Located("s3://releases/glyphs/1.0/tree", genuine)
    parts.check_marker(found, genuine)
    changed = {**_genuine(released_run), "sizes": {"backbone.keras": 1}}
    other = parse(encode(_signed(released_run, changed)), ReleaseManifest, MARKER)
    with pytest.raises(SignatureInvalid, match="belongs to another bundle"):
        parts.check_marker(found, other)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("preprocessing.py", "print('here')\n"),  # users of a bundle execute it
        ("README.md", "Independently audited.\n"),
        ("privacy_report.html", "<p>epsilon 0.1</p>"),
        ("lineage.jsonl", "{}\n"),
        ("config.json", " "),
    ],
)
def test_changed_bundle_file_that_was_signed_again_is_refused(released_run, tmp_path, name, more):
    run = honest_run.copy_of(released_run, tmp_path / "run")
    (run.bundle / name).write_text((run.bundle / name).read_text() + more)
    seal_again(run.bundle, run.keys, run.ledger())
    assert f"{name} is not what this version of fedemb makes" in " ".join(run.problems())


@pytest.mark.parametrize("signed", [False, True], ids=["theirs", "ours"])
def test_marker_of_a_foreign_bundle_is_refused(allowed_run, tmp_path, signed):
    """A whole bundle of the same name, model and run, signed by keys of another policy owner."""
    run = honest_run.copy_of(allowed_run, tmp_path / "run")
    stranger = honest_run.start(tmp_path / "stranger")
    shutil.copytree(run.model, stranger.model)
    stranger.until_gate().do_gate()
    stranger.do_release()
    shutil.copytree(stranger.root / "releases", run.root / "releases")
    if signed:
        _plant(run, _signed(run, _genuine(run)))
    with pytest.raises(Refused, match="does not match a signed bundle"):
        run.do_release()
    assert _releases(run) == []


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("files", {"privacy_report.json": "a" * 64}, "does not match a signed bundle"),
        ("files", {"backbone.keras": "b" * 64}, "with another model"),
        ("name", "other", "with another model"),
        ("run_id", "tuesday", "with another model"),
        ("attempt", 2, "with another model"),
    ],
)
def test_changed_marker_of_a_genuine_bundle_is_refused(released_run, tmp_path, field, value, said):
    run = honest_run.copy_of(released_run, tmp_path / "run")
    genuine = _genuine(released_run)
    (run.root / "release.json").unlink()
    before = _releases(run)
    run.do_release()  # reused as it is
    assert _releases(run) == before
    bent = {**genuine, field: {**genuine["files"], **value} if field == "files" else value}
    for planted in (bent, _signed(run, bent)):
        _plant(run, planted)
        with pytest.raises(Refused, match=said):
            run.do_release()
    assert _releases(run) == before


@pytest.mark.parametrize("name", ["model.json", "rounds.jsonl", "backbone.keras"])
def test_file_that_changes_after_it_was_judged_is_not_published(
    allowed_run, tmp_path, monkeypatch, name
):
    """The artifacts are read twice: to judge them, and to copy them."""
    run, judged = honest_run.copy_of(allowed_run, tmp_path / "run"), release_model._allowed

    def then_changed(*evidence):
        verdict = judged(*evidence)
        path = run.model / name
        path.write_bytes(path.read_bytes() + b" ")
        return verdict

    monkeypatch.setattr(release_model, "_allowed", then_changed)
    with pytest.raises(Refused, match=f"{name} changed after the gate read it"):
        run.do_release()
    assert _releases(run) == []
    assert not list((run.root / "releases").rglob("*.json"))


def test_release_under_a_policy_with_a_rollback_anchor_verifies(tmp_path):
    """A bundle has no address of the anchor; the policy's terms have its digest."""
    run = honest_run.start(
        tmp_path / "run", **{"storage.rollback_anchor": str(tmp_path / "anchor")}
    )
    run.until_release()
    assert run.problems() == []
