"""audit_privacy over a finished run: what is public, what stays private, what the text says."""

import io
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from fedemb.data.client_data import UserStore
from fedemb.documents.audit import AuditReport, finding
from fedemb.documents.model import ModelCard
from fedemb.errors import ArtifactError
from fedemb.foundation.canonical_json import file_digest
from fedemb.foundation.document import parse, read
from fedemb.models.backbone_files import load_backbone
from fedemb.reports.measured_words import audit_sentence
from fedemb.steps import audit_privacy
from fedemb.steps.audit_privacy import run
from tests.kit.pipeline_runs import honest_run
from tests.kit.pipeline_runs.evaluation_run import FinishedRun, config, teach
from tests.kit.verified_folder import as_committed


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished.root, tmp_path / "run")
    return FinishedRun(tmp_path / "run")


def figures_of(run_):
    data = (run_.private / "audit" / "audit.json").read_bytes()
    return parse(data, AuditReport, "audit.json").body


def test_a_release_publishes_no_figure_computed_from_training_users(copied, tmp_path):
    report = run(copied.context(config(), tmp_path))
    assert report["level"] == "monitoring"
    assert report["figures"] == "private"
    assert report["measured"] is None
    written = read(tmp_path / "report.json", AuditReport).body
    assert written.code_sha == report["code_sha"]
    assert written.self_test.failed == ()
    page = (tmp_path / "report.html").read_text()
    private = figures_of(copied)
    assert f"{private.measured.plain.auroc.value:.3f}" not in page.split("Self-test")[0]
    assert "stay in the private root" in page
    assert "What it cannot show" in page


def test_the_private_root_holds_scores_figures_and_a_page(copied, tmp_path):
    run(copied.context(config(), tmp_path))
    private = figures_of(copied)
    assert 0 <= private.measured.plain.auroc.low <= private.measured.plain.auroc.high <= 1
    assert "Not differentially private" in (copied.private / "audit" / "audit.html").read_text()
    table = pq.read_table(io.BytesIO((copied.private / "audit" / "scores.parquet").read_bytes()))
    assert table.column_names == ["user_key", "member", "score", "score_before_training"]
    assert sum(table["member"].to_pylist()) == 40  # all training users of the made run
    assert len(table) == 40 + 60  # held-out users are capped by audit.max_users


def test_a_simulation_shows_its_figures(copied, tmp_path):
    report = run(copied.context(config(purpose="simulation"), tmp_path))
    assert report["figures"] == "open"
    written = read(tmp_path / "report.json", AuditReport)
    assert written.json == report
    assert "Monitoring only, no bound on epsilon" in audit_sentence(written.body)
    assert report["measured"]["plain"]["auroc"]["low"] <= written.body.measured.plain.auroc.high


@pytest.mark.long
def test_a_model_that_memorised_its_users_is_found(copied, tmp_path):
    """Trained on its users' few images, again and again, with no noise."""
    backbone = load_backbone(copied.root / "pretrained" / "backbone.keras", config().model)
    store = UserStore(as_committed(copied.private / "users"))
    images, _, owners = audit_privacy._images(store, np.arange(40))
    teach(backbone, images, owners, np.random.default_rng(3), steps=200)
    backbone.save(copied.root / "model" / "backbone.keras")
    card = read(copied.root / "model" / "model.json", ModelCard).body
    weights_sha = file_digest(copied.root / "model" / "backbone.keras")
    copied.sign(
        copied.root / "model" / "model.json", card.model_copy(update={"weights_sha": weights_sha})
    )
    run(copied.context(config(purpose="simulation"), tmp_path))
    report = read(tmp_path / "report.json", AuditReport).body
    assert finding(report.measured.plain.auroc) == "leak"
    assert finding(report.measured.calibrated.auroc) == "leak"
    assert "better than by chance" in audit_sentence(report)


def test_too_few_users_are_said_privately_and_do_not_fail_the_run(copied, tmp_path):
    copied.replace("users", 3)
    public = run(copied.context(config(), tmp_path))
    assert public["measured"] is None
    assert figures_of(copied).measured is None
    assert "too few users" in audit_sentence(figures_of(copied))


@pytest.mark.parametrize("scale", [np.nan, 1e38])
def test_of_a_model_that_diverged_nothing_private_ends_the_run_or_is_told(copied, tmp_path, scale):
    """Whether the audit fails, and with which counts, would be for training images to say."""
    backbone = load_backbone(copied.root / "model" / "backbone.keras", config().model)
    backbone.set_weights([weight * scale for weight in backbone.get_weights()])
    backbone.save(copied.root / "model" / "backbone.keras")
    card = read(copied.root / "model" / "model.json", ModelCard).body
    weights_sha = file_digest(copied.root / "model" / "backbone.keras")
    copied.sign(
        copied.root / "model" / "model.json", card.model_copy(update={"weights_sha": weights_sha})
    )
    assert run(copied.context(config(), tmp_path))["measured"] is None
    assert figures_of(copied).measured is None
    assert "not finite" in audit_sentence(figures_of(copied))


def test_the_public_report_does_not_tell_how_many_users_trained(copied, tmp_path):
    one = run(copied.context(config(), tmp_path))
    copied.replace("users", 3)
    other = run(copied.context(config(), tmp_path))
    assert {**other, "signature": None} == {**one, "signature": None}


def test_model_of_another_run_is_refused(copied, tmp_path):
    copied.reserve(config(purpose="simulation"), "run-2")  # charged to no one
    with pytest.raises(ArtifactError, match="another run"):
        run(copied.context(config(), tmp_path, run_id="run-2"))


AUROC = {
    "leak": {"value": 0.7, "low": 0.6, "high": 0.8},
    "reversed": {"value": 0.3, "low": 0.2, "high": 0.4},
    "nothing": {"value": 0.5, "low": 0.4, "high": 0.6},
}


def found(plain, calibrated, **more):
    measured = {
        name: {"auroc": AUROC[which], "tpr_at_fpr": {}}
        for name, which in (("plain", plain), ("calibrated", calibrated))
    }
    fields = {
        **dict.fromkeys(("config_sha", "model_sha", "code_sha"), "0" * 64),
        "run_id": "run-1",
        "level": "monitoring",
        "attack": "verification_score",
        "unit": "user",
        "self_test": honest_run.SELF_TEST,
        "figures": "open",
        "split_by_value": False,
        "users_at_most": 60,
        "bootstrap_samples": 40,
        "measured": measured,
        "mechanism": None,
    }
    return AuditReport.of_fields({**fields, **more})
