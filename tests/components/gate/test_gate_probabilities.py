"""The gate denies a classifier with useless probabilities, or with a gain measured on too few."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from fedemb.documents.utility import ClassifierReport
from fedemb.evaluation.classification import measure_classifiers
from fedemb.evaluation.held_out import Subjects
from fedemb.foundation.document import Part
from fedemb.release.decide import RULES
from tests.kit.document_kinds import all_documents, json_schema

CLASSES = ("ant", "bee", "cat")


def report(chance_of_right: float, share_right: float) -> ClassifierReport:
    """A measured classifier that gives its first class the probability `chance_of_right`."""
    random = np.random.default_rng(3)
    labels = random.integers(0, 3, 300)
    first = np.where(random.random(300) < share_right, labels, (labels + 1) % 3)
    own = np.full((300, 3), (1 - chance_of_right) / 2)
    own[np.arange(300), first] = chance_of_right
    even = np.full((300, 3), 1 / 3)
    users = np.arange(300, dtype=np.uint64)
    subjects = Subjects(labels=labels, users=users, subgroups=np.full(300, "all"))
    tables = {"model": own, "public_backbone": even}
    measured = measure_classifiers(tables, subjects, CLASSES, samples=50, grouped=False)
    nothing = dict.fromkeys(("centralized", "previous_release"))
    fields = {
        "run_id": "monday",
        "config_sha": "0" * 64,
        "model_sha": "0" * 64,
        "simulation": False,
        "public_kind": "none",
        "head_images": 0,
        "bootstrap_samples": 50,
        "unit": "user",
        "classes": 3,
        **nothing,
        **measured,
    }
    return ClassifierReport.of_fields(fields)


def reasons(body: object, code: str = "log_loss_above_baseline", least: float | None = 0.0):
    """Codes of one rule, where it applies and denies."""
    config = SimpleNamespace(release=SimpleNamespace(min_gain_over_public=least))
    case = SimpleNamespace(utility=body, config=config)
    (rule,) = (rule for rule in RULES if rule.code == code)
    return [code for _ in rule.check(case)] if rule.applies(case) else []


def test_classifier_with_informative_probabilities_passes():
    assert reasons(report(0.7, 0.7)) == []


def test_overconfident_classifier_is_denied():
    """Accuracy is 70 % in both cases, and the gain over the baselines is the same."""
    certain = report(1 - 1e-9, 0.7)
    assert certain.gain.low > 0
    assert reasons(certain) == ["log_loss_above_baseline"]
    worse = certain.public_backbone.model_copy(update={"log_loss": certain.model.log_loss})
    of_worse_than_chance = certain.model_copy(update={"public_backbone": worse})
    assert reasons(of_worse_than_chance) == ["log_loss_above_baseline"]


def test_missing_baseline_denies():
    nothing = dict.fromkeys(("public_backbone", "most_frequent"))
    assert reasons(report(0.7, 0.7).model_copy(update=nothing)) == ["log_loss_above_baseline"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_log_loss_denies(value, monkeypatch):
    body = report(0.7, 0.7)
    broken = SimpleNamespace(value=value, low=value, high=value)
    monkeypatch.setattr(
        ClassifierReport,
        "log_loss",
        lambda self, name: broken if name == "model" else self.public_backbone.log_loss,
    )
    assert reasons(body) == ["log_loss_above_baseline"]


@pytest.mark.parametrize(("units", "denied"), [(1, True), (5, True), (6, False), (300, False)])
def test_gain_measured_on_fewer_than_six_units_is_denied(units, denied):
    """An interval resampled from five units is too narrow to mean anything."""
    good = report(0.7, 0.7).model_copy(update={"units": units})
    assert good.gain.low > 0
    assert reasons(good, "no_gain_over_public") == (["no_gain_over_public"] if denied else [])


def test_gain_below_its_floor_is_denied_unless_no_floor_is_set():
    good = report(0.7, 0.7)
    assert reasons(good, "no_gain_over_public", least=good.gain.low) == ["no_gain_over_public"]
    assert reasons(good, "no_gain_over_public", least=None) == []


# ---- Documents that a run writes are of the JSON schemas of their kinds ----


KINDS = {document.kind: document for document in all_documents()}


def test_document_fields_have_no_defaults():
    with pytest.raises(TypeError, match=r"Loose\.more has a default"):
        type("Loose", (Part,), {"__annotations__": {"more": int}, "more": 0})


def test_documents_of_a_run_match_their_json_schemas(allowed_run):
    names = ("plan", "reservation", "users", "audit", "utility", "report", "verdict")
    paths = [getattr(allowed_run, name) for name in names]
    found = set()
    for path in (*paths, allowed_run.model / "model.json"):
        document = json.loads(path.read_text())
        kind = document["schema"].split("/")[1]
        Draft202012Validator(json_schema(KINDS[kind])).validate(document)
        found.add(kind)
    assert len(found) == 8
