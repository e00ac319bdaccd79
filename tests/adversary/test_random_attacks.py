"""Attacks drawn at random: none succeeds, and an attack on a weakened product is seen."""

import random

import pytest

from fedemb.data import verified_folder
from fedemb.foundation import addresses, files
from fedemb.foundation.canonical_json import file_digest
from fedemb.keys.stores import LocalKeyStore
from fedemb.pipelines import output
from fedemb.pipelines.cluster import package
from fedemb.serving import bundle
from tests.adversary.attacks import KINDS, World, runs
from tests.adversary.random_attacks import attack_all, distinct

QUICK = {
    "credentials in addresses",
    "outputs to devices, pipes and links",
    "control characters in names",
    "keys that others may change or read",
    "exchanged private folders",
    "changed packages",
}
"""Kinds that take no run."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("attacked"))


def _kind(name):
    (kind,) = [kind for kind in KINDS if kind.name == name]
    return kind


def test_a_night_has_300_different_attacks_of_every_kind(world):
    """A kind that runs out of attacks would make the night smaller."""
    for kind in KINDS:
        drawn = distinct(kind, world, random.Random(0), kind.most)
        assert len(drawn) == kind.most
        assert len({attack.text for attack in drawn}) == kind.most
    assert sum(kind.most for kind in KINDS) >= 300


def test_a_seed_repeats_a_night(world):
    for kind in KINDS:
        first, again = (distinct(kind, world, random.Random(7), 5) for _ in range(2))
        assert [attack.text for attack in first] == [attack.text for attack in again]


@pytest.mark.long
@pytest.mark.parametrize("name", [kind.name for kind in KINDS])
def test_no_attack_succeeds(world, name):
    """A few of each kind here, all of them in `make attacks`."""
    count = 12 if name in QUICK else 4
    tried, succeeded = attack_all(world, 0, count, [_kind(name)])
    assert tried.total() == count
    assert succeeded == []


class AnyText(str):
    """Equals every text."""

    def __ne__(self, other: object) -> bool:
        return False


WEAKENED = {
    "credentials in addresses": (addresses, "credentials_in", lambda _: ""),
    "outputs to devices, pipes and links": (files, "_require_regular_or_new", lambda _: None),
    "control characters in names": (output, "escaped", str),
    "keys that others may change or read": (LocalKeyStore, "_check_folders", lambda *_: None),
    "exchanged private folders": (verified_folder, "commit_to_people", lambda *_: AnyText()),
    "changed packages": (package, "file_digest", lambda _: file_digest(runs.PACKAGE)),
    "changed bundles": (bundle, "check_files", lambda *_: None),
}
"""Kind -> a check of the product that is taken away."""


@pytest.mark.parametrize("name", WEAKENED)
def test_an_attack_on_a_weakened_product_succeeds_and_is_counted(world, monkeypatch, name):
    if name == "changed bundles":
        assert world.released.problems() == []  # made before the check is gone
    monkeypatch.setattr(*WEAKENED[name])
    _, succeeded = attack_all(world, 0, 24, [_kind(name)])
    assert succeeded
    assert all(text.startswith(name) for text in succeeded)
