"""An external charge counts at the gate of every later run on the same users."""

import pytest
from dp_accounting import NeighboringRelation, ZCDpEvent

from fedemb.documents.ledger_record import ChargeRecord
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.verdict import VerdictDocument
from fedemb.errors import GateDenied
from fedemb.foundation.document import read
from fedemb.keys.trust import Signer
from fedemb.privacy.accounting import rdp_of
from fedemb.reports.privacy_words import all_runs
from tests.components.ledger.test_ledger_external import recomputed
from tests.kit.pipeline_runs import honest_run

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
