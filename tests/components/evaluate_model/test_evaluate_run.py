"""evaluate_model over a finished run: report, page, comparisons, bad input."""

import json
import shutil
import time

import numpy as np
import pytest

from fedemb.documents.fields import Interval
from fedemb.documents.utility import UtilityReport
from fedemb.errors import ArtifactError, LedgerError, Refused, SignatureInvalid
from fedemb.evaluation.held_out import Subjects
from fedemb.foundation.document import read
from fedemb.ledger import Ledger
from fedemb.reports.utility_text import compared, utility_sentence, utility_sentences
from fedemb.steps import evaluate_model
from fedemb.steps.evaluate_model import run
from tests.kit.cli import fedemb
from tests.kit.pipeline_runs.evaluation_run import FinishedRun, config
from tests.kit.sealed_bundle import seal

SUBGROUPS = {"data.source.columns.subgroup": "group"}


@pytest.fixture(scope="module")
def report(finished, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    before = seal(
        finished.context(config()),
        finished.root / "pretrained" / "backbone.keras",
        folder / "before",
    )
    settings = config(**SUBGROUPS, **{"evaluation.previous_release": before})
    returned = run(finished.context(settings, folder)).json
    written = read(folder / "report.json", UtilityReport)  # in the form that the gate requires
    return returned, written.json, (folder / "report.html").read_text()


def said(path):
    """Returns the text of a report."""
    report = read(path, UtilityReport).body
    assert len(utility_sentences(report)[0].split()) <= 25
    return utility_sentence(report)


def test_trained_model_beats_the_imported_backbone_in_the_report(report):
    _, document, _ = report
    assert document["public_backbone"]["difference"]["0.001"]["low"] > 0
    for name in ("public_backbone", "raw_pixels"):
        assert document[name]["recall_at_far"].keys() == document["recall_at_far"].keys()
    assert document["untrained"] is None
    assert document["centralized"] is None
    assert document["utility_drop"] is None


def test_compatibility_with_an_old_gallery_is_measured(report):
    previous = report[1]["previous_release"]
    assert previous["old"]["recall_at_far"] == report[1]["public_backbone"]["recall_at_far"]
    crossed = previous["new_against_old"]["recall_at_far"]["0.001"]["value"]
    assert crossed < report[1]["recall_at_far"]["0.001"]["value"]
    assert previous["old_embedding_space_id"] != report[1]["embedding_space_id"]


def test_evaluation_is_recorded_before_users_are_read(finished, tmp_path, monkeypatch):
    context = finished.context(config(), tmp_path)
    before = len(context.ledger.state.evaluations)
    run(context)
    evaluations = context.ledger.state.evaluations
    assert len(evaluations) == before + 1
    written = json.loads((tmp_path / "report.json").read_text())
    assert evaluations[-1].body["model_sha"] == written["model_sha"]

    def refuse(*_):
        raise Refused("the ledger is full")

    monkeypatch.setattr(Ledger, "record_evaluation", refuse)
    monkeypatch.setattr(evaluate_model, "UserStore", lambda _: pytest.fail("people were read"))
    with pytest.raises(Refused):
        run(finished.context(config(), tmp_path))


@pytest.mark.long
def test_repeated_evaluation_writes_an_identical_report_and_page(finished, tmp_path):
    settings = config(**{"evaluation.max_images": 60})
    one, other = tmp_path / "a", tmp_path / "b"
    for folder in (one, other):
        folder.mkdir()
        run(finished.context(settings, folder))
    for name in ("report.json", "report.html"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    assert read(one / "report.json", UtilityReport).body.evaluated.images == 60


def test_evaluation_record_deleted_from_the_ledger_is_detected(copied, tmp_path):
    """Otherwise a writer of the ledger could publish the best of several evaluations as the one."""
    context = copied.context(config(), tmp_path)
    run(context)
    for path in copied.root.glob(f"ledger/**/{context.ledger.head.sequence:08d}.json"):
        path.unlink()
    with pytest.raises(LedgerError, match="records of kind bind, evaluation"):
        fedemb("ledger", "verify", "--ledger", context.ledger_uri, "--keys", context.keys_uri)
    time.sleep(1)  # in the same second, the same evaluation of the same model is the same record
    with pytest.raises(LedgerError, match="was rewritten"):
        run(copied.context(config(), tmp_path))


@pytest.mark.parametrize("users", [0, 1])
def test_too_few_held_out_users_give_a_report_without_figures(copied, tmp_path, users):
    copied.replace("evaluation", users)
    report = run(copied.context(config(), tmp_path)).json
    assert report["evaluated"] is None
    assert report["recall_at_far"] == {}
    assert "held-out users must include" in said(tmp_path / "report.json")
    assert said(tmp_path / "report.json") in (tmp_path / "report.html").read_text()


def test_model_of_another_run_is_refused(copied, tmp_path):
    copied.reserve(config(purpose="simulation"), "run-2")  # charged to no one
    with pytest.raises(ArtifactError, match="another run"):
        run(copied.context(config(), tmp_path, run_id="run-2"))


@pytest.mark.long
def test_previous_release_of_another_shape_is_reported_not_raised(copied, tmp_path, caplog):
    from fedemb.models.backbones import build_backbone

    other = config().model.model_copy(update={"embedding_dim": 8})
    build_backbone(other, seed=0).save(tmp_path / "other.keras")
    bundle = seal(copied.context(config()), tmp_path / "other.keras", tmp_path / "bundle")
    settings = config(**{"evaluation.previous_release": bundle})
    report = run(copied.context(settings, tmp_path)).json
    assert read(tmp_path / "report.json", UtilityReport).json == report
    assert report["previous_release"]["old"] is None
    assert "embedding_dim" in caplog.text


def _model_exchanged(copied, bundle):
    shutil.copy(copied.root / "model" / "backbone.keras", bundle / "backbone.keras")


def _unsigned_folder(copied, bundle):
    shutil.rmtree(bundle)
    shutil.copytree(copied.root / "pretrained", bundle)


def _sealed_by_another(copied, bundle):
    """All is in order, under the keys of somebody else."""
    shutil.rmtree(bundle)
    stranger = FinishedRun(bundle.parent / "stranger")
    shutil.copytree(copied.private, stranger.private)
    stranger.reserve(config(), "run-1")
    seal(stranger.context(config()), copied.root / "pretrained" / "backbone.keras", bundle)


@pytest.mark.parametrize("attack", [_model_exchanged, _unsigned_folder, _sealed_by_another])
def test_previous_release_without_a_valid_signature_is_not_loaded(
    copied, tmp_path, monkeypatch, attack
):
    """No held-out user is evaluated for it: the ledger has no evaluation."""
    start = copied.root / "pretrained" / "backbone.keras"
    bundle = seal(copied.context(config()), start, tmp_path / "bundle")
    attack(copied, tmp_path / "bundle")
    settings = config(**{"evaluation.previous_release": bundle})
    monkeypatch.setattr(evaluate_model, "load_backbone", lambda *_: pytest.fail("was loaded"))
    evaluations = len(copied.context(settings).ledger.chain.records)
    with pytest.raises(SignatureInvalid, match=r"previous_release .* is not a release"):
        run(copied.context(settings, tmp_path))
    assert len(copied.context(settings).ledger.chain.records) == evaluations


@pytest.mark.long
def test_a_simulation_prints_the_utility_drop(finished, tmp_path):
    settings = config(
        **{
            "purpose": "simulation",
            "evaluation.centralized_baseline": True,
            "evaluation.centralized_epochs": 2,
        }
    )
    report = run(finished.context(settings, tmp_path)).json
    drop = report["utility_drop"]["0.001"]
    central, own = (part["recall_at_far"]["0.001"] for part in (report["centralized"], report))
    assert drop["value"] == pytest.approx(central["value"] - own["value"], abs=1e-5)
    assert "central training without privacy" in said(tmp_path / "report.json")


# ---- The sentences of the utility report say no more than the intervals allow ----


def estimate(value, low, high):
    return Interval(value=value, low=low, high=high)


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        (estimate(0.1, 0.05, 0.15), "10.0 points [5.0, 15.0] more than x"),
        (estimate(-0.1, -0.15, -0.05), "10.0 points [5.0, 15.0] less than x"),
        (estimate(0.01, -0.02, 0.05), "not distinguishable from x (+1.0 points [-2.0, +5.0])"),
        (estimate(0.0, 0.0, 0.0), "not distinguishable from x (+0.0 points [+0.0, +0.0])"),
    ],
)
def test_only_an_interval_without_zero_is_called_a_difference(difference, words):
    assert compared(difference, "x") == words


def test_subgroups_are_resampled_only_if_no_identity_is_in_two():
    def groups(*names):
        labels = np.array([1, 1, 2, 3], np.int64)
        return Subjects(labels, labels.astype(np.uint64), np.array(names)).groups

    assert list(groups("a", "a", "b", "b")) == ["a", "a", "b", "b"]
    assert groups("a", "b", "b", "b") is None
    assert groups("a", "a", "a", "a") is None


def subjects(labels, users):
    names = np.array([""] * len(labels))
    return Subjects(np.array(labels, np.int64), np.array(users, np.uint64), names)


def test_users_are_resampled_unless_they_share_classes():
    assert subjects([1, 1, 2, 3], [7, 7, 8, 8]).identity_kind == "user"
    assert subjects([1, 1, 2, 1], [7, 7, 8, 8]).identity_kind == "class"
