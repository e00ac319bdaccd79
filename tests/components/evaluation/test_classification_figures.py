"""Figures of a classifier against counting by hand."""

import numpy as np
import pytest

from fedemb.config import ModelConfig
from fedemb.documents.utility import ClassifierReport
from fedemb.errors import ArtifactError
from fedemb.evaluation.classification import measure_classifiers
from fedemb.evaluation.held_out import Subjects
from fedemb.models import inference
from fedemb.models.backbones import build_backbone, cut
from fedemb.models.inference import SharedFeatures, classify, embed, raw_pixels
from fedemb.reports.pages import utility_page

CLASSES = tuple("abcdefg")


def _measured(users=40, images=3, grouped=True, names=("x", "y", "")):
    random = np.random.default_rng(0)
    labels = random.integers(0, 6, users * images)  # no one has the last class
    good = random.dirichlet(np.ones(len(CLASSES)), len(labels)).astype(np.float32)
    good[np.arange(len(labels)), labels] += random.random(len(labels)) < 0.5
    good /= good.sum(1, keepdims=True)
    flat = np.full_like(good, 1 / len(CLASSES))
    groups = np.repeat(random.choice(names, users, p=[0.6, 0.3, 0.1]), images)
    owners = np.repeat(np.arange(users, dtype=np.uint64), images)
    tables = {"model": good, "public_backbone": flat}
    subjects = Subjects(labels, owners, groups)
    return measure_classifiers(tables, subjects, CLASSES, samples=50, grouped=grouped), good, labels


@pytest.mark.parametrize("name", ["O'Hare, gate 5", "R&D", "n" * 101, "<b>", "\n"])
def test_subgroup_with_any_name_does_not_break_the_report(name):
    """What data call a group must not decide whether a run that was paid for can end."""
    report = _report(**_measured(names=("x", name, ""))[0])
    assert {part.name for part in report.by_group.shown} < {"x", "subgroup 1", "subgroup 2"}


def _report(**changes):
    fields = {
        "run_id": "run-1",
        "config_sha": "0" * 64,
        "model_sha": "1" * 64,
        "simulation": False,
        "public_kind": "none",
        "head_images": 0,
        "bootstrap_samples": 50,
        "unit": "user",
        "classes": len(CLASSES),
        **dict.fromkeys(("centralized", "previous_release")),
        **_measured()[0],
        **changes,
    }
    return ClassifierReport.of_fields(fields)


def test_top_1_and_top_5_match_a_direct_count_and_ties_count_as_chance():
    found, table, labels = _measured()
    model, start = found["model"], found["public_backbone"]
    order = np.argsort(-table, axis=1)
    assert model["top_1"]["value"] == pytest.approx(np.mean(order[:, 0] == labels), abs=1e-6)
    top_5 = np.mean((order[:, :5] == labels[:, None]).any(1))
    assert model["top_5"]["value"] == pytest.approx(top_5, abs=1e-6)
    assert start["top_1"]["value"] == pytest.approx(1 / 7, abs=1e-6)
    assert start["top_5"]["value"] == pytest.approx(5 / 7, abs=1e-6)
    assert start["difference"]["value"] == pytest.approx(model["top_1"]["value"] - 1 / 7, abs=1e-5)
    assert model["top_1"]["low"] < model["top_1"]["value"] < model["top_1"]["high"]


def test_reliability_bins_match_a_direct_count():
    found, table, labels = _measured()
    confidence, right = table.max(1), table.argmax(1) == labels
    owners = np.repeat(np.arange(40), 3)
    wanted = []
    for low in range(15):
        use = np.minimum(np.floor(confidence * 15), 14) == low
        if len(set(owners[use])) >= 10:
            wanted.append((use.sum(), confidence[use].mean(), right[use].mean()))
    assert 2 <= len(found["reliability"]) == len(wanted) < 15
    for part, (images, sure, share) in zip(found["reliability"], wanted, strict=True):
        assert part["images"] == images
        assert part["confidence"] == pytest.approx(sure, abs=1e-5)
        assert part["accuracy"] == pytest.approx(share, abs=1e-6)


def test_confusion_matrix_matches_a_direct_count_and_merges_small_classes():
    found, table, labels = _measured()
    predicted, confusion = table.argmax(1), found["confusion"]
    assert confusion["classes"] == list("abcdef")  # no image has the class "g"
    for place, row in enumerate(confusion["rows"]):
        own = predicted[labels == place]
        assert row["name"] == CLASSES[place]
        assert row["shares"] == pytest.approx([np.mean(own == i) for i in range(6)], abs=1e-6)
        assert row["others"] == pytest.approx(np.mean(own == 6), abs=1e-6)
    assert any(row["others"] > 0 for row in confusion["rows"])
    text = utility_page(_report())
    assert 'id="confusion"' in text
    assert 'id="confidence"' in text


@pytest.mark.parametrize("change", [{"shares": [1.0] * 5}, {"shares": [0.5] * 6}, {"name": "z"}])
def test_inconsistent_confusion_matrix_is_refused(change):
    confusion = _measured()[0]["confusion"]
    first, *others = confusion["rows"]
    with pytest.raises(ArtifactError):
        _report(confusion={**confusion, "rows": [{**first, **change}, *others]})


def test_calibration_error_of_a_constant_classifier_is_its_accuracy_gap():
    found, _, labels = _measured()
    gap = abs(1 / len(CLASSES) - np.mean(labels == 0))
    assert found["public_backbone"]["calibration_error"] == pytest.approx(gap, abs=1e-6)


def test_small_classes_and_groups_are_counted_and_not_shown():
    found, table, labels = _measured()
    assert {item["name"] for item in found["by_class"]["shown"]} == set("abcdef")
    assert found["by_class"]["too_small"] == 1
    assert {"x", "y"} <= {item["name"] for item in found["by_group"]["shown"]}
    assert found["by_group"]["too_small"] == 1
    worst = found["by_class"]["shown"][0]
    use = labels == CLASSES.index(worst["name"])
    assert worst["top_1"]["value"] == pytest.approx(np.mean(table[use].argmax(1) == labels[use]))
    assert _measured(grouped=False)[0]["by_group"] is None


def test_each_class_and_group_is_compared_with_the_other_models():
    found, table, labels = _measured()
    for part in found["by_class"]["shown"]:
        use = labels == CLASSES.index(part["name"])
        (start,) = part["compared"]
        assert start["model"] == "public_backbone"
        assert start["top_1"]["value"] == pytest.approx(1 / 7, abs=1e-6)
        gain = np.mean(table[use].argmax(1) == labels[use]) - 1 / 7
        assert start["difference"]["value"] == pytest.approx(gain, abs=1e-5)
        assert start["difference"]["low"] < gain < start["difference"]["high"]
    assert all(len(part["compared"]) == 1 for part in found["by_group"]["shown"])


def test_calibration_interval_is_a_bias_corrected_bootstrap_over_users():
    """Against a loop over the draws: users are resampled, and every bin counts its own gap."""
    users, images, samples = 60, 2, 400
    random = np.random.default_rng(3)
    sure = random.uniform(0.5, 1, users * images).astype(np.float32)
    labels = (random.random(users * images) > 0.7).astype(np.int64)
    owners = np.repeat(np.arange(users, dtype=np.uint64), images)
    found = measure_classifiers(
        {"model": np.stack([sure, 1 - sure], axis=1)},
        Subjects(labels, owners, np.full(len(owners), "")),
        ("a", "b"),
        samples=samples,
        grouped=False,
    )["model"]

    def error(rows):
        bins = np.minimum((sure[rows] * 15).astype(int), 14)
        gaps = [(sure[rows] - (labels[rows] == 0))[bins == one].sum() for one in range(15)]
        return np.abs(gaps).sum() / len(rows)

    every = np.arange(users * images)
    chosen = [random.integers(0, users, users) for _ in range(samples)]
    draws = np.array([error(np.concatenate([every[owners == one] for one in d])) for d in chosen])
    assert found["calibration_error"] == pytest.approx(error(every), abs=1e-5)
    assert draws.mean() > error(every)  # why they are moved
    low, high = np.quantile(draws - 2 * (draws.mean() - error(every)), [0.025, 0.975])
    assert found["calibration_interval"]["low"] == pytest.approx(low, abs=0.02)
    assert found["calibration_interval"]["high"] == pytest.approx(high, abs=0.02)


def test_class_comparison_must_match_the_overall_measurement():
    parts = _measured()[0]["by_class"]
    shown = parts["shown"][0]

    def with_other(**changes):
        other = {**shown["compared"][0], **changes}
        return _report(by_class={**parts, "shown": [{**shown, "compared": [other]}]})

    assert with_other().by_class.shown[0].compared[0].model == "public_backbone"
    for changes in (
        {"model": "centralized"},
        {"model": "secret"},
        {"difference": {"value": 0.9, "low": 0.0, "high": 1.0}},
    ):
        with pytest.raises(ArtifactError):
            with_other(**changes)


def test_classifier_report_refuses_unknown_or_inconsistent_fields():
    report = _report()
    assert report.measured
    assert report.headline("public_backbone").value == pytest.approx(1 / 7, abs=1e-6)
    assert report.difference("centralized") is None
    with pytest.raises(ArtifactError):
        _report(batch=12)
    of_others = {"difference": {"value": 0.1, "low": 0.0, "high": 1.0}}
    with pytest.raises(ArtifactError):
        _report(public_backbone={**_measured()[0]["public_backbone"], **of_others})
    with pytest.raises(ArtifactError):
        _report(model=None)


# ---- Several models evaluate the same images; shared layers compute once ----


CLASSES_SIDE = ("a", "b", "c")


def with_another_end(model, seed):
    """The same net, but for its last layer."""
    import keras

    other = keras.models.clone_model(model)
    other.set_weights(model.get_weights())
    last = other.layers[-1]
    random = np.random.default_rng(seed)
    last.set_weights([random.normal(size=w.shape) for w in last.get_weights()])
    return other


@pytest.mark.long
@pytest.mark.parametrize(
    ("group", "apply", "classes"), [("projection", embed, ()), ("head", classify, CLASSES_SIDE)]
)
def test_shared_trunk_is_computed_once_with_equal_results(group, apply, classes, monkeypatch):
    config = ModelConfig(backbone="tiny", image_size=12, embedding_dim=8, classes=classes)
    start = build_backbone(config, 0)
    models = {
        "model": with_another_end(start, 1),
        "public_backbone": start,
        "untrained": build_backbone(config, 7),
    }
    if not classes:
        models["raw_pixels"] = raw_pixels(config)
        models["frozen_features"] = cut(start, group)[0]
    images = np.random.default_rng(0).integers(0, 256, (37, 12, 12, 1), np.uint8)
    wanted = {name: apply(model, images, 16) for name, model in models.items()}
    computed: list[object] = []
    honest = inference.outputs
    monkeypatch.setattr(
        inference,
        "outputs",
        lambda model, examples, *more: (
            (examples.ndim == 4 and computed.append(model)) or honest(model, examples, *more)
        ),
    )
    shown = SharedFeatures(models, group, apply)
    found = shown(images, 16)
    shared = 1 if classes else 2
    assert len(computed) == len(models) - shared, "model, start and features have one trunk"
    assert set(found) == set(models)
    for name in models:
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-6)


def test_changed_trunk_shares_no_features():
    config = ModelConfig(backbone="tiny", image_size=12, embedding_dim=8)
    start = build_backbone(config, 0)
    moved = with_another_end(start, 1)
    moved.weights[0].assign(moved.weights[0] + 1e-6)
    assert len(SharedFeatures({"a": start, "b": moved}, "projection", embed).trunks) == 2
    assert not SharedFeatures({"a": start, "b": moved}, "all", embed).trunks
