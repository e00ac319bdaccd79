"""audit_privacy over a finished run: what is public, what stays private, what the words say."""

import io
import shutil

import pyarrow.parquet as pq
import pytest
from evaluation_run import FinishedRun, config, write_users

from fedemb.documents.artifacts import parse_json, read_json
from fedemb.documents.evidence import read_document
from fedemb.errors import ArtifactError
from fedemb.reports.audit_words import audit_sentence
from fedemb.steps.audit_privacy import audit
from fedemb.steps.audit_privacy.audit import SCHEMA, run


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished.root, tmp_path / "run")
    return FinishedRun(tmp_path / "run")


def figures_of(run_):
    return parse_json((run_.private / "audit" / "audit.json").read_bytes(), SCHEMA, "audit.json")


def test_a_release_publishes_no_figure_computed_from_training_users(copied, tmp_path):
    report = run(copied.context(config(), tmp_path))
    assert report["level"] == "monitoring"
    assert report["figures"] == "private"
    for name in ("auroc", "tpr_at_fpr", "finding", "calibrated", "measured"):
        assert report[name] is None
    written = read_document(tmp_path / "report.json", "audit").body
    assert (written["lower_bound"], written["code_sha"]) == (None, report["code_sha"])
    assert report["self_test"]["passed"]
    page = (tmp_path / "report.html").read_text()
    private = figures_of(copied)
    assert f"{private['auroc']['value']:.3f}" not in page.split("Self-test")[0]
    assert "stay in the private root" in page
    assert "What it cannot show" in page


def test_the_private_root_holds_scores_figures_and_a_page(copied, tmp_path):
    run(copied.context(config(), tmp_path))
    private = figures_of(copied)
    assert 0 <= private["auroc"]["low"] <= private["auroc"]["high"] <= 1
    assert "Not differentially private" in (copied.private / "audit" / "audit.html").read_text()
    table = pq.read_table(io.BytesIO((copied.private / "audit" / "scores.parquet").read_bytes()))
    assert table.column_names == ["user_key", "member", "score", "score_before_training"]
    assert sum(table["member"].to_pylist()) == 40  # all training users of the made run
    assert len(table) == 40 + 60  # held-out users are capped by audit.max_users


def test_a_simulation_shows_its_figures(copied, tmp_path):
    report = run(copied.context(config(purpose="simulation"), tmp_path))
    assert report["figures"] == "open"
    assert read_document(tmp_path / "report.json", "audit").body == report
    assert report["auroc"]["low"] <= report["auroc"]["high"]
    assert "Monitoring only, no bound on epsilon" in report["sentence"]
    assert read_json(tmp_path / "report.json", SCHEMA)["auroc"] == report["auroc"]


def test_a_model_that_memorised_its_users_is_found(copied, tmp_path, monkeypatch):
    def remembers(backbones, images, settings):
        """Training maps every image of a training user to one point, and does nothing else."""
        before = honest(backbones, images, settings)[1]
        after = before.reshape(-1, 4, before.shape[1]).mean(1).repeat(4, 0)
        remembers.side += 1
        return [after if remembers.side == 1 else before, before]

    remembers.side = 0
    honest = audit._embed
    monkeypatch.setattr(audit, "_embed", remembers)
    report = run(copied.context(config(purpose="simulation"), tmp_path))
    assert report["calibrated"]["finding"] == "leak"
    assert "better than by chance" in report["sentence"]


def test_too_few_users_are_said_privately_and_do_not_fail_the_run(copied, tmp_path):
    shutil.rmtree(copied.private / "users")
    write_users(copied.private / "users", 3)
    public = run(copied.context(config(), tmp_path))
    assert public["measured"] is None
    assert figures_of(copied)["measured"] is False
    assert "too few users" in figures_of(copied)["sentence"]


def test_the_public_report_does_not_tell_how_many_users_trained(copied, tmp_path):
    one = run(copied.context(config(), tmp_path))
    shutil.rmtree(copied.private / "users")
    write_users(copied.private / "users", 3)
    assert run(copied.context(config(), tmp_path)) == one


def test_model_of_another_run_is_refused(copied, tmp_path):
    with pytest.raises(ArtifactError, match="another run"):
        run(copied.context(config(), tmp_path, run_id="run-2"))


def found(finding, calibrated, **more):
    estimate = {"value": 0.5, "low": 0.4, "high": 0.6}
    return {
        "self_test": {"passed": True, "cases": {}},
        "figures": "open",
        "measured": True,
        "auroc": estimate,
        "finding": finding,
        "calibrated": {"auroc": estimate, "finding": calibrated},
        "split_by_value": False,
        **more,
    }


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (found("leak", "leak"), "better than by chance"),
        (found("leak", "leak", split_by_value=True), "another population"),
        (found("nothing", "reversed"), "LOWER"),
        (found("leak", "nothing"), "so they did before private training"),
        (found("nothing", "nothing"), "does not tell"),
        (
            found("leak", "leak")
            | {"self_test": {"passed": False, "cases": {"no_leak": {"passed": False}}}},
            "failed its own test (no_leak)",
        ),
    ],
)
def test_sentence_fits_the_finding(report, words):
    assert words in audit_sentence(report)
