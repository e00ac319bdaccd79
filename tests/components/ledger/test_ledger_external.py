"""External charges: composed with the runs, signed by the policy owner, and never left out."""

import itertools
import json
import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation

from fedemb.documents.ledger_record import ChargeRecord
from fedemb.errors import BudgetExceeded, LedgerError, Refused, Superseded
from fedemb.keys import reservation_key_name
from fedemb.keys.trust import Signer
from fedemb.ledger import PlannedSeries, check_high_water
from fedemb.privacy.accounting import rdp_of
from fedemb.release.privacy_report import block_table
from tests.kit import ledger_kit as kit_
from tests.kit.cli import fedemb

ORDER = 8.0


@pytest.fixture
def kit(tmp_path):
    return kit_.make(tmp_path)


def body(name="survey", blocks=("all/0",), relation="ADD_OR_REMOVE_ONE", **form):
    return ChargeRecord(
        name=name,
        blocks=list(blocks),
        relation=relation,
        **{"epsilon": None, "delta": 0.0, "rho": None, **form},
        reason="survey of the analytics team",
    )


def recomputed(divergences, lost=0.0):
    """Returns epsilon of the sum of Renyi divergences, without code of the ledger."""
    delta = kit_.DELTA - lost
    total = sum(divergences)
    of_order = math.log1p(-1 / ORDER) - (math.log(delta) + math.log(ORDER)) / (ORDER - 1)
    return total + of_order


@pytest.mark.planted_bug(26)
def test_cumulative_epsilon_includes_every_form_of_external_charge(kit):
    reservation = kit.open().reserve(run_id="monday", content=kit_.content())
    ledger = kit.open()
    ledger.charge(body("b", rho=0.02), kit.owner)
    ledger.charge(body("c", epsilon=0.2, delta=2e-6), kit.owner)
    ledger.charge(body("d", epsilon=0.5, delta=1e-6), kit.owner)  # pure: above 2 / order
    run = float(rdp_of(kit_.event(), NeighboringRelation.REPLACE_ONE, [ORDER])[0])
    parts = [run, 0.02 * ORDER, 0.2**2 / 2 * ORDER, 0.5]
    for opened in (ledger, kit.reader()):
        spent = opened.spent("all/0")
        assert spent.epsilon == pytest.approx(recomputed(parts, 3e-6), rel=1e-6)
        assert spent.charges == 4
        assert block_table(opened, opened.head.sequence)["all/0"] == spent
        before = block_table(opened, reservation.sequence)["all/0"].epsilon
        assert before == pytest.approx(recomputed(parts[:1]), rel=1e-6)
    kit.reader().verify()


@pytest.mark.planted_bug(26)
def test_charge_on_all_blocks_counts_for_a_block_that_is_used_later(tmp_path):
    kit = kit_.make(tmp_path, users=kit_.users(buckets=2))
    kit.open().reserve(run_id="monday", content=kit_.content())
    kit.open().charge(body(blocks=(), rho=0.02), kit.owner)
    kit.open().reserve(run_id="tuesday", content=kit_.content(blocks=["all/1"]))
    spent = {block: kit.reader().spent(block).epsilon for block in ("all/0", "all/1")}
    run = float(rdp_of(kit_.event(), NeighboringRelation.REPLACE_ONE, [ORDER])[0])
    expected = recomputed([run, 0.02 * ORDER])
    assert spent == pytest.approx(dict.fromkeys(spent, expected), rel=1e-6)


@pytest.mark.planted_bug(26)
def test_run_is_refused_when_an_external_charge_has_spent_the_budget(kit):
    kit.open().charge(body(epsilon=3.5), kit.owner)
    with pytest.raises(BudgetExceeded, match="above the cap"):
        kit.open().reserve(run_id="monday", content=kit_.content())
    assert kit.reader().state.worst_block() == "all/0"
    kit.reader().verify()  # spent elsewhere: the ledger is intact, and its block is full


def test_charges_that_exhaust_delta_have_infinite_epsilon(kit):
    ledger = kit.open()
    ledger.charge(body("a", epsilon=0.1, delta=6e-6), kit.owner)
    ledger.charge(body("b", epsilon=0.1, delta=6e-6), kit.owner)
    assert ledger.spent("all/0").epsilon == math.inf
    with pytest.raises(BudgetExceeded):
        ledger.reserve(run_id="monday", content=kit_.content())


def test_same_charge_is_recorded_once_and_a_name_has_one_content(kit):
    first = kit.open().charge(body(rho=0.01), kit.owner)
    assert kit.open().charge(body(rho=0.01), kit.owner).sequence == first.sequence
    with pytest.raises(Refused, match="recorded with other content"):
        kit.open().charge(body(rho=0.02), kit.owner)


def test_only_the_policy_owner_declares_a_charge(kit):
    with pytest.raises(LedgerError, match="needs a key of the role 'policy'"):
        kit.open().charge(body(rho=0.01), Signer.load_or_create(kit.keys, "ledger"))


@pytest.mark.parametrize(
    ("terms", "changes", "sentence"),
    [
        (
            {"composition": "planned", "series": PlannedSeries("0" * 64, "REPLACE_ONE", 2)},
            {},
            "planned series cannot compose",
        ),
        ({"covers_change_own_data": True}, {}, "does not cover that"),
        ({}, {"relation": "REPLACE_ONE"}, "does not cover that"),
        ({}, {"blocks": ("other/9",)}, "not a user block"),
        ({}, {"relation": "REPLACE_SPECIAL"}, "does not cover that"),
        ({}, {"rho": None, "epsilon": 0.1, "delta": 1e-5}, "no finite epsilon"),
    ],
)
def test_policy_refuses_a_charge_it_cannot_compose(tmp_path, terms, changes, sentence):
    kit = kit_.make(tmp_path, **terms)
    with pytest.raises(Refused, match=sentence):
        kit.open().charge(body(**{"rho": 0.01, **changes}), kit.owner)
    assert kit.reader().head.sequence == 0


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"rho": 0.1, "epsilon": 1.0},
        {"rho": -1.0},
        {"epsilon": 0.0},
        {"epsilon": 1.0, "delta": 1.0},
        {"rho": 0.1, "delta": 1e-6},
    ],
)
def test_loss_is_declared_in_exactly_one_valid_form(kit, form):
    with pytest.raises(Refused, match="declare"):
        kit.open().charge(body(**form), kit.owner)


@pytest.mark.parametrize("epsilon", [math.nan, math.inf, 1e308])
def test_nonfinite_or_huge_declared_loss_is_refused(kit, epsilon):
    fields = {**vars(body(epsilon=1.0)), "epsilon": epsilon}
    with pytest.raises(Refused, match="declared loss"):
        kit.open().charge(ChargeRecord.model_construct(**fields), kit.owner)


def test_command_signs_the_charge_and_marks_it_against_rollback(kit, tmp_path):
    kit.open().reserve(run_id="monday", content=kit_.content())
    before = kit.reader().spent("all/0").epsilon
    where = ["--ledger", kit.ledger_uri, "--keys", kit.keys_uri]
    said = fedemb("ledger", "charge", "survey", "--rho", "0.01", "--reason", "survey", *where)
    assert "record 2" in said
    found = json.loads(fedemb("ledger", "show", *where, "--json"))
    assert found["external"][0]["name"] == "survey"
    assert found["blocks"][0]["epsilon"] > before
    kit.path(2).unlink()
    for head in (tmp_path / "ledger" / "weekly" / "heads").glob("*2.json"):
        head.unlink()
    with pytest.raises(LedgerError, match="older than its markers"):
        check_high_water(kit.reader(), kit.keys)


# ---- Every measurement on evaluation people is a signed record, counted one by one ----


MODEL = kit_.sha("model")


def evaluator(kit):
    return Signer.load_or_create(kit.keys, "evaluate")


def committed(kit, run_id="monday"):
    ledger = kit.open()
    reservation = ledger.reserve(run_id=run_id, content=kit_.content())
    kit_.bind(ledger, reservation)
    kit_.commit(kit, ledger, reservation, 20)
    return kit.reader()


def test_each_evaluation_counts_and_none_changes_what_is_charged(kit):
    ledger = committed(kit)
    spent = ledger.spent("all/0")
    for number in (1, 2):
        record = ledger.record_evaluation("monday", MODEL, evaluator(kit))
        assert (record.kind, record.run_id, record.attempt) == ("evaluation", "monday", 1)
        assert len(ledger.state.evaluations) == number
    again = kit.reader()
    again.verify()
    assert [record.body["model_sha"] for record in again.state.evaluations] == [MODEL, MODEL]
    assert again.spent("all/0") == spent


def test_only_the_newest_start_of_an_evaluation_may_continue(kit):
    """Two processes of one step, each with its own view of the ledger."""
    committed(kit)
    first, second = kit.reader(), kit.reader()
    early = first.record_evaluation("monday", MODEL, evaluator(kit))
    first.check_latest_evaluation(early)
    late = second.record_evaluation("monday", MODEL, evaluator(kit))
    with pytest.raises(Superseded, match="'monday' was started again"):
        first.check_latest_evaluation(early)
    for other in ("friday", "sunday"):
        committed(kit, other).record_evaluation(other, MODEL, evaluator(kit))
    second.check_latest_evaluation(late)
    assert len(kit.reader().state.evaluations) == 4, "each is counted"


def test_evaluation_needs_a_committed_model(kit):
    ledger = kit.open()
    with pytest.raises(Refused, match="no committed model"):
        ledger.record_evaluation("monday", MODEL, evaluator(kit))
    kit_.bind(ledger, ledger.reserve(run_id="monday", content=kit_.content()))
    with pytest.raises(Refused, match="no committed model"):
        ledger.record_evaluation("monday", MODEL, evaluator(kit))
    body = {"reservation": 1, "model_sha": MODEL}
    ledger._append(
        "evaluation", lambda: body, run_id="monday", attempt=lambda: 1, signer=evaluator(kit)
    )
    with pytest.raises(LedgerError, match="only a committed model is measured"):
        kit.reader().verify()


@pytest.mark.parametrize("role", ["ledger", "trainer"])
def test_evaluation_record_needs_the_evaluation_key(kit, role):
    ledger = committed(kit)
    with pytest.raises(LedgerError, match="'evaluate'"):
        ledger.record_evaluation("monday", MODEL, Signer.load_or_create(kit.keys, role))
    with pytest.raises(LedgerError, match="'ledger'"):
        ledger._append("void", lambda: {"reservation": 0, "reason": "x"}, signer=evaluator(kit))


# ---- A year of weekly runs with random crashes and retries: the account holds ----


CAP, NOISE, ROUNDS = 2.5, 4.0, 30


def _live(kit, random):
    """Lives until the budget is spent; returns rounds charged by run, and the refused run."""
    charged: dict[str, int] = {}
    content = kit_.content(noise=NOISE, rounds=ROUNDS)
    for week in itertools.count():
        run_id = f"week-{week:02d}"
        try:
            reservation = kit.open().reserve(run_id=run_id, content=content)
        except BudgetExceeded:
            break
        charged[run_id] = ROUNDS
        fate = random.choice(["well", "crash before key", "crash in training", "stopped", "void"])
        if fate == "void":
            kit.open().void(reservation, "nothing started")
            del charged[run_id]
            continue
        if fate == "crash before key":
            continue  # no one came back: charged in full
        for _ in range(int(random.integers(1, 4))):  # retries of a killed pod repeat each act
            assert kit.open().reserve(run_id=run_id, content=content) == reservation
            kit_.bind(kit.open(), reservation)
        if fate == "crash in training":
            continue
        started = ROUNDS if fate == "well" else int(random.integers(1, ROUNDS))
        kit.keys.load_or_create(reservation_key_name(run_id, 1))
        for _ in range(int(random.integers(1, 3))):
            kit_.commit(kit, kit.open(), reservation, started)
        charged[run_id] = started
    return charged, run_id


def _recomputed(charged: dict[str, int]) -> float:
    """Independent of the ledger: divergence of one round, times all rounds charged."""
    one = float(rdp_of(kit_.event(NOISE, 1), NeighboringRelation.REPLACE_ONE, [ORDER])[0])
    return recomputed([one * sum(charged.values())])


@pytest.mark.parametrize("seed", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_runs_that_crash_are_charged_as_recomputed_until_the_cap_refuses_one(tmp_path, seed):
    kit = kit_.make(tmp_path, epsilon_cap=CAP)
    charged, refused = _live(kit, np.random.default_rng(np.random.SeedSequence([seed])))
    ledger = kit.open()
    ledger.verify()
    assert ledger.spent("all/0").epsilon == pytest.approx(_recomputed(charged), rel=1e-6)
    assert len(charged) > 5
    assert _recomputed({**charged, refused: ROUNDS}) > CAP
    assert (refused, 1) not in ledger.state.attempts
    assert not kit.keys.exists(reservation_key_name(refused, 1))
