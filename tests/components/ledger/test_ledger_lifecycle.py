"""Reserve, bind, commit, void, release: what may be repeated, and what is refused."""

import dataclasses
import json
import math
import shutil
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from dp_accounting import NeighboringRelation, pld
from dp_accounting import dp_event as dpe
from dp_accounting.rdp import compute_epsilon

from fedemb.documents.ledger_record import ChargeRecord
from fedemb.errors import (
    BudgetExceeded,
    LedgerError,
    PlanMismatch,
    Refused,
    SignatureInvalid,
    StorageError,
)
from fedemb.foundation.canonical_json import canonical_json, json_digest
from fedemb.keys import reservation_key_name
from fedemb.keys.trust import Signer, TrustStore, sign_document
from fedemb.ledger import Anchor, Charge, PlannedSeries, check_high_water, mark_high_water
from fedemb.ledger import state as ledger_state
from fedemb.ledger.budget import lowered, renyi_epsilon, spent
from fedemb.ledger.records import Chain
from fedemb.ledger.state import ROUND_LOG_SCHEMA
from fedemb.ledger.terms import terms_of
from fedemb.privacy.accounting import price, rdp_of
from fedemb.storage import open_store
from fedemb.storage.local import LocalStore
from fedemb.training.attempt import claim
from tests.kit import ledger_kit as kit_
from tests.kit.pipeline_runs.evaluation_run import config
from tests.kit.pipeline_runs.training_run import classifier_config

REPLACE_ONE = NeighboringRelation.REPLACE_ONE


@pytest.fixture
def kit(tmp_path):
    return kit_.make(tmp_path)


@pytest.fixture
def reserved(kit):
    ledger = kit.open()
    return ledger, ledger.reserve(run_id="monday", content=kit_.content())


@pytest.fixture
def bound(reserved):
    kit_.bind(*reserved)
    return reserved


@pytest.mark.parametrize("field", ["plan_sha", "config_sha", "code_sha", "input", "purpose"])
def test_same_run_with_other_content_is_refused_and_names_the_field(kit, field):
    kit.open().reserve(run_id="monday", content=kit_.content())
    changed = {"input": "s3://images/other", "purpose": "simulation"}.get(
        field, kit_.sha("something else")
    )
    with pytest.raises(PlanMismatch, match=field):
        kit.open().reserve(run_id="monday", content=kit_.content(**{field: changed}))


def test_another_attempt_is_charged_in_addition(kit):
    ledger = kit.open()
    ledger.reserve(run_id="monday", content=kit_.content())
    one = ledger.spent("all/0").epsilon
    second = ledger.reserve(run_id="monday", content=kit_.content(), attempt=2)
    assert second.attempt == 2
    assert ledger.spent("all/0").epsilon > one
    with pytest.raises(Refused, match="no gaps"):
        ledger.reserve(run_id="monday", content=kit_.content(), attempt=4)


def test_run_that_would_cross_the_cap_is_refused_and_leaves_no_record(kit):
    ledger = kit.open()
    for number in range(3):
        ledger.reserve(run_id=f"run-{number}", content=kit_.content(rounds=80))
    with pytest.raises(BudgetExceeded, match="raise noise_multiplier"):
        ledger.reserve(run_id="one-too-many", content=kit_.content(rounds=80))
    assert ledger.head.sequence == 3
    assert ledger.spent("all/0").epsilon <= 4.0
    ledger.verify()


@pytest.fixture
def months(tmp_path):
    """A policy whose blocks are two buckets of each month of signing up."""
    return kit_.make(tmp_path, users=kit_.users("month", 2))


def test_full_block_drops_out_and_others_stay(months):
    kit, ledger = months, months.open()
    ledger.reserve(run_id="big", content=kit_.content(blocks=["old/0"], rounds=160))
    asked = kit_.content(blocks=["new/0", "old/0"], rounds=160)
    reservation = ledger.reserve(run_id="next", content=asked)
    assert reservation.blocks == ["new/0"]
    assert reservation.blocks_requested == ["new/0", "old/0"]
    assert kit.open().reserve(run_id="next", content=asked) == reservation


OTHER_BLOCKS = [
    (None, 1, ["all/0", "all/1"]),
    (None, 1, ["jan/0"]),
    (None, 1, ["all/00"]),
    (None, 1, ["0"]),
    ("month", 2, ["jan/0", "jan/2"]),
    ("month", 2, ["all/0"]),
    ("month", 2, ["/1"]),
]
"""Cohort column and buckets of a policy, and blocks of users who are cut otherwise."""


@pytest.mark.parametrize(("cohort", "buckets", "blocks"), OTHER_BLOCKS)
@pytest.mark.parametrize("purpose", ["release", "simulation"])
def test_blocks_with_another_assignment_are_refused(tmp_path, cohort, buckets, blocks, purpose):
    """Otherwise, half or all of the users would start with an unspent budget."""
    kit = kit_.make(tmp_path, users=kit_.users(cohort, buckets))
    with pytest.raises(Refused, match="blocks_per_cohort"):
        kit.open().reserve(run_id="b", content=kit_.content(blocks=blocks, purpose=purpose))
    assert kit.open().head.sequence == 0


@pytest.mark.planted_bug(16)
@pytest.mark.parametrize("body", [{"rounds": 0}, {"delta": 2e-5}, {"blocks": ["all/1"]}], ids=str)
def test_reservation_written_past_the_admission_check_is_found(tmp_path, body):
    kit = kit_.make(tmp_path, users=kit_.users(buckets=2))
    kit_.forge(
        kit.ledger_uri,
        Signer.load_or_create(kit.keys, "ledger"),
        "reserve",
        {**kit_.content(), "blocks": ["all/0"], **body},
    )
    with pytest.raises(LedgerError, match="00000001"):
        kit.open().verify()


def test_bind_repeats_for_the_same_inputs_and_refuses_others(kit, reserved):
    ledger, reservation = reserved
    assert kit_.bind(ledger, reservation) == kit_.bind(kit.open(), reservation)
    with pytest.raises(PlanMismatch, match="inputs_sha"):
        kit_.bind(ledger, reservation, "other inputs")


def test_commit_lowers_to_rounds_started_and_destroys_the_key(kit, reserved):
    ledger, reservation = reserved
    kit.keys.create(reservation_key_name("monday", 1))
    kit_.bind(ledger, reservation)
    full = ledger.spent("all/0").epsilon
    kit_.commit(kit, ledger, reservation, 5)
    expected = float(rdp_of(kit_.event(rounds=5), REPLACE_ONE, [8.0])[0])
    assert ledger.spent("all/0").epsilon == pytest.approx(
        renyi_epsilon(expected, 8.0, kit_.DELTA), rel=1e-6
    )
    assert ledger.spent("all/0").epsilon < full
    assert ledger.attempt(reservation).charge.rounds_charged == 5
    assert not kit.keys.exists(reservation_key_name("monday", 1))
    with pytest.raises(FileExistsError):
        kit.keys.create(reservation_key_name("monday", 1))
    kit_.commit(kit, kit.open(), reservation, 5)
    with pytest.raises(PlanMismatch, match="does not change"):
        kit_.commit(kit, ledger, reservation, 4)


@pytest.mark.parametrize("rounds", [-1, 21])
def test_commit_of_other_rounds_than_reserved_is_refused(kit, bound, rounds):
    ledger, reservation = bound
    with pytest.raises(Refused):
        kit_.commit(kit, ledger, reservation, rounds)


def test_commit_before_bind_and_bind_after_void_are_refused(kit, reserved):
    ledger, reservation = reserved
    with pytest.raises(LedgerError, match="never bound"):
        kit_.commit(kit, ledger, reservation, 1)
    ledger.void(reservation, "never started")
    assert ledger.spent("all/0").epsilon == 0
    assert [ledger.attempt(reservation).charged_at(record) for record in (1, 2)] == [True, False]
    with pytest.raises(Refused, match="given up"):
        kit_.bind(ledger, reservation)


def test_void_is_refused_once_anything_was_bound(kit, bound):
    ledger, reservation = bound
    with pytest.raises(Refused, match="stays charged"):
        ledger.void(reservation, "changed our mind")
    root = reservation_key_name("monday", 1)
    kit.keys.create(root)
    kit.keys.destroy(root)  # as a commit does: no sign here of an old ledger
    with pytest.raises(Refused, match="stays charged"):
        ledger.void(reservation, "changed our mind", kit.keys)


@pytest.mark.parametrize("after", ["bind", "void"])
def test_signed_bind_of_a_bound_or_void_attempt_is_refused_by_readers(kit, after):
    """Nothing trains under a void attempt, which is free, nor on other inputs than were bound."""
    ledger = kit.open()
    first = ledger.reserve(run_id="monday", content=kit_.content())
    kit_.bind(ledger, first)
    second = ledger.reserve(run_id="tuesday", content=kit_.content())
    body = dict(ledger.attempt(first).bind.body) | {"reservation": second.sequence}
    if after == "bind":
        kit_.bind(ledger, second, "other inputs")
    else:
        ledger.void(second, "never started")
    ledger._append("bind", lambda: body, reservation=second)
    with pytest.raises(LedgerError, match="bound once, before it is committed or void"):
        kit.reader().verify()


@pytest.mark.parametrize("after", ["bind", "void"])
def test_signed_void_of_an_attempt_that_was_bound_or_void_is_refused_by_readers(
    kit, reserved, after
):
    """The ledger's own key signed it, as a faulty writer would: the charge must not go to zero."""
    ledger, reservation = reserved
    if after == "bind":
        kit_.bind(ledger, reservation)
    else:
        ledger.void(reservation, "never started")
    body = {"reservation": reservation.sequence, "reason": "a faulty writer"}
    ledger._append("void", lambda: body, reservation=reservation)
    with pytest.raises(LedgerError, match="only an attempt that was never bound can be void"):
        kit.reader().verify()


def _append_commit(kit, ledger, reservation, rounds, logged):
    """With the keys of trainer and ledger, past the checks of the writer."""
    log = {"schema": ROUND_LOG_SCHEMA, "run_id": "monday", "attempt": 1, "rounds_started": logged}
    log |= {"sha": kit_.sha("log"), "card_sha": kit_.sha("card")}
    body = {"reservation": reservation.sequence, "rounds_started": rounds}
    body |= {"round_log": sign_document(log, kit.trainer)}
    ledger._append("commit", lambda: body, reservation=reservation)


@pytest.mark.parametrize(("rounds", "logged"), [(21, 21), (200, 200), (5, 4), (5, 6)])
def test_signed_commit_of_rounds_not_reserved_or_logged_is_refused(kit, bound, rounds, logged):
    _append_commit(kit, *bound, rounds, logged)
    rule = "more rounds than were reserved" if rounds > 20 else "not that of this attempt"
    with pytest.raises(LedgerError, match=rule):
        kit.reader().verify()


@pytest.mark.planted_bug(16)
@pytest.mark.parametrize("after", ["reserve", "commit"])
def test_signed_commit_of_an_unbound_or_committed_attempt_is_refused(kit, reserved, after):
    """A second commit of fewer rounds would lower the charge."""
    if after == "commit":
        kit_.bind(*reserved)
        kit_.commit(kit, *reserved, 20)
    _append_commit(kit, *reserved, 1, 1)
    with pytest.raises(LedgerError, match="committed once, after it was bound"):
        kit.reader().verify()


NO_RUN = {"run_id": "", "attempt": 0}
CHARGED = {**kit_.content(), "blocks": ["all/0"]}
VOID = {"reservation": 1, "reason": "a faulty writer"}
DECLARED = {
    **{"name": "survey", "blocks": ["all/0"], "relation": "ADD_OR_REMOVE_ONE", "epsilon": None},
    **{"delta": 0.0, "rho": 0.01, "reason": "a survey"},
}


@pytest.mark.planted_bug(16)
@pytest.mark.parametrize(
    ("kind", "body", "of", "rule"),
    [
        ("policy", {"terms": kit_.terms(epsilon_cap=9.0).to_json()}, NO_RUN, "no other record may"),
        ("charge", DECLARED, NO_RUN, "name of an external charge is unique"),
        ("charge", {**DECLARED, "name": "other"}, {}, "belongs to a policy and to no run"),
        ("charge", {**DECLARED, "name": "other", "rho": 0.0}, NO_RUN, "does not admit"),
        ("reserve", CHARGED, {"attempt": 1}, "numbered from 1 without gaps"),
        ("reserve", CHARGED, {"attempt": 3}, "numbered from 1 without gaps"),
        ("void", VOID, {"attempt": 2}, "not one of its run and attempt"),
        ("void", VOID, {"run_id": "tuesday"}, "not one of its run and attempt"),
    ],
)
def test_signed_record_that_breaks_a_rule_is_refused(kit, kind, body, of, rule):
    """Signed with the right key, as a faulty writer would: terms, names and runs are not reused."""
    kit.open().reserve(run_id="monday", content=kit_.content())
    kit.open().charge(ChargeRecord(**DECLARED), kit.owner)
    signer = Signer.load_or_create(kit.keys, "ledger" if kind in ("reserve", "void") else "policy")
    kit_.forge(kit.ledger_uri, signer, kind, body, **of)
    with pytest.raises(LedgerError, match=rule):
        kit.reader().verify()


def test_void_is_refused_if_the_root_key_was_destroyed(kit):
    """The ledger's later records were cut off, and no one touched the keys."""
    ledger, root = kit.open(), reservation_key_name("monday", 1)
    reservation = ledger.reserve(run_id="monday", content=kit_.content())
    kit.keys.create(root)
    kit.keys.destroy(root)
    with pytest.raises(Refused, match="older than its runs"):
        ledger.void(reservation, "the wrong week", kit.keys)
    assert ledger.spent("all/0").epsilon > 0


def test_a_ledger_older_than_the_training_is_refused(kit):
    """A refund, or other data with noise of its own, would be a training without a charge."""
    ledger = kit.open()
    reservation = ledger.reserve(run_id="monday", content=kit_.content())
    kit_.bind(ledger, reservation)
    mark_high_water(ledger, kit.keys)
    kit.path(2).unlink()
    shutil.rmtree(kit.path(2).with_name("heads"))
    restored = kit.open()
    with pytest.raises(LedgerError, match="0 records of kind bind, evaluation"):
        check_high_water(restored, kit.keys)
    kit_.bind(restored, reservation, "other inputs")
    with pytest.raises(LedgerError, match="was rewritten"):
        mark_high_water(restored, kit.keys)


def test_a_voided_reservation_has_no_root_key_to_train_with(kit):
    ledger, root = kit.open(), reservation_key_name("monday", 1)
    reservation = ledger.reserve(run_id="monday", content=kit_.content())
    kit.keys.create(root)
    for _ in range(2):  # again, as after a kill between record and key
        ledger.void(reservation, "the wrong week", kit.keys)
    assert not kit.keys.exists(root)
    assert ledger.spent("all/0").epsilon == 0


def test_run_that_was_voided_may_reserve_again_as_next_attempt(reserved):
    ledger, reservation = reserved
    ledger.void(reservation, "wrong week")
    assert ledger.reserve(run_id="monday", content=kit_.content(noise=3.0)).attempt == 2


@pytest.mark.parametrize("field", ["rounds_started", "round_log_sha", "card_sha"])
def test_closed_attempt_takes_no_other_rounds_log_or_model(kit, bound, field):
    ledger, reservation = bound
    act = {"rounds_started": 3, "round_log_sha": kit_.sha("log"), "card_sha": kit_.sha("card")}
    first = ledger.commit(reservation, **act, signer=kit.trainer)
    assert ledger.commit(reservation, **act, signer=kit.trainer) == first
    other = {**act, field: 2 if field == "rounds_started" else kit_.sha("other")}
    with pytest.raises(PlanMismatch, match="another round log or model"):
        ledger.commit(reservation, **other, signer=kit.trainer)


def test_only_charged_runs_committed_in_time_count_as_private_runs(kit):
    ledger = kit.open()
    for name, purpose, committed in (
        ("release", "release", True),
        ("simulation", "simulation", True),
        ("open", "release", False),
    ):
        reservation = ledger.reserve(run_id=name, content=kit_.content(purpose=purpose))
        kit_.bind(ledger, reservation)
        if committed:
            kit_.commit(kit, ledger, reservation, 20)
    assert ledger.state.committed_runs() == {"release"}
    assert ledger.state.committed_runs(before=3) == set()
    assert ledger.state.committed_runs(before=4) == {"release"}


def test_round_log_must_be_signed_by_a_trainer(kit, bound):
    ledger, reservation = bound
    act = {"rounds_started": 1, "round_log_sha": kit_.sha("log"), "card_sha": kit_.sha("card")}
    act["signer"] = Signer("trainer", b"0" * 32)
    with pytest.raises(SignatureInvalid, match=r"not trusted in the role 'trainer'"):
        ledger.commit(reservation, **act)
    ledger.verify()
    with pytest.MonkeyPatch.context() as around:
        around.setattr(TrustStore, "require", lambda *_: None)  # a writer that does not look
        ledger.commit(reservation, **act)
    with pytest.raises(SignatureInvalid, match="round log"):
        kit.open().verify()


def test_simulation_is_recorded_uncharged_and_never_released(kit):
    ledger = kit.open()
    reservation = ledger.reserve(
        run_id="study", content=kit_.content(noise=0.3, rounds=500, purpose="simulation")
    )
    kit_.bind(ledger, reservation)
    kit_.commit(kit, ledger, reservation, 500)
    assert ledger.spent("all/0").epsilon == 0
    ledger.verify()
    shas = dict.fromkeys(("model_sha", "report_sha", "bundle_sha"), kit_.sha("x"))
    ledger.release(reservation, **shas, name="m", version="1")
    with pytest.raises(LedgerError, match="purpose release"):
        kit.open().verify()


def test_release_repeats_for_the_same_bundle_and_refuses_a_taken_version(kit):
    ledger = kit.open()
    shas = dict.fromkeys(("model_sha", "report_sha", "bundle_sha"), kit_.sha("x"))
    for run in ("monday", "tuesday"):
        reservation = ledger.reserve(run_id=run, content=kit_.content(noise=4.0))
        kit_.bind(ledger, reservation)
        kit_.commit(kit, ledger, reservation, 20)
        if run == "monday":
            first = ledger.release(reservation, **shas, name="m", version="1")
            assert ledger.release(reservation, **shas, name="m", version="1") == first
        else:
            with pytest.raises(Refused, match="another"):
                ledger.release(reservation, **shas, name="m", version="1")


# ---- the two ways of composing ----------------------------------------------------------------


def _series(runs: int, noise: float = 2.0) -> PlannedSeries:
    digest = json_digest(kit_.content(noise=noise)["event"])
    return PlannedSeries(event_sha=digest, relation="REPLACE_ONE", runs=runs)


def test_planned_series_is_priced_by_pld_and_ends_with_its_last_run(tmp_path):
    kit = kit_.make(tmp_path, composition="planned", series=_series(3))
    ledger = kit.open()
    for number in range(3):
        reservation = ledger.reserve(run_id=f"week-{number}", content=kit_.content())
        kit_.bind(ledger, reservation)
        kit_.commit(kit, ledger, reservation, 1)
    expected = price(kit_.event(rounds=60), REPLACE_ONE, kit_.DELTA, runs=3).epsilon
    assert ledger.spent("all/0").epsilon == pytest.approx(expected, rel=1e-9)
    assert ledger.spent("all/0").method == "planned_series"
    with pytest.raises(BudgetExceeded, match="cannot be spent"):
        ledger.reserve(run_id="week-3", content=kit_.content())


@pytest.mark.planted_bug(16)
def test_series_with_another_run_or_one_too_many_has_no_price():
    terms = kit_.terms(composition="planned", series=_series(2))
    run, other = (Charge.planned(kit_.content(noise=noise)) for noise in (2.0, 3.0))
    for charges in ([run, other], [run] * 3):
        with pytest.raises(LedgerError, match="outside the planned series"):
            spent(terms, charges)


def test_block_whose_series_is_complete_drops_out_and_others_stay(tmp_path):
    users = kit_.users("month", 1)
    kit = kit_.make(tmp_path, composition="planned", series=_series(2), users=users)
    ledger = kit.open()
    for number in range(2):
        ledger.reserve(run_id=f"week-{number}", content=kit_.content(blocks=["jan/0"]))
    asked = kit_.content(blocks=["feb/0", "jan/0"])
    assert ledger.reserve(run_id="week-2", content=asked).blocks == ["feb/0"]
    assert ledger.spent("jan/0").charges == 2
    assert ledger.spent("feb/0").charges == 1


def test_planned_series_delta_includes_the_sampler_error_of_each_run():
    terms = kit_.terms(delta=1e-10, composition="planned", series=_series(40, noise=8.0))
    event = canonical_json(kit_.content(noise=8.0)["event"])
    charge = Charge(event, "REPLACE_ONE", 20, 20)
    together = dpe.SelfComposedDpEvent(kit_.event(8.0).event, 40 * kit_.event(8.0).count)
    accountant = pld.PLDAccountant(REPLACE_ONE).compose(together)
    found = spent(terms, [charge] * 40).epsilon
    left = terms.delta - 40 * 2.0**-51 * (1 + math.exp(found))
    assert left < 0.999 * terms.delta
    assert found >= accountant.get_epsilon(left) * (1 - 1e-6)
    assert found > accountant.get_epsilon(terms.delta - 2.0**-51 * (1 + math.exp(found)))


def test_renyi_epsilon_matches_dp_accounting():
    for order, divergence in ((4.0, 0.5), (16.0, 1.0), (3.0, 8.0)):
        theirs, _ = compute_epsilon([order], [divergence], 1e-6)
        assert renyi_epsilon(divergence, order, 1e-6) == pytest.approx(theirs, rel=1e-9)


def test_a_run_that_is_not_of_equal_rounds_stays_charged_in_full():
    equal = dpe.SelfComposedDpEvent(dpe.GaussianDpEvent(1.0), 6)
    assert lowered(equal, 6, 2).count == 2
    epochs = dpe.SelfComposedDpEvent(dpe.GaussianDpEvent(1.0), 2)  # of three rounds each
    assert lowered(epochs, 6, 1) == epochs
    assert lowered(epochs, 6, 0) == dpe.NoOpDpEvent()


def test_renyi_filter_delta_includes_the_sampler_error_of_each_run():
    terms = kit_.terms(delta=1e-10)
    charge = Charge(canonical_json(kit_.content(noise=8.0)["event"]), "REPLACE_ONE", 20, 20)
    runs = 40
    divergence = runs * float(rdp_of(kit_.event(8.0), REPLACE_ONE, [terms.renyi_order])[0])
    found = spent(terms, [charge] * runs).epsilon
    left = terms.delta - runs * 2.0**-51 * (1 + math.exp(found))
    assert left < 0.999 * terms.delta
    assert found >= renyi_epsilon(divergence, terms.renyi_order, left) * (1 - 1e-9)


@pytest.mark.parametrize("signatures", [True, False])
@pytest.mark.parametrize("how", ["spelling", "content"])
def test_changed_last_record_is_found_even_for_display(tmp_path, signatures, how):
    """The policy alone: no record follows it and no signed head names it."""
    kit = kit_.make(tmp_path)
    path, chain = kit.path(0), Chain(open_store(kit.ledger_uri), kit.policy_id, kit.trust)
    document = json.loads(path.read_bytes())
    changed = canonical_json({**document, "actor": "somebody else"})
    path.write_bytes(changed if how == "content" else json.dumps(document).encode())
    with pytest.raises((LedgerError, SignatureInvalid)):
        chain.refresh(signatures=signatures)


def test_terms_are_fixed_for_the_policy(kit):
    kit.open().reserve(run_id="monday", content=kit_.content())
    with pytest.raises(Refused, match="epsilon_cap"):
        kit.open().create_policy(kit_.terms(epsilon_cap=9.0), kit.owner)
    first = kit.open().create_policy(kit_.terms(), kit.owner)
    assert (first.sequence, first.attempt) == (0, 0)


def test_policy_takes_a_rollback_anchor_later_and_keeps_it():
    first, other = (kit_.terms(rollback_anchor_sha=digit * 64) for digit in "ab")
    assert kit_.terms().differences(first) == []
    assert len(first.differences(other)) == len(first.differences(kit_.terms())) == 1


def test_run_that_reaches_the_cap_exactly_is_reserved(tmp_path):
    cost = spent(kit_.terms(), [Charge.planned(kit_.content())]).epsilon
    ledger = kit_.make(tmp_path, epsilon_cap=cost).open()
    assert ledger.reserve(run_id="monday", content=kit_.content()).blocks == ["all/0"]


# ---- what the world does to a store -----------------------------------------------------------


def _at(year):
    class Wrong(datetime):
        @classmethod
        def now(cls, zone=None):
            return cls(year, 1, 1, tzinfo=zone)

    return Wrong


def test_record_times_are_monotonic(kit, monkeypatch):
    ledger = kit.open()
    before = ledger.reserve(run_id="today", content=kit_.content())

    monkeypatch.setattr("fedemb.ledger.records.datetime", _at(1999))
    monkeypatch.setattr(LocalStore, "clock", lambda _: None)
    assert ledger.reserve(run_id="tomorrow", content=kit_.content()).sequence == 2
    records = kit.open().chain.records
    assert records[2].time == records[before.sequence].time
    kit.open().verify()


@pytest.mark.parametrize("whose", ["process", "store"])
@pytest.mark.parametrize("year", [1999, 2099])
def test_record_time_is_checked_against_the_store_clock(kit, monkeypatch, year, whose):
    """A commit dated ten years ahead would block its release until then."""
    ledger = kit.open()
    with monkeypatch.context() as wrong:
        if whose == "process":
            wrong.setattr("fedemb.ledger.records.datetime", _at(year))
        else:
            wrong.setattr(LocalStore, "clock", lambda _: datetime(year, 1, 1, tzinfo=UTC))
        with pytest.raises(StorageError, match="Nothing was written"):
            ledger.reserve(run_id="today", content=kit_.content())
        assert kit.open().head.sequence == 0
    assert ledger.reserve(run_id="today", content=kit_.content()).sequence == 1


def test_ledger_cut_with_its_heads_is_found_at_reservation(kit):
    ledger = kit.open()
    ledger.reserve(run_id="monday", content=kit_.content())
    lost = ledger.reserve(run_id="tuesday", content=kit_.content())
    kit.path(2).unlink()
    shutil.rmtree(kit.path(2).with_name("heads"))
    with pytest.raises(LedgerError, match="tail was cut"):
        kit.open().verify([lost.anchor])
    kit.open().reserve(run_id="impostor", content=kit_.content())
    with pytest.raises(LedgerError, match="rewritten"):
        kit.open().verify([lost.anchor])
    with pytest.raises(LedgerError):
        kit_.bind(kit.open(), lost)


def test_listing_that_lags_behind_is_completed_by_name(kit, monkeypatch):
    ledger = kit.open()
    for number in range(3):
        ledger.reserve(run_id=f"run-{number}", content=kit_.content())

    class Lagging(LocalStore):
        """A remote store whose listing shows the first name of each folder only."""

        def __init__(self, root):
            super().__init__(root)
            self.local_root = None
            self._root = root

        def _path(self, name):
            return self._root / name

        def list(self, prefix=""):
            return [prefix + min(path.name for path in (self._root / prefix).glob("*.json"))]

    monkeypatch.setattr("fedemb.ledger.root.open_store", lambda uri: Lagging(Path(uri)))
    assert kit.reader().head.sequence == 3
    Path(kit.ledger_uri, kit.policy_id, "heads", "00000001.json").unlink()
    assert kit.reader().head.sequence == 3


def test_charge_above_the_cap_in_a_well_signed_ledger_is_found_by_verify(tmp_path):
    """In whatever block it is, not only in the first."""
    kit = kit_.make(tmp_path, users=kit_.users(buckets=2))
    kit.open().reserve(run_id="small", content=kit_.content(blocks=["all/0"]))
    for sequence in (2, 3):
        body = {**kit_.content(rounds=160, blocks=["all/1"]), "blocks": ["all/1"]}
        kit_.forge(
            kit.ledger_uri,
            Signer.load_or_create(kit.keys, "ledger"),
            "reserve",
            body,
            run_id=f"run-{sequence}",
        )
    with pytest.raises(BudgetExceeded, match=r"block all/1 has .* above its cap"):
        kit.open().verify()


def test_nan_price_is_refused(kit, monkeypatch):
    ledger = kit.open()
    ledger.reserve(run_id="monday", content=kit_.content())
    price_of = ledger_state.spent

    def lost(terms, charges):
        return dataclasses.replace(price_of(terms, charges), epsilon=math.nan)

    monkeypatch.setattr(ledger_state, "spent", lost)
    with pytest.raises(BudgetExceeded):
        kit.open().reserve(run_id="tuesday", content=kit_.content())
    with pytest.raises(BudgetExceeded):
        kit.open().verify()


def test_reservation_that_differs_from_its_record_is_refused(reserved):
    ledger, reservation = reserved
    forged = reservation.model_copy(update={"blocks": ["all/0", "all/1"]})
    with pytest.raises(LedgerError, match="something else"):
        kit_.bind(ledger, forged)
    with pytest.raises(LedgerError, match="rewritten"):
        ledger.verify([Anchor(1, kit_.sha("other"), "a note")])


def test_planned_series_refuses_a_run_of_another_plan(tmp_path):
    kit = kit_.make(tmp_path, composition="planned", series=_series(3))
    with pytest.raises(PlanMismatch, match="not of the series"):
        kit.open().reserve(run_id="odd", content=kit_.content(noise=3.0))


def test_run_with_another_delta_than_the_policy_is_refused(kit):
    with pytest.raises(PlanMismatch, match="delta"):
        kit.open().reserve(run_id="monday", content=kit_.content(delta=2e-5))


def test_reader_cannot_write(kit):
    with pytest.raises(Refused, match="opened without a key"):
        kit.reader().reserve(run_id="monday", content=kit_.content())


# ---- One place trains a reservation, and a reservation is bound or given back, never both ----


def test_second_private_root_is_refused(kit):
    ledger = kit.open()
    reservation = ledger.reserve(run_id="monday", content=kit_.content())
    first = kit_.bind(ledger, reservation, root="here")
    with pytest.raises(Refused, match=r"another private root"):
        kit_.bind(kit.open(), reservation, root="there")
    assert kit_.bind(kit.open(), reservation, root="here") == first
    assert kit.open().head == first


def test_copied_or_recreated_store_has_another_claim(tmp_path):
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
def test_concurrent_void_and_bind_cannot_both_succeed(kit, monkeypatch, order):
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
def test_id_rule_is_fixed_for_the_policy(rule):
    asked = terms_of(config(), None)
    other = asked.identifiers.replace(rule, "another/9")
    assert replace(asked, identifiers=other).differences(asked)


def test_image_identity_rule_is_fixed_for_the_policy():
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


def test_held_out_classes_are_fixed_for_the_policy():
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
