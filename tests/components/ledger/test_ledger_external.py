"""External charges: composed with the runs, signed by the policy owner, and never left out."""

import json
import math

import pytest
from dp_accounting import NeighboringRelation
from typer.testing import CliRunner

from fedemb.documents.ledger_record import ChargeRecord
from fedemb.errors import BudgetExceeded, LedgerError, Refused
from fedemb.keys.trust import Signer
from fedemb.ledger import PlannedSeries, check_high_water
from fedemb.pipelines.cli.ledger import app
from fedemb.privacy.accounting import rdp_of
from fedemb.release.privacy_report import block_table
from tests.kit import ledger_kit as kit_

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
    ledger.charge(body("d", epsilon=0.5), kit.owner)
    run = float(rdp_of(kit_.event(), NeighboringRelation.REPLACE_ONE, [ORDER])[0])
    parts = [run, 0.02 * ORDER, 0.2**2 / 2 * ORDER, 0.5]
    for opened in (ledger, kit.reader()):
        spent = opened.spent("all/0")
        assert spent.epsilon == pytest.approx(recomputed(parts, 2e-6), rel=1e-6)
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


def test_charges_without_any_delta_left_have_no_finite_epsilon(kit):
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
            {
                "composition": "planned",
                "series": PlannedSeries("0" * 64, "REPLACE_ONE", 2),
            },
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


@pytest.mark.parametrize("epsilon", [math.nan, math.inf])
def test_loss_that_is_no_number_is_refused(kit, epsilon):
    fields = {**vars(body(epsilon=1.0)), "epsilon": epsilon}
    with pytest.raises(Refused, match="declared loss"):
        kit.open().charge(ChargeRecord.model_construct(**fields), kit.owner)


def test_command_signs_the_charge_and_marks_it_against_rollback(kit, tmp_path):
    kit.open().reserve(run_id="monday", content=kit_.content())
    before = kit.reader().spent("all/0").epsilon
    where = ["--ledger", kit.ledger_uri, "--keys", kit.keys_uri]
    out = CliRunner().invoke(
        app,
        [
            *("charge", "survey", "--rho", "0.01"),
            *("--reason", "survey", *where),
        ],
    )
    assert out.exit_code == 0, out.output
    assert "record 2" in out.output
    shown = CliRunner().invoke(app, ["show", *where, "--json"])
    found = json.loads(shown.output)
    assert found["external"][0]["name"] == "survey"
    assert found["blocks"][0]["epsilon"] > before
    kit.path(2).unlink()
    for head in (tmp_path / "ledger" / "weekly" / "heads").glob("*2.json"):
        head.unlink()
    with pytest.raises(LedgerError, match="older than its markers"):
        check_high_water(kit.reader(), kit.keys)
