"""One place trains a reservation, and a reservation is bound or given back, never both."""

import dataclasses
import multiprocessing
import shutil
import threading
from dataclasses import replace

import pytest

from fedemb.errors import FedEmbError, Refused
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


def test_another_root_does_not_hide_that_inputs_changed(kit):
    ledger = kit.open()
    reservation = ledger.reserve(run_id="monday", content=kit_.content())
    kit_.bind(ledger, reservation)
    with pytest.raises(FedEmbError, match="inputs_sha"):
        kit_.bind(ledger, reservation, "other inputs", root="there")


def test_next_attempt_may_train_elsewhere(kit):
    ledger = kit.open()
    reservation = ledger.reserve(run_id="monday", content=kit_.content())
    kit_.bind(ledger, reservation, root="here")
    second = ledger.reserve(run_id="monday", content=kit_.content(), attempt=2)
    kit_.bind(ledger, second, root="there")
    assert ledger.spent("all/0").charges == 2  # and is charged in addition
    ledger.verify()


def _act(kit, reservation, barrier, number, answers):
    """Binds from a root of its own; every third gives the reservation back instead."""
    ledger = kit.open()
    barrier.wait(60)
    try:
        if number % 3 == 2:
            ledger.void(reservation, "no user came")
        else:
            kit_.bind(ledger, reservation, root=f"root {number}")
        answers.put((number, ""))
    except FedEmbError as error:
        answers.put((number, str(error)))
    except BaseException as error:
        answers.put((number, repr(error)))
        raise


@pytest.mark.long
def test_of_trainers_with_roots_of_their_own_and_voids_at_once_one_kind_wins(kit):
    """Processes on one reservation: one root trains, or it is given back, and nothing else."""
    reservation = kit.open().reserve(run_id="monday", content=kit_.content())
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(9), context.Queue()
    processes = [
        context.Process(target=_act, args=(kit, reservation, barrier, number, answers))
        for number in range(9)
    ]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
    winners = [number for number, refused in found.items() if not refused]
    attempt = kit.open().state.attempts["monday", 1]
    assert len(kit.open().chain.records) == 3  # policy, reservation, and one of the two
    if attempt.void:
        assert {number % 3 for number in winners} == {2}
        reasons = {refused for refused in found.values() if refused}
        assert all("given up" in reason for reason in reasons)
    else:
        assert len(winners) == 1
        assert attempt.bind.body["private_root"] == kit_.sha(f"root {winners[0]}")
        assert all("private root" in text or "is bound" in text for text in found.values() if text)
    kit.open().verify()


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


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"user_id_column": "account"}, "data.source.columns.user_id"),
        ({"cohort_column": "month"}, "data.source.columns.cohort"),
        ({"blocks_per_cohort": 2}, "partition.blocks_per_cohort"),
        ({"shared_label_column": "label"}, "data.source.label_scope"),
        ({"evaluation": {"by": "hash", "fraction": 0.2}}, "partition.evaluation"),
    ],
    ids=lambda item: next(iter(item)) if isinstance(item, dict) else "",
)
def test_who_a_user_is_stays_for_life(kit, change, named):
    users = dataclasses.replace(kit_.users(), **change)
    with pytest.raises(Refused, match=rf"{named}.*for life.*another policy_id"):
        kit.open().check_terms(kit_.terms(users=users))
    kit.open().check_terms(kit_.terms())


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
