"""What the gate denies for certain is refused before a run is charged."""

from types import SimpleNamespace

import numpy as np
import pytest
from dp_accounting import NeighboringRelation, ZCDpEvent

from fedemb.documents.ledger_record import ChargeRecord
from fedemb.documents.plan import read_plan
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.verdict import VerdictDocument
from fedemb.errors import ArtifactError, BudgetExceeded, GateDenied, Refused, UnsupportedAccounting
from fedemb.foundation.canonical_json import file_digest
from fedemb.foundation.document import read
from fedemb.foundation.files import write_bytes
from fedemb.keys.trust import Signer
from fedemb.privacy import accounting, prices
from fedemb.privacy.accounting import rdp_of
from fedemb.privacy.group_mechanisms import GroupPoissonGaussian
from fedemb.release import privacy_rules, rule
from fedemb.release.decide import RULES, check_before_charge
from fedemb.reports.privacy_words import all_runs
from fedemb.steps import reserve_budget
from fedemb.steps.reserve_budget import open_or_create
from tests.components.ledger.test_ledger_external import recomputed
from tests.kit.pipeline_runs import honest_run
from tests.kit.public_start import sign_start, small_weights


def _context(root, **changes):
    (root / "images").mkdir(exist_ok=True)
    (root / "images" / "one").write_bytes(b"1")
    changes = {"data.source.uri": str(root / "images"), **changes}
    run = honest_run.start(root, policy_root=root, **changes)
    run.do_plan()
    return run.context()


def _charged(root):
    return [path.name for path in sorted((root / "ledger" / "weekly").glob("0*.json"))][1:]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_start_that_is_not_finite_is_not_charged(tmp_path, value):
    """Every model from it is NaN, and the gate would deny it after the budget is spent."""
    context = _context(tmp_path)
    write_bytes(tmp_path / "pretrained" / "backbone.keras", small_weights(value))
    sign_start(context)
    with pytest.raises(ArtifactError, match=r"NaN or infinite weights.*Nothing was charged"):
        reserve_budget.run(context)
    assert _charged(tmp_path) == []


@pytest.mark.parametrize("data", [b"weights", b""])
def test_start_that_no_model_can_be_compared_with_is_not_charged(tmp_path, data):
    context = _context(tmp_path)
    write_bytes(tmp_path / "pretrained" / "backbone.keras", data)
    sign_start(context)
    with pytest.raises(ArtifactError, match=r"not a readable \.keras file"):
        reserve_budget.run(context)
    assert _charged(tmp_path) == []


def test_start_with_a_tensor_that_the_gate_calls_foreign_is_not_charged(tmp_path):
    context = _context(tmp_path)
    tensors = [{"name": "seed_generator/state", "shape": [2]}]
    names = ["layers/dropout/seed_generator/vars/0"]
    data = honest_run.model_file(tensors, names)
    write_bytes(tmp_path / "pretrained" / "backbone.keras", data)
    sign_start(context)
    with pytest.raises(ArtifactError, match=r"seed_generator.*Nothing was charged"):
        reserve_budget.run(context)
    assert _charged(tmp_path) == []


def test_a_simulation_may_start_from_any_weights(tmp_path):
    context = _context(tmp_path, purpose="simulation")
    write_bytes(tmp_path / "pretrained" / "backbone.keras", small_weights(np.nan))
    sign_start(context)
    reserve_budget.run(context)
    assert _charged(tmp_path) == ["00000001.json"]


def test_a_version_that_another_run_released_is_a_warning(tmp_path, caplog):
    """A run may be resumed with another release.version."""
    first = honest_run.start(tmp_path / "first").until_release()
    second = honest_run.start(tmp_path / "second", "tuesday", first.policy_root)
    second.do("plan reserve")
    assert "glyphs 1.0 is released already; set another release.version" in caplog.text


def _priced(epsilon):
    def change(monkeypatch):
        found = SimpleNamespace(epsilon=epsilon, accountant="rdp")
        monkeypatch.setattr(rule, "guarantee_of", lambda *_: found)

    return change


def _accountants_disagree(monkeypatch):
    monkeypatch.setattr(privacy_rules, "epsilon_rdp", lambda *_: 1e-3)


def _old_library(monkeypatch):
    def refuse():
        raise UnsupportedAccounting("too old")

    prices.guarantee_of.cache_clear()
    monkeypatch.setattr(accounting, "library_version", refuse)


def _without_proof(monkeypatch):
    monkeypatch.setattr(GroupPoissonGaussian, "proof", "")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        pytest.param(_priced(50.0), BudgetExceeded, "above the cap", id="cap"),
        pytest.param(_priced(np.inf), Refused, "epsilon is inf", id="infinite"),
        pytest.param(_priced(np.nan), Refused, "epsilon is nan", id="nan"),
        pytest.param(_accountants_disagree, Refused, "by RDP", id="accountants"),
        pytest.param(_old_library, UnsupportedAccounting, "too old", id="library"),
        pytest.param(_without_proof, Refused, "no proven guarantee", id="proof"),
    ],
)
def test_cause_that_the_gate_denies_is_not_charged(tmp_path, monkeypatch, change, error, words):
    context = _context(tmp_path)
    sign_start(context)
    change(monkeypatch)
    with pytest.raises(error, match=words):
        reserve_budget.run(context)
    assert _charged(tmp_path) == []


def test_delta_that_the_gate_denies_is_not_charged(tmp_path):
    """A configuration cannot hold it, so it is put in after validation."""
    context = _context(tmp_path)
    sign_start(context)
    plan, _ = read_plan(context.artifacts.privacy_plan, context.config)
    ledger = open_or_create(context.ledger_uri, context.keys, context.config, plan)
    path = context.artifacts.pretrained / "backbone.keras"
    given = {
        "run_id": "monday",
        "start": (path, file_digest(path)),
    }
    check_before_charge(context.config, plan, ledger, **given)
    for delta in (1 / 20_000, 0.0, np.nan):
        policy = context.config.policy.model_copy(update={"delta": delta})
        config = context.config.model_copy(update={"policy": policy})
        with pytest.raises(Refused, match="is not below 1/20000"):
            check_before_charge(config, plan, ledger, **given)


@pytest.mark.long
def test_waivable_reasons_are_warnings(tmp_path, caplog):
    context = _context(
        tmp_path,
        **{
            "pretraining": {"kind": "import", "import_path": "public.keras"},
            "policy.delta": 4e-5,
            "release.no_worse_than": "previous_release",
        },
    )
    sign_start(context)
    reserve_budget.run(context)
    warned = {rule.code for rule in RULES if rule.before and rule.waivable}
    assert all(code in caplog.text for code in {*warned, "worse_than_previous_release"})


# ---- An external charge counts at the gate of every later run on the same users ----


ORDER = 8.0


def declare(run, rho):
    """Charges a release made elsewhere to the users of a run."""
    loss = {"relation": "ADD_OR_REMOVE_ONE", "epsilon": None, "delta": 0.0, "rho": rho}
    ledger = run.ledger()
    owner = Signer.current(run.keys, "policy", ledger.chain.trust)
    survey = ChargeRecord(name=f"survey {rho}", blocks=[], **loss, reason="quarterly survey")
    ledger.charge(survey, owner)


@pytest.fixture
def first(tmp_path):
    run = honest_run.start(tmp_path / "first", **{"policy.composition": "renyi"})
    run.until_gate()
    run.do_gate()
    return run


def later(first, tmp_path):
    run = honest_run.start(tmp_path / "later", "tuesday", first.policy_root)
    run.config = first.config
    return run


def divergences(first, rhos):
    """Renyi divergences of two equal runs and of the declared losses, without the ledger."""
    from fedemb.privacy.registry import plan_mechanism

    plan = plan_mechanism(first.config)
    run = float(rdp_of(plan.event(), plan.relation, [ORDER])[0])
    one = NeighboringRelation.REPLACE_ONE
    declared = [float(rdp_of(ZCDpEvent(rho=rho, xi=0.0), one, [ORDER])[0]) for rho in rhos]
    return [run, run, *declared]


@pytest.mark.planted_bug(16)
def test_later_run_is_allowed_with_the_charge_in_its_report(first, tmp_path):
    declare(first, 0.01)
    run = later(first, tmp_path)
    run.until_gate()
    run.do_gate()
    report = read(run.report, PrivacyReport).body
    epsilon = recomputed(divergences(first, [0.01]))
    assert report.cumulative.max_block_epsilon == pytest.approx(epsilon, rel=1e-6)
    assert report.cumulative.max_block_epsilon > recomputed(divergences(first, []))
    assert "all 3 charges of policy 'weekly'" in all_runs(report)


@pytest.mark.planted_bug(16)
@pytest.mark.parametrize("moment", ["before the report", "after the report"])
def test_gate_denies_a_run_whose_block_passed_the_cap_by_a_charge(first, tmp_path, moment):
    run = later(first, tmp_path)
    run.do("plan reserve")
    if moment == "before the report":
        declare(first, 0.4)
    run.do("partition train measure account")
    if moment == "after the report":
        declare(first, 0.4)
    with pytest.raises(GateDenied):
        run.do_gate()
    assert "block_over_cap" in read(run.verdict, VerdictDocument).body.reasons
