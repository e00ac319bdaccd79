"""The sentences of the utility report say no more than the intervals allow."""

import numpy as np
import pytest

from fedemb.documents.fields import Interval
from fedemb.documents.utility import (
    Bootstrap,
    Compared,
    Evaluated,
    Recall,
    UtilityReport,
)
from fedemb.evaluation.held_out import Subjects
from fedemb.reports.measured_words import best_start, compared, utility_sentence

DRAWN = Bootstrap(samples=200, unit="class", groups=None)


def estimate(value, low, high):
    return Interval(value=value, low=low, high=high)


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        (estimate(0.1, 0.05, 0.15), "10.0 points [5.0, 15.0] more than x"),
        (estimate(-0.1, -0.15, -0.05), "10.0 points [5.0, 15.0] less than x"),
        (
            estimate(0.01, -0.02, 0.05),
            "not distinguishable from x (+1.0 points [-2.0, +5.0])",
        ),
        (estimate(0.0, 0.0, 0.0), "not distinguishable from x (+0.0 points [+0.0, +0.0])"),
    ],
)
def test_only_an_interval_without_zero_is_called_a_difference(difference, words):
    assert compared(difference, "x") == words


def test_the_gain_is_over_the_best_start_and_the_public_one_is_named_beside_it():
    def at(value):
        return Compared.model_construct(
            recall_at_far={"0.001": Recall(value=value, low=0, high=1, threshold=0)},
            difference={"0.001": estimate(0.4 - value, 0.3 - value, 0.5 - value)},
        )

    def report(start, **others):
        return UtilityReport.model_construct(
            headline_rate="0.001",
            recall_at_far={"0.001": Recall(value=0.4, low=0.35, high=0.45, threshold=0.7)},
            evaluated=Evaluated(images=9, identities=1200, positive_pairs=1, negative_pairs=1),
            bootstrap=DRAWN,
            public_kind="supervised",
            centralized=None,
            **dict.fromkeys(UtilityReport.starts)
            | {name: at(value) for name, value in {"public_backbone": start, **others}.items()},
        )

    alone, better = report(0.2), report(0.2, untrained=0.05, raw_pixels=0.1)
    assert best_start(alone) == "the public backbone"
    said = utility_sentence(better)
    three = "the best of the public backbone, an untrained network and raw pixels, here "
    assert f"20.0 points [10.0, 30.0] more than {three}the public backbone." in said
    worse = report(0.04, untrained=0.03, raw_pixels=0.1)
    assert worse.gain.value == pytest.approx(0.3)
    said = utility_sentence(worse)
    assert f"30.0 points [20.0, 40.0] more than {three}raw pixels; 36.0 points" in said
    frozen = report(0.1, frozen_features=0.2)
    assert best_start(frozen).endswith(
        "the better of the public backbone and its frozen features, here its frozen features"
    )


def test_subgroups_are_drawn_where_each_holds_whole_identities():
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
