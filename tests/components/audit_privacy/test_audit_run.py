"""audit_privacy over a finished run: what is public, what stays private, what the text says."""

import io

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedemb.data.client_data import UserStore, VerifiedFolder
from fedemb.documents.audit import AuditReport, finding
from fedemb.documents.model import ModelCard
from fedemb.errors import ArtifactError, InputError
from fedemb.evaluation.membership import (
    AttackResult,
    ConfidenceScore,
    VerificationScore,
    attack,
    self_test,
    verification_scores,
)
from fedemb.evaluation.pairs import Estimate
from fedemb.foundation.canonical_json import file_digest
from fedemb.foundation.document import parse, read
from fedemb.models.backbone_files import load_backbone
from fedemb.reports.utility_text import audit_sentence
from fedemb.steps import audit_privacy, evaluate_model
from fedemb.steps.audit_privacy import run
from tests.kit.pipeline_runs.evaluation_run import config, teach
from tests.kit.verified import without_digests


def _put(copied, backbone):
    """Another model, as its trainer would sign it."""
    card, path = copied.root / "model" / "model.json", copied.root / "model" / "backbone.keras"
    backbone.save(path)
    update = {"weights_sha": file_digest(path)}
    copied.sign(card, read(card, ModelCard).body.model_copy(update=update))


def figures_of(run_):
    data = (run_.private / "audit" / "audit.json").read_bytes()
    return parse(data, AuditReport, "audit.json").body


def test_a_release_publishes_no_figure_computed_from_training_users(copied, tmp_path):
    report = run(copied.context(config(), tmp_path))
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


@pytest.mark.long
@pytest.mark.parametrize("step", [audit_privacy, evaluate_model], ids=["audit", "evaluation"])
def test_public_bytes_do_not_depend_on_training_users(step, copied, tmp_path, caplog):
    """With the same model; also not on whether there are too few users to audit."""
    made = []
    for users in (3, 39, 40):
        copied.replace("users", users)
        caplog.clear()
        caplog.set_level("INFO", logger="fedemb")
        step.run(copied.context(config(), tmp_path))
        made.append([record.getMessage() for record in caplog.records])
        made[-1] += [without_digests(tmp_path / name) for name in ("report.json", "report.html")]
    assert made[0] == made[1] == made[2]
    assert len(made[0]) > 2


@pytest.mark.long
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
    store = UserStore(VerifiedFolder(copied.private / "users"))
    images, _, owners = audit_privacy._images(store, store.read(np.arange(40)))
    teach(backbone, images, owners, np.random.default_rng(3), steps=200)
    _put(copied, backbone)
    run(copied.context(config(purpose="simulation"), tmp_path))
    report = read(tmp_path / "report.json", AuditReport).body
    assert finding(report.measured.plain.auroc) == "leak"
    assert finding(report.measured.calibrated.auroc) == "leak"
    assert "better than by chance" in audit_sentence(report)


@pytest.mark.long
def test_too_few_users_are_reported_privately_only(copied, tmp_path):
    copied.replace("users", 3)
    public = run(copied.context(config(), tmp_path))
    assert public["measured"] is None
    assert figures_of(copied).measured is None
    assert "too few users" in audit_sentence(figures_of(copied))


@pytest.mark.long
@pytest.mark.parametrize("scale", [np.nan, 1e38])
def test_diverged_model_reveals_no_private_outcome(copied, tmp_path, scale):
    """Whether the audit fails, and with which counts, would be for training images to say."""
    backbone = load_backbone(copied.root / "model" / "backbone.keras", config().model)
    backbone.set_weights([weight * scale for weight in backbone.get_weights()])
    _put(copied, backbone)
    assert run(copied.context(config(), tmp_path))["measured"] is None
    assert figures_of(copied).measured is None
    assert "not finite" in audit_sentence(figures_of(copied))


def test_public_audit_report_does_not_depend_on_the_number_of_users(copied, tmp_path):
    one = run(copied.context(config(), tmp_path))
    copied.replace("users", 3)
    other = run(copied.context(config(), tmp_path))
    assert {**other, "signature": None} == {**one, "signature": None}


def test_model_of_another_run_is_refused(copied, tmp_path):
    copied.reserve(config(purpose="simulation"), "run-2")  # charged to no one
    with pytest.raises(ArtifactError, match="another run"):
        run(copied.context(config(), tmp_path, run_id="run-2"))


# ---- The membership attack, and the auditor that audits itself ----


finite = st.floats(-3, 3, width=16)
side = st.lists(finite, min_size=10, max_size=30).map(np.array)


@settings(max_examples=50, deadline=None)
@given(side, side)
def test_auroc_and_tpr_equal_brute_force(members, others):
    result = attack(members, others, false_positive_rates=(0.1, 0.5), samples=20)
    wins = (members[:, None] > others) + 0.5 * (members[:, None] == others)
    assert result.auroc.value == pytest.approx(wins.mean())
    for rate, estimate in result.tpr_at_fpr.items():
        threshold = np.sort(others)[::-1][int(rate * len(others))]
        assert estimate.value == pytest.approx((members > threshold).mean())
        assert (others > threshold).mean() <= rate


@settings(max_examples=30, deadline=None)
@given(side, side)
def test_a_reversed_score_mirrors_the_auroc_and_is_never_hidden(members, others):
    straight = attack(members, others, samples=20).auroc.value
    assert attack(-members, -others, samples=20).auroc.value == pytest.approx(1 - straight)


def test_verification_scores_equal_their_definition():
    random = np.random.default_rng(0)
    embeddings = VerificationScore().synthetic(random, 12, 4, leak=False)
    owners = np.repeat(np.arange(12), 4)
    scores = verification_scores(embeddings, owners, 12)
    cosines = embeddings @ embeddings.T
    for user in range(12):
        own, rest = owners == user, owners != user
        within = cosines[np.ix_(own, own)]
        mean_within = (within.sum() - np.trace(within)) / (own.sum() * (own.sum() - 1))
        across = cosines[np.ix_(own, rest)].mean()
        assert scores[user] == pytest.approx(mean_within - across, abs=1e-6)


def test_a_user_with_one_image_has_no_score():
    scores = verification_scores(np.eye(3, dtype=np.float32), np.array([0, 0, 1]), 2)
    assert np.isfinite(scores[0])
    assert np.isnan(scores[1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_score_that_is_not_finite_is_an_error(bad):
    scores = np.zeros(20)
    broken = scores.copy()
    broken[3] = bad
    for members, others in ((broken, scores), (scores, broken)):
        with pytest.raises(InputError, match="not finite"):
            attack(members, others, samples=20)


def test_attack_without_non_member_scores_is_an_error():
    with pytest.raises(InputError, match="at least 10"):
        attack(np.zeros(20), np.zeros(0), samples=20)


# ---- the self-test, with broken auditors ---------------------------------------------------------


def broken_always_blind(members, others, **kwargs):
    attack(members, others, **kwargs)
    return AttackResult(Estimate(0.5, np.array([0.4, 0.6]), 50), {})


def broken_always_alarmed(members, others, **kwargs):
    attack(members, others, **kwargs)
    return AttackResult(Estimate(0.9, np.array([0.8, 0.95]), 50), {})


def broken_hides_the_sign(members, others, **kwargs):
    result = attack(members, others, **kwargs)
    estimate = result.auroc
    mirrored = Estimate(
        max(estimate.value, 1 - estimate.value), np.abs(estimate.draws - 0.5) + 0.5, 50
    )
    return AttackResult(mirrored, {})


def broken_fills_missing_scores(members, others, **kwargs):
    filled = np.nan_to_num(members)
    return attack(filled, others if len(others) else filled, **kwargs)


@pytest.mark.parametrize("scoring", [VerificationScore(), ConfidenceScore()])
def test_self_test_passes_and_is_the_same_every_time(scoring):
    result = self_test(scoring)
    assert result.failed == ()
    assert result == self_test(scoring)
    assert abs(result.no_leak.auroc - 0.5) < 0.02


@pytest.mark.planted_bug(20)
@pytest.mark.parametrize(
    ("auditor", "fails"),
    [
        (broken_always_blind, {"planted_leak", "reversed_sign"}),
        (broken_always_alarmed, {"no_leak", "reversed_sign"}),
        (broken_hides_the_sign, {"no_leak", "reversed_sign"}),
        (broken_fills_missing_scores, {"missing_score", "missing_side"}),
    ],
)
@pytest.mark.parametrize("scoring", [VerificationScore(), ConfidenceScore()])
def test_self_test_catches_a_broken_auditor(scoring, auditor, fails):
    result = self_test(scoring, auditor)
    assert set(result.failed) == fails


class DeafScore(ConfidenceScore):
    """Planted: takes the label of the next image."""

    def scores(self, seen, owners, users):
        return super().scores(np.random.default_rng(0).permutation(seen), owners, users)


@pytest.mark.planted_bug(20)
def test_self_test_catches_a_score_that_mixes_up_users():
    assert "planted_leak" in self_test(DeafScore()).failed


# ---- classifiers ---------------------------------------------------------------------------------


def test_confidence_is_the_log_odds_of_the_label_and_finite():
    table, labels = np.array([[0.2, 0.7, 0.1], [1.0, 0.0, 0.0]], np.float32), np.array([1, 0])
    sure, never = (ConfidenceScore().values(table, each) for each in (labels, 1 - labels))
    np.testing.assert_allclose([sure[0], never[0]], np.log([0.7 / 0.3, 0.2 / 0.8]), rtol=1e-6)
    assert 60 < sure[1] == -never[1] < 90


def test_confidence_score_of_a_unit_is_the_mean_over_its_images():
    scores = ConfidenceScore().scores(np.array([1.0, 2.0, 5.0]), np.array([0, 1, 1]), 2)
    assert scores.tolist() == [1.0, 3.5]
