"""One place trains a reservation, and a reservation is bound or given back, never both."""

import shutil
import threading
from dataclasses import replace

import pytest

from fedemb.errors import Refused
from fedemb.ledger.terms import terms_of
from fedemb.storage import open_store
from fedemb.storage.local import LocalStore
from fedemb.training.attempt import claim
from tests.kit import ledger_kit as kit_
from tests.kit.pipeline_runs.evaluation_run import config
from tests.kit.pipeline_runs.training_run import classifier_config


@pytest.fixture
def kit(tmp_path):
    return kit_.make(tmp_path)


def test_second_private_root_is_refused_and_the_first_goes_on(kit):
    ledger = kit.open()
    reservation = ledger.reserve(run_id="monday", content=kit_.content())
    first = kit_.bind(ledger, reservation, root="here")
    with pytest.raises(Refused, match=r"another private root"):
        kit_.bind(kit.open(), reservation, root="there")
    assert kit_.bind(kit.open(), reservation, root="here") == first
    assert kit.open().head == first


def test_neither_a_copy_nor_the_same_path_elsewhere_is_the_place_that_was_claimed(tmp_path):
    here, there, key = tmp_path / "here", tmp_path / "there", bytes(32)
    first = claim(open_store(here), key)
    assert claim(open_store(here), key) == first
    shutil.copytree(here, there)
    assert claim(open_store(there), key) != first
    shutil.rmtree(here)
    assert claim(open_store(here), key) != first


def _interleaved(kit, monkeypatch, first, second):
    """Runs `first` up to the moment before it creates its record, then all of `second`."""
    create, done = LocalStore.create, threading.Event()

    def late(self, name, data):
        if name == "weekly/00000002.json" and not done.is_set():
            done.set()
            second()
        return create(self, name, data)

    monkeypatch.setattr(LocalStore, "create", late)
    first()


@pytest.mark.parametrize("order", ["void in a bind", "bind in a void", "bind in a bind"])
def test_who_is_overtaken_between_reading_and_writing_is_refused(kit, monkeypatch, order):
    reservation = kit.open().reserve(run_id="monday", content=kit_.content())
    acts = {
        "void": lambda: kit.open().void(reservation, "no user came"),
        "bind": lambda: kit_.bind(kit.open(), reservation, root="mine"),
    }
    inner, outer = order.split(" in a ")
    if inner == outer:
        acts[inner], outer = (lambda: kit_.bind(kit.open(), reservation, root="other")), "mine"
        acts[outer] = lambda: kit_.bind(kit.open(), reservation, root="mine")
    with pytest.raises(Refused):
        _interleaved(kit, monkeypatch, acts[outer], acts[inner])
    assert [record.kind for record in kit.open().chain.records][2:] == [inner]


# ---- terms for life ---------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["nfkc-number/2", "hmac-sha256/1"])
def test_rule_of_ids_stays_for_life(rule):
    asked = terms_of(config(), None)
    other = asked.identifiers.replace(rule, "another/9")
    assert replace(asked, identifiers=other).differences(asked)


def test_how_images_without_users_are_told_apart_stays_for_life():
    """Their bytes and their names are other units: who was measured exactly would train."""

    def terms(kind, **changes):
        images = {"policy.unit": "image", "data.source.columns.user_id": None}
        images["training.unit_gradient.images_per_unit"] = 1
        return terms_of(
            classifier_config(**{**images, "data.source.format": kind, **changes}), None
        )

    ours = terms("parquet")
    assert not ours.differences(terms("tfrecord"))
    for kind in ("csv", "image_folder"):
        (changed,) = ours.differences(terms(kind))
        assert "data.source.format" in changed
        assert not terms(kind).differences(terms(kind))
        renamed = terms(kind, **{"data.source.columns.image_id": "title"})
        assert bool(terms(kind).differences(renamed)) == (kind == "csv")
        users = {"policy.unit": "user", "data.source.columns.user_id": "person"}
        assert not terms("parquet", **users).differences(terms(kind, **users))


def test_which_classes_can_be_held_out_stays_for_life():
    """A class that was held out under one list of classes could train under another."""

    def held_out(*classes):
        evaluation = {"by": "hash", "fraction": 0.5, "classes": classes}
        shared = {"data.source.label_scope": "global", "partition.evaluation": evaluation}
        return terms_of(config(**shared), None)

    ours = held_out("apple", "fig", "pear", "plum")
    assert not ours.differences(held_out("apple", "fig", "pear", "plum"))
    for others in (("apple", "fig", "lime", "pear"), ()):
        (changed,) = ours.differences(held_out(*others))
        assert changed.startswith("partition.evaluation")
