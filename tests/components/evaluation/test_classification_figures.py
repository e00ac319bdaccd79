"""Figures of a classifier against counting by hand."""

import numpy as np
import pytest

from fedemb.documents.document_schema import checker, first_problem
from fedemb.documents.evidence_schema import _CLASSIFICATION
from fedemb.evaluation.classification import classification_sentence, measure_classifiers

CLASSES = tuple("abcdefg")


def _measured(users=40, images=3, **changes):
    random = np.random.default_rng(0)
    labels = random.integers(0, 6, users * images)  # nobody has the last class
    good = random.dirichlet(np.ones(len(CLASSES)), len(labels)).astype(np.float32)
    good[np.arange(len(labels)), labels] += random.random(len(labels)) < 0.5
    good /= good.sum(1, keepdims=True)
    flat = np.full_like(good, 1 / len(CLASSES))
    groups = np.repeat(random.choice(["x", "y", ""], users, p=[0.6, 0.3, 0.1]), images)
    tables = {"model": good, "public_start": flat}
    owners = np.repeat(np.arange(users, dtype=np.uint64), images)
    return (
        measure_classifiers(tables, labels, owners, groups, CLASSES, samples=50, **changes),
        good,
        labels,
    )


def test_top_1_and_top_5_are_what_counting_gives_and_ties_lose():
    section, table, labels = _measured()
    model, start = section["models"]["model"], section["models"]["public_start"]
    order = np.argsort(-table, axis=1)
    assert model["top_1"]["value"] == pytest.approx(np.mean(order[:, 0] == labels), abs=1e-6)
    top_5 = np.mean((order[:, :5] == labels[:, None]).any(1))
    assert model["top_5"]["value"] == pytest.approx(top_5, abs=1e-6)
    assert start["top_1"]["value"] == start["top_5"]["value"] == 0.0
    assert start["top_1_difference"]["value"] == model["top_1"]["value"]
    assert model["top_1"]["low"] < model["top_1"]["value"] < model["top_1"]["high"]


def test_a_constant_guess_is_as_sure_as_it_is_right():
    section, _, labels = _measured()
    gap = abs(1 / len(CLASSES) - np.mean(labels == 0))
    error = section["models"]["public_start"]["calibration_error"]
    assert error == pytest.approx(gap, abs=1e-6)


def test_small_classes_and_groups_are_counted_and_not_shown():
    section, _, _ = _measured()
    assert {item["name"] for item in section["classes"]["shown"]} == set("abcdef")
    assert section["classes"]["too_small"] == 1
    assert {"x", "y"} <= {item["name"] for item in section["groups"]["shown"]}
    assert section["groups"]["too_small"] == 1


def test_the_section_is_of_its_schema_and_nothing_else_is():
    section, _, _ = _measured()
    assert first_problem(checker(_CLASSIFICATION), section) is None
    assert first_problem(checker(_CLASSIFICATION), {**section, "batch": 12}) is not None


def test_the_sentence_names_images_users_and_the_start():
    sentence = classification_sentence(_measured()[0], "none")
    assert sentence.startswith("On 120 images of 40 users who never trained")
    assert "against the untrained start" in sentence
