"""Noise has the planned scale; rounds, weights, attempts and runs do not depend on each other.

Keys are constants, so a green test stays green; each bound is at six standard deviations.
"""

import numpy as np
import pytest

from fedemb.privacy.noise import run_key, tensor_key
from fedemb.privacy.running import build_mechanism
from fedemb.privacy.sampling import sample
from tests.kit.privacy_worlds import ROOT, World, make_plan

pytestmark = pytest.mark.statistical
DIM, ROUNDS = 1 << 16, 4
ATTEMPT = (ROOT, "run", 1, "inputs")
NEIGHBOURS = (
    (ROOT, "run", 2, "inputs"),
    (ROOT, "run-2", 1, "inputs"),
    (ROOT, "run", 1, "inputs-2"),
    (bytes(32), "run", 1, "inputs"),
)


def noise_of(attempt, kind="group_poisson_gaussian"):
    """Released means of rounds without participants, `[ROUNDS, DIM]`: noise only."""
    m = build_mechanism(make_plan(kind), *attempt)
    return np.stack([m.aggregate(r, np.zeros(DIM, np.int64)).mean for r in range(ROUNDS)])


def correlations(rows):
    return np.abs(np.corrcoef(rows) - np.eye(len(rows))).max()


def test_noise_of_rounds_has_the_planned_scale():
    plan, rows = make_plan("group_poisson_gaussian"), noise_of(ATTEMPT)
    wanted = plan.noise_multiplier * plan.l2_norm_clip / plan.normalizer
    assert abs(rows.std() / wanted - 1) < 6 / np.sqrt(2 * rows.size)


def test_noise_of_rounds_and_of_neighbouring_attempts_is_uncorrelated():
    rows = np.concatenate([noise_of(attempt) for attempt in (ATTEMPT, *NEIGHBOURS)])
    assert correlations(rows) < 6 / np.sqrt(DIM)


def test_tree_noise_of_different_attempts_is_uncorrelated():
    rows = np.stack([noise_of(a, "tree_aggregation")[0] for a in (ATTEMPT, *NEIGHBOURS)])
    assert correlations(rows) < 6 / np.sqrt(DIM)


def test_noise_of_a_round_does_not_repeat_at_any_offset():
    row = noise_of(ATTEMPT)[0].astype(np.float64)
    row -= row.mean()
    spectrum = np.abs(np.fft.rfft(row, 2 * DIM)) ** 2
    shifted = np.fft.irfft(spectrum)[1 : DIM // 2] / (row @ row)
    assert np.abs(shifted).max() < 6 / np.sqrt(DIM / 2)


def test_keys_of_noise_and_coins_differ_by_purpose_tag_and_quantity():
    keys = {run_key(ATTEMPT[0], purpose, *ATTEMPT[1:]) for purpose in ("noise", "coins")}
    keys |= {tensor_key(ROOT, tag, name) for tag in (b"a", b"b") for name in ("update", "other")}
    assert len(keys) == 6


@pytest.mark.parametrize("kind", ["group_poisson_gaussian", "poisson_gaussian"])
def test_coins_of_rounds_and_of_neighbouring_attempts_are_uncorrelated(kind):
    plan, world, rounds = make_plan(kind, rounds=12), World(range(4000), 4000), 12
    plan = plan.replaced(virtual_clients=4000)
    rows = []
    for root, *ids in (ATTEMPT, *NEIGHBOURS):
        key = run_key(root, "coins", *ids)
        for r in range(rounds):
            taken = np.zeros(4000)
            found = [client.group for client in sample(plan, key, r, world)]
            taken[found] = 1
            rows.append(taken)
    rows = np.array(rows)
    assert correlations(rows) < 6 / np.sqrt(4000)
    assert np.abs(rows.mean() - 0.25) < 6 * np.sqrt(0.1875 / rows.size)
