"""Verification and retrieval against brute force, and what their intervals promise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedemb.errors import Diverged, InputError
from fedemb.evaluation import metrics, pairs
from fedemb.evaluation.metrics import arrange, rates_at, retrieve, verify
from fedemb.evaluation.pairs import Estimate, draw_weights, weighted_mean
from fedemb.foundation.cores import available_cores, on_all_cores

FARS = (0.02, 0.2, 0.5)

vectors = st.lists(st.sampled_from([-1.0, 1.0]), min_size=4, max_size=4)
"""Corners of a cube: cosines are multiples of 1/2, so brute force is exact and ties abound."""


@st.composite
def labelled(draw, min_images=4, max_images=24):
    count = draw(st.integers(min_images, max_images))
    embeddings = np.array([draw(vectors) for _ in range(count)])
    labels = np.array([draw(st.integers(0, 4)) for _ in range(count)])
    labels[:3] = [0, 0, 1]
    return embeddings, labels


def all_pairs(embeddings, labels, gallery=None):
    """Scores and whether they belong together, of every pair, in float64."""
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    if gallery is None:
        scores, use = unit @ unit.T, np.triu_indices(len(labels), 1)
    else:
        other = gallery / np.linalg.norm(gallery, axis=1, keepdims=True)
        scores, use = unit @ other.T, np.nonzero(~np.eye(len(labels), dtype=bool))
    return scores[use], labels[use[0]] == labels[use[1]]


def brute_recall(scores, positive, far):
    negatives = np.sort(scores[~positive])[::-1]
    threshold = negatives[min(int(far * len(negatives)), len(negatives) - 1)]
    return (scores[positive] > threshold).mean(), threshold


def blobs(classes, images, dim=16, spread=1.0, seed=0):
    random = np.random.default_rng(seed)
    centres = random.normal(size=(classes, 1, dim))
    points = centres + spread * random.normal(size=(classes, images, dim))
    return points.reshape(-1, dim), np.repeat(np.arange(classes), images)


@settings(max_examples=80, deadline=None)
@given(labelled())
def test_recall_equals_brute_force_with_ties(case):
    embeddings, labels = case
    scores, positive = all_pairs(embeddings, labels)
    result = verify(arrange(embeddings, labels), FARS, samples=20)
    for far, recall, threshold in zip(FARS, result.recall, result.thresholds, strict=True):
        wanted, wanted_threshold = brute_recall(scores, positive, far)
        assert recall.value == pytest.approx(wanted)
        assert threshold == pytest.approx(wanted_threshold, abs=1e-7)
        assert (scores[~positive] > wanted_threshold + 1e-9).sum() <= far * (~positive).sum()
        assert recall.low <= recall.high


@settings(max_examples=30, deadline=None)
@given(labelled(), st.integers(0, 100))
def test_metrics_with_an_old_gallery_equal_brute_force(case, seed):
    embeddings, labels = case
    gallery = np.random.default_rng(seed).choice([-1.0, 1.0], size=embeddings.shape)
    scores, positive = all_pairs(embeddings, labels, gallery)
    result = verify(arrange(embeddings, labels, gallery=gallery), FARS, samples=20)
    for far, recall in zip(FARS, result.recall, strict=True):
        assert recall.value == pytest.approx(brute_recall(scores, positive, far)[0])


@pytest.mark.long
@pytest.mark.parametrize(("classes", "images", "kept"), [(300, 4, 0), (5, 260, 9**9), (700, 2, 9)])
def test_many_tiles_and_bins_equal_brute_force(classes, images, kept, monkeypatch):
    monkeypatch.setattr(pairs, "MAX_TILE", 256)
    monkeypatch.setattr(pairs, "_MOST_KEPT", kept)
    embeddings, labels = blobs(classes, images)
    data = arrange(embeddings, labels)
    scores = data.queries @ data.queries.T
    upper = np.triu_indices(len(labels), 1)
    positive = (data.labels[:, None] == data.labels)[upper]
    result = verify(data, (1e-3, 0.1), samples=20)
    for far, recall in zip((1e-3, 0.1), result.recall, strict=True):
        assert recall.value == pytest.approx(
            brute_recall(scores[upper], positive, far)[0], abs=1e-5
        )


def test_wrong_threshold_estimate_is_repaired(monkeypatch):
    data = arrange(*blobs(40, 5))
    right = verify(data, (0.1,), samples=20)
    monkeypatch.setattr(pairs, "_estimate_cut", lambda *_: int(0.95 * pairs.GRID))
    assert verify(data, (0.1,), samples=20).thresholds == right.thresholds


def test_collapsed_embeddings_recall_nothing():
    embeddings = np.ones((40, 8))
    result = verify(arrange(embeddings, np.arange(40) // 4), (1e-3, 0.1), samples=20)
    assert [recall.value for recall in result.recall] == [0.0, 0.0]
    found = retrieve(arrange(embeddings, np.arange(40) // 4), (1, 5), samples=20)
    assert found.nearest_neighbour.value == 0.0


@pytest.mark.parametrize("images", [3, 40])
def test_retrieval_equals_brute_force(images):
    embeddings, labels = blobs(30, images, spread=1.5)
    found = retrieve(arrange(embeddings, labels), (1, 5), samples=20, block=7)
    unit = metrics.unit_norm(embeddings)
    first, precision = [], []
    for query in range(len(labels)):
        order = np.argsort(-(unit @ unit[query]), kind="stable")
        hits = labels[order[order != query]] == labels[query]
        ranks = np.flatnonzero(hits) + 1
        first.append(ranks[0])
        precision.append((np.arange(1, len(ranks) + 1) / ranks).mean())
    assert found.recall_at[1].value == pytest.approx(np.mean(np.array(first) == 1))
    assert found.recall_at[5].value == pytest.approx(np.mean(np.array(first) <= 5))
    assert found.mean_average_precision.value == pytest.approx(np.mean(precision), abs=1e-6)
    assert found.nearest_neighbour.value == found.recall_at[1].value


def test_single_image_classes_do_not_count_in_retrieval():
    embeddings, labels = blobs(10, 3, spread=0.01)
    labels[-1] = 99
    found = retrieve(arrange(embeddings, labels), (1,), samples=20)
    assert found.recall_at[1].value == 1.0
    assert found.nearest_neighbour.value == 1.0
    assert (found.queries, found.identities_with_match) == (30, 10)


def test_query_subsample_uses_the_whole_gallery():
    embeddings, labels = blobs(50, 4)
    found = retrieve(arrange(embeddings, labels), (1,), samples=20, max_queries=60)
    assert found.queries == 60
    assert found.recall_at[1].value == pytest.approx(
        retrieve(arrange(embeddings, labels), (1,), samples=20).recall_at[1].value, abs=0.15
    )


def test_rates_at_the_models_own_threshold_equal_recall_and_requested_far():
    data = arrange(*blobs(60, 4))
    result = verify(data, (0.05,), samples=40)
    accepts, recall = rates_at(data, result.thresholds[0], samples=40)
    assert recall.value == result.recall[0].value
    assert accepts.value == pytest.approx(0.05, abs=1 / result.negatives)
    assert accepts.low < 0.05 < accepts.high


# ---- intervals ----------------------------------------------------------------------------------


def test_first_order_bootstrap_draws_agree_with_exact_draws(monkeypatch):
    data = arrange(*blobs(150, 4))
    exact = verify(data, (1e-2, 0.1), samples=100)
    monkeypatch.setattr(metrics, "EXACT_PAIRS", 0)
    binned = verify(data, (1e-2, 0.1), samples=100)
    for a, b in zip(exact.recall, binned.recall, strict=True):
        assert a.value == b.value
        assert np.corrcoef(a.draws, b.draws)[0, 1] > 0.9
        assert (b.high - b.low) / (a.high - a.low) == pytest.approx(1, abs=0.25)


def test_estimates_of_different_bootstrap_draws_cannot_be_subtracted():
    with pytest.raises(InputError, match="same identities"):
        Estimate(1.0, np.zeros(3), 9) - Estimate(1.0, np.zeros(4), 9)


def test_weighted_mean_draws_whole_units():
    values, units = np.array([1.0, 1.0, 0.0]), np.array([0, 0, 1])
    weights = np.array([[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]], np.float32)
    assert weighted_mean(values, units, weights).draws == pytest.approx([1.0, 0.0, 2 / 3])


@pytest.mark.long
@pytest.mark.statistical
def test_intervals_cover_the_truth():
    """Of 60 intervals about 57 hold the recall of the population; below 48 has chance < 1e-4."""
    truth = verify(arrange(*blobs(3000, 3, seed=0)), (0.01,), samples=20).recall[0].value
    estimates = [
        verify(arrange(*blobs(100, 3, seed=seed)), (0.01,), samples=80).recall[0]
        for seed in range(1, 61)
    ]
    assert sum(estimate.low <= truth <= estimate.high for estimate in estimates) >= 48


@pytest.mark.long
@pytest.mark.statistical
@pytest.mark.parametrize("units", [10, 24, 50, 200])
@pytest.mark.parametrize(("right", "wrong"), [(11, 1), (3, 1), (1, 9)])
def test_intervals_of_few_users_cover_the_truth(units, right, wrong):
    """Of 400 intervals of accuracy, 369 to 387 hold it; quantiles of the draws 338 to 384."""
    random, held = np.random.default_rng(units), 0
    for seed in range(400):
        images = random.poisson(25, units) + 1
        hits = random.binomial(images, random.beta(right, wrong, units))
        owner = np.arange(units).repeat(images)
        values = np.concatenate([np.arange(n) < k for n, k in zip(images, hits, strict=True)])
        found = weighted_mean(values, owner, draw_weights(units, 200, seed))
        held += found.low <= right / (right + wrong) <= found.high
    assert held >= 362


def test_share_of_all_or_none_has_the_exact_interval():
    units = np.arange(24)
    for value, low, high in ((1.0, 0.857, 1.0), (0.0, 0.0, 0.143)):
        found = weighted_mean(np.full(24, value), units, draw_weights(24, 50, 0))
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-3)


def groups_of_unlike_spread(groups, seed, people=12, images=3):
    """Alphabets: what is hard in one need not be in the next."""
    random = np.random.default_rng(seed)
    spread = np.exp(random.normal(np.log(0.9), 0.35, groups))[:, None, None, None]
    centres = random.normal(size=(groups, people, 1, 16))
    centres /= np.linalg.norm(centres, axis=-1, keepdims=True)
    points = centres + spread * random.normal(size=(groups, people, images, 16)) / 4
    labels = np.arange(groups * people).repeat(images)
    return points.reshape(-1, 16), labels, np.arange(groups).repeat(people * images)


@pytest.mark.long
@pytest.mark.statistical
def test_only_intervals_over_groups_cover_the_recall_of_new_groups():
    """Of 30 intervals 27 and 15 hold it; below 22, or 22 and more, has chance < 1e-3."""
    embeddings, labels, _ = groups_of_unlike_spread(300, 0)
    truth = verify(arrange(embeddings, labels), (0.01,), samples=20).recall[0].value
    held = {"groups": 0, "identities": 0}
    for seed in range(1, 31):
        embeddings, labels, groups = groups_of_unlike_spread(10, seed)
        for name, drawn in (("groups", groups), ("identities", None)):
            data = arrange(embeddings, labels, groups=drawn)
            estimate = verify(data, (0.01,), samples=80).recall[0]
            held[name] += estimate.low <= truth <= estimate.high
    assert held["groups"] >= 22 > held["identities"]


def test_bootstrap_draws_whole_groups():
    groups = np.array([0, 0, 0, 1, 2, 2])
    weights = draw_weights(6, 50, 0, groups)
    taken = np.stack([weights[:, groups == g].sum(1) for g in range(3)], 1) / [3, 1, 2]
    assert (taken == taken.round()).all()
    assert (taken.sum(1) == 3).all()


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "more", "words"),
    [
        ([0, 1, 2, 3], {}, "needs two classes"),
        ([0, 0, 0, 0], {}, "needs two classes"),
        ([0, 0, 1], {}, "one of each"),
        ([0, 0, 1, 1], {"groups": np.array(["a", "b", "b", "b"])}, "more than one group"),
        ([0, 0, 1, 1], {"clusters": np.array([0, 1, 1, 1])}, "more than one cluster"),
    ],
)
def test_invalid_labels_groups_or_clusters_are_refused(labels, more, words):
    with pytest.raises(InputError, match=words):
        verify(arrange(np.ones((4, 2)), np.array(labels), **more), (0.1,), samples=20)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_diverged_model_is_reported(value):
    with pytest.raises(Diverged, match="its budget is spent, lower the learning rates"):
        arrange(np.full((4, 2), value), np.array([0, 0, 1, 1]))


def test_work_on_all_cores_takes_few_items_ahead():
    taken = []
    results = on_all_cores(abs, (taken.append(n) or n for n in range(1000)))
    assert next(results) == 0
    assert len(taken) <= 2 * available_cores() + 1
