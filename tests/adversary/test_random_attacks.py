"""Attacks drawn at random: none succeeds. `planted_bugs/mutants.toml` takes checks away."""

import random

import pytest

from tests.adversary.attacks import KINDS
from tests.adversary.random_attacks import attack_all, distinct

QUICK = {
    "credentials in addresses",
    "outputs to devices, pipes and links",
    "control characters in names",
    "keys that others may change or read",
    "exchanged private folders",
    "changed packages",
    "changed bundles",
    "hostile configurations",
}
"""Kinds of which many are tried."""


def _kind(name):
    (kind,) = [kind for kind in KINDS if kind.name == name]
    return kind


def test_each_kind_has_its_number_of_distinct_attacks(world):
    """A kind that runs out of attacks would make the night smaller."""
    for kind in KINDS:
        drawn = distinct(kind, world, random.Random(0), kind.most)
        assert len(drawn) == kind.most
        assert len({attack.text for attack in drawn}) == kind.most
    assert sum(kind.most for kind in KINDS) >= 300


def test_attack_seed_repeats_the_attacks(world):
    for kind in KINDS:
        first, again = (distinct(kind, world, random.Random(7), 5) for _ in range(2))
        assert [attack.text for attack in first] == [attack.text for attack in again]


@pytest.mark.long
@pytest.mark.parametrize("name", [kind.name for kind in KINDS])
def test_random_attacks_are_all_detected(world, name):
    """A few of each kind here, all of them in `make attacks`."""
    count = 24 if name in QUICK else 4
    tried, succeeded = attack_all(world, 0, count, [_kind(name)])
    assert tried.total() == count
    assert succeeded == []
