"""The planted-bug suite may be missing for a throw-away policy on generated images, only there."""

import dataclasses
import json

import pytest

from fedemb.config import BuiltinData
from fedemb.data.glyphs import is_builtin_content, write_builtin
from fedemb.documents.evidence import read_evidence
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.errors import ArtifactError, Refused
from fedemb.foundation.document import read
from fedemb.gate.decide import decide
from fedemb.runtime import planted_bug_suite
from fedemb.runtime.builtin_address import builtin_files
from fedemb.runtime.planted_bug_suite import is_throw_away
from tests.kit.pipeline_runs import honest_run

BUILTIN = BuiltinData(users=100, images_per_user=2, public_classes=20, public_images_per_class=2)
SIZE = honest_run.config().model.image_size


def codes(run):
    """Reason codes of the verdict on a run."""
    evidence = read_evidence(run.config, run.artifacts)
    verdict = decide(evidence, read(run.report, PrivacyReport), run.ledger())
    return [reason.code for reason in verdict.reasons]


def reserved(run):
    """Records of reservations in the ledger's folder."""
    records = (run.policy_root / "ledger").rglob("*.json")
    return [path for path in records if "blocks_requested" in path.read_text()]


@pytest.fixture
def never_run(tmp_path, monkeypatch):
    """The suite was not run on this code."""
    monkeypatch.setattr(planted_bug_suite, "RECORD", tmp_path / "no_record.json")


@pytest.fixture
def throw_away(tmp_path):
    """A run that reads generated images and whose ledger serves this run only."""
    private, public = builtin_files(BUILTIN, SIZE, tmp_path)
    write_builtin(BUILTIN, SIZE, private, public)
    run = honest_run.start(tmp_path / "run")
    changes = {"data.source.uri": str(private), "data.builtin": BUILTIN.model_dump()}
    return dataclasses.replace(run, config=run.config.updated(changes))


@pytest.mark.usefixtures("never_run")
def test_generated_images_are_released_without_the_suite_and_report_and_release_say_so(throw_away):
    run = throw_away.until_gate()
    assert codes(run) == []
    assert json.loads(run.report.read_text())["audit"]["planted_bug_suite"]["total"] == 0
    assert "not run: throw-away policy on generated images" in run.page.read_text()
    run.do_gate()
    run.do_release()
    card = (run.root / "releases" / "glyphs" / "1.0" / "README.md").read_text()
    assert "Planted-bug suite: not run" in card
    assert run.problems() == []


@pytest.mark.usefixtures("never_run")
@pytest.mark.parametrize("purpose", ["release", "simulation"])
def test_images_that_differ_from_the_generated_ones_need_the_suite(throw_away, purpose):
    config = throw_away.config.updated({"purpose": purpose})
    private, public = builtin_files(BUILTIN, SIZE, throw_away.root.parent)
    other = BUILTIN.model_copy(update={"seed": 1})
    private.unlink()
    public.unlink()
    write_builtin(other, SIZE, private, public)
    run = dataclasses.replace(throw_away, config=config)
    run.do_plan()
    with pytest.raises(Refused, match="differs from the images that fedemb generates"):
        run.do_reserve()
    assert not reserved(run)


@pytest.mark.usefixtures("never_run")
@pytest.mark.parametrize(
    "change",
    [
        {"data.source.uri": "photos/private.parquet"},
        {"storage.ledger": "policy/ledger"},
        {"data.builtin.seed": 5},
        {"data.source.uri": "gs://bucket/private.parquet"},
    ],
    ids=["own images", "lasting policy", "other settings", "bucket"],
)
def test_own_images_and_lasting_policies_need_the_suite(throw_away, change):
    assert is_throw_away(throw_away.config)
    run = dataclasses.replace(throw_away, config=throw_away.config.updated(change))
    assert not is_throw_away(run.config)
    run.do_plan()
    with pytest.raises(ArtifactError, match="suite was not run"):
        run.do_reserve()
    assert not reserved(run)


@pytest.mark.usefixtures("never_run")
@pytest.mark.planted_bug(19)
def test_gate_denies_a_second_run_of_the_policy_without_the_suite(throw_away):
    first = throw_away.until_gate()
    assert codes(first) == []
    config = first.config.updated({"mechanism.rounds": 1})
    second = honest_run.start(
        throw_away.root.parent / "second", "second", policy_root=first.policy_root
    )
    dataclasses.replace(second, config=config).until_gate()
    assert "planted_bugs_missed" in codes(dataclasses.replace(second, config=config))


@pytest.mark.planted_bug(19)
def test_gate_denies_a_throw_away_run_whose_suite_failed(throw_away):
    run = throw_away.until_gate()
    record = json.loads(run.audit.read_text())["planted_bug_suite"]
    run.rewrite(run.audit, planted_bug_suite={**record, "passed": record["total"] - 1})
    run.do_account()
    assert "planted_bugs_missed" in codes(run)


@pytest.mark.planted_bug(19)
def test_gate_denies_own_images_without_the_suite(tmp_path):
    run = honest_run.start(tmp_path).until_gate()
    record = json.loads(run.audit.read_text())["planted_bug_suite"]
    run.rewrite(run.audit, planted_bug_suite={**record, "passed": 0, "total": 0})
    run.do_account()
    assert "planted_bugs_missed" in codes(run)


def test_content_is_compared_with_the_generated_images(tmp_path):
    private, public = builtin_files(BUILTIN, 28, tmp_path)
    write_builtin(BUILTIN, 28, private, public)
    assert is_builtin_content(private, BUILTIN, 28)
    assert not is_builtin_content(public, BUILTIN, 28)
    assert not is_builtin_content(tmp_path / "missing.parquet", BUILTIN, 28)
