"""Every reason code of the gate is named by a test, and each rule denies without help of another.

The tests here cover the codes that no other test of this folder names. Each asserts the exact list
of codes, so it fails when its rule is removed. `tests/planted_bugs/runner.py` removes every
rule in turn and runs the tests that name its code.
"""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from fedemb.documents.evidence import read_evidence
from fedemb.documents.plan import PrivacyPlan
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.foundation.document import encode, read, written
from fedemb.foundation.files import write_bytes
from fedemb.keys.trust import Signer, sign_document
from fedemb.ledger import Ledger, read_reservation
from fedemb.privacy.guarantee import event_to_json
from fedemb.privacy.registry import plan_mechanism
from fedemb.release.decide import RULES, decide
from fedemb.release.privacy_report import build_report
from fedemb.steps import reserve_budget
from tests.kit import ledger_kit
from tests.kit.pipeline_runs import honest_run
from tests.planted_bugs.runner import named_codes


def judged(run, *, change=None, ledger=None, report=None, **bent):
    """Codes of the verdict on a run whose report was built again and signed by its own key.

    Args:
      run: the run in its folder.
      change: function of the report's content, applied before signing.
      ledger: the ledger to judge by, as read or bent by the test.
      report: False keeps the report that is in the folder.
      **bent: fields of the evidence that the test replaces.
    """
    evidence = dataclasses.replace(read_evidence(run.config, run.artifacts), **bent)
    ledger = ledger or run.ledger()
    if report is False:
        return codes(decide(evidence, read(run.report, PrivacyReport), ledger))
    head = ledger.head
    built = build_report(
        evidence, plan_mechanism(run.config), ledger, time=head.time, head_sequence=head.sequence
    )
    content = built.content()
    if change:
        change(content)
        built = PrivacyReport.of_fields({k: v for k, v in content.items() if k != "schema"})
    signer = Signer.newest(run.keys, "report")
    return codes(decide(evidence, written(built, signer.sign(built.content())), ledger))


def codes(verdict):
    assert verdict.allow == (not verdict.reasons)
    return list(dict.fromkeys(reason.code for reason in verdict.reasons))


def until_measured(run):
    run.do("plan reserve partition train measure")
    return run


def with_terms(run, **changes):
    """The ledger as if its policy had accepted other terms."""
    ledger = run.ledger()
    ledger.state.terms = dataclasses.replace(ledger.terms, **changes)
    return ledger


# The list of codes


def test_every_rule_is_named_by_a_test():
    """A new rule needs a test that names its code; else nothing shows that it denies."""
    missing = {rule.code for rule in RULES} - named_codes().keys()
    assert not missing, f"no test of tests/components/gate names {sorted(missing)}"


# Ledger and reservation


def append(run, kind, body, **fields):
    """Writes a record with the ledger's own key, without the checks of the admission."""
    signer, time = Signer.load_or_create(run.keys, "ledger"), run.ledger().head.time
    ledger_kit.forge(run.ledger_uri, signer, kind, body, **fields, time=time)


def test_block_over_its_cap_as_of_the_report_is_denied(run):
    """The ledger is in order again when the gate reads it; the report was made before."""
    content = ledger_kit.content(noise=0.5, rounds=200)
    number = len(run.ledger().chain.records)
    named = {"run_id": "tuesday", "attempt": 1}
    append(run, "reserve", {**content, "blocks": content["blocks_requested"]}, **named)
    ledger = run.ledger()
    assert ledger.spent("all/0").epsilon > ledger.terms.epsilon_cap
    evidence = read_evidence(run.config, run.artifacts)
    report = build_report(
        evidence, plan_mechanism(run.config), ledger, time=ledger.head.time, head_sequence=number
    )
    run.sign(run.report, report)
    append(run, "void", {"reservation": number, "reason": "given back"}, **named)
    ledger = run.ledger()
    assert ledger.spent("all/0").epsilon < ledger.terms.epsilon_cap
    assert judged(run, ledger=ledger, report=False) == ["block_over_cap"]


def test_block_over_its_cap_now_is_denied_by_the_rule_itself(run, monkeypatch):
    """`Ledger.verify` refuses first; without it the rule still compares what is spent now."""
    content = ledger_kit.content(noise=0.5, rounds=200)
    body = {**content, "blocks": content["blocks_requested"]}
    append(run, "reserve", body, run_id="tuesday", attempt=1)
    assert judged(run, report=False) == ["ledger_broken", "block_over_cap"]
    monkeypatch.setattr(Ledger, "verify", lambda ledger, anchors: ledger.refresh())
    assert judged(run, report=False) == ["block_over_cap"]


@pytest.fixture
def charged_as(tmp_path, monkeypatch):
    """Makes a measured run whose reservation charged something else than its plan says."""

    def make(change):
        charged = reserve_budget.charged_content
        monkeypatch.setattr(reserve_budget, "charged_content", lambda *of: change(charged(*of)))
        return until_measured(honest_run.start(tmp_path))

    return make


def test_run_reserved_as_a_simulation_is_denied(charged_as):
    """A simulation weighs on no block, whatever the configuration says afterwards."""
    run = charged_as(lambda content: {**content, "purpose": "simulation"})
    assert run.config.purpose == "release"
    assert "simulation" in judged(run, ledger=run.ledger())


def test_reservation_of_another_policy_is_denied(run):
    config = run.config.updated({"policy.policy_id": "daily"})
    assert "other_policy" in judged(run, config=config, report=False)


def test_charge_under_another_relation_than_the_plan_s_is_denied(charged_as):
    """Add-or-remove is cheaper, and ledger and reservation agree on it."""
    run = charged_as(lambda content: {**content, "relation": "ADD_OR_REMOVE_ONE"})
    assert plan_mechanism(run.config).relation.name == "REPLACE_ONE"
    assert read_reservation(run.reservation).relation == "ADD_OR_REMOVE_ONE"
    assert judged(run) == ["event_differs"]


# Mechanism, epsilon and delta


PRICES = {
    "guarantee": lambda plan: {**plan["guarantee"], "epsilon": 0.01},
    "event": lambda plan: {**plan["event"], "count": 5},
    "epsilon_rdp": lambda plan: plan["epsilon_rdp"] / 2,
    "zcdp_rho": lambda _: 1e-3,
    "users_lower_bound": lambda plan: plan["users_lower_bound"] + 1,
    "accounting_library": lambda _: "dp-accounting 0.1",
}


@pytest.mark.parametrize("figure", PRICES)
def test_plan_with_a_figure_that_differs_from_the_configuration_is_denied(run, figure):
    """Signed with the key of the planning step."""
    plan = json.loads(run.plan.read_text())
    run.rewrite(run.plan, **{figure: PRICES[figure](plan)})
    assert judged(run) == ["plan_differs"]


def test_charge_of_another_event_than_the_plan_s_is_denied(charged_as):
    """Ledger and reservation agree on a smaller charge; only the plan shows the difference."""
    run = charged_as(lambda content: {**content, "event": {**content["event"], "count": 1}})
    assert judged(run) == ["event_differs"]


@pytest.mark.parametrize("factor", [0.5, 0.98, 1.02, None])
def test_epsilon_of_the_report_that_is_not_the_recomputed_one_is_denied(run, factor):
    """By its own rule: the comparison of the whole report, which follows, is another check."""

    def understated(content):
        epsilon = content["accounting"]["epsilon"]
        content["accounting"]["epsilon"] = factor and epsilon * factor

    assert judged(run, change=understated)[0] == "epsilon_differs"


def test_plan_without_noise_is_denied_as_no_privacy(run, tmp_path):
    changes = {"purpose": "simulation", "mechanism.noise_multiplier": 0.0}
    other = honest_run.start(tmp_path / "other", **changes)
    other.do_plan()
    found = judged(run, config=other.config, plan=read(other.plan, PrivacyPlan), report=False)
    assert {"no_proof", "no_privacy"} <= set(found)


def test_epsilon_above_the_cap_of_the_policy_is_denied(run):
    epsilon = json.loads(run.report.read_text())["accounting"]["epsilon"]
    for cap, denied in ((epsilon * 0.999, True), (epsilon * 1.001, False)):
        found = judged(run, ledger=with_terms(run, epsilon_cap=cap), report=False)
        assert ("epsilon_above_cap" in found) == denied


def test_delta_that_is_not_below_one_over_n_is_denied(run):
    """Policy and configuration agree on it, as if the ledger had accepted such a policy."""
    for users, denied in ((100_000, True), (99_999, False)):
        ledger = with_terms(run, users_lower_bound=users)
        found = judged(run, ledger=ledger, report=False)
        assert ("delta_too_large" in found) == denied
        assert "delta_above_customary" in found


@pytest.mark.parametrize("delta", [1e-6, 2e-5])
def test_delta_that_is_not_the_policy_s_is_denied(run, delta):
    found = judged(run, ledger=with_terms(run, delta=delta), report=False)
    assert "delta_too_large" in found


def test_delta_above_the_customary_one_is_denied_unless_waived(tmp_path):
    changes = {"policy.delta": 4e-5, "policy.epsilon_cap": 10.0}
    run = honest_run.start(tmp_path, **changes).until_gate()
    assert 20_000**-1.1 < 4e-5 < 1 / 20_000
    assert judged(run, report=False) == ["delta_above_customary"]
    run.waive("delta_above_customary")
    assert judged(run) == []


# Documents, inputs, rounds and weights


@pytest.mark.parametrize("name", ["plan", "users", "audit", "utility"])
def test_document_that_its_step_did_not_sign_is_denied(run, name):
    """The content is honest and the report is built from it: only the signature is at fault."""
    path = getattr(run, name)
    fields = json.loads(path.read_text())
    fields.pop("signature")
    role = honest_run.ROLES[fields["schema"].split("/")[1]]
    write_bytes(path, encode(sign_document(fields, Signer(role, b"1" * 32))))
    assert judged(run) == ["document_unsigned"]


def test_reservation_without_signature_is_denied(run):
    found = read_evidence(run.config, run.artifacts).reservation
    unsigned = dataclasses.replace(found, signature=None)
    assert judged(run, reservation=unsigned) == ["reservation_invalid"]


def test_model_card_that_the_trainer_did_not_sign_is_denied(tmp_path, monkeypatch):
    """The commit names this very card, so no other rule checks its signer."""
    run = honest_run.start(tmp_path)
    commit = run.do_commit

    def of_a_stranger():
        card = run.model / "model.json"
        fields = json.loads(card.read_text())
        fields.pop("signature")
        write_bytes(card, encode(sign_document(fields, Signer("trainer", b"1" * 32))))
        commit()

    monkeypatch.setattr(run, "do_commit", of_a_stranger)
    assert judged(until_measured(run)) == ["document_unsigned"]


def test_inputs_digest_that_differs_from_the_inputs_is_denied(tmp_path, monkeypatch):
    """Ledger and model agree on the digest; only computing it again shows that it is another's."""
    run = honest_run.start(tmp_path)
    monkeypatch.setattr(run, "inputs_sha", lambda: "7" * 64)
    assert judged(until_measured(run)) == ["inputs_differ"]


@pytest.mark.parametrize(
    "changes",
    [
        {"clients_planned": 21.0},
        {"event": None},
        {"event": event_to_json(PoissonSampledDpEvent(0.05, GaussianDpEvent(1.0)))},
    ],
    ids=["planned clients", "no event", "another event"],
)
def test_round_line_that_differs_from_the_plan_is_denied(tmp_path, monkeypatch, changes):
    """The trainer logged, signed and committed it: only the rule about its content is left."""
    run = honest_run.start(tmp_path)
    honest = run.write_rounds

    def bent(lines):
        honest([*lines[:3], {**lines[3], **changes}, *lines[4:]])

    monkeypatch.setattr(run, "write_rounds", bent)
    assert judged(until_measured(run)) == ["round_line_differs"]


def test_round_line_with_a_wrong_round_number_is_denied(tmp_path, monkeypatch):
    run = honest_run.start(tmp_path)
    honest = run.write_rounds
    monkeypatch.setattr(
        run, "write_rounds", lambda lines: honest([*lines[:5], {**lines[5], "round": 4}])
    )
    assert judged(until_measured(run)) == ["round_log_incomplete", "round_line_differs"]


def test_model_file_that_the_card_does_not_name_is_denied(run):
    """Same tensors, other numbers, put in place after the commit."""
    tensors = json.loads((run.model / "model.json").read_text())["tensors"]
    honest_run.write_model_file(run.model / "backbone.keras", tensors, seed=5)
    assert judged(run) == ["weights_differ", "foreign_tensor"]


def test_round_log_that_was_swapped_after_the_commit_is_denied(run):
    lines = [json.loads(line) for line in (run.model / "rounds.jsonl").read_text().splitlines()]
    run.write_rounds([{**lines[0], "output_sha": "9" * 64}, *lines[1:]])
    assert judged(run) == ["round_log_changed"]


# Each field that a rule compares


def bent(run, document, **fields):
    """Reasons of a verdict on evidence with other fields of one document, by sentence."""
    evidence = read_evidence(run.config, run.artifacts)
    found = getattr(evidence, document)
    changed = dataclasses.replace(found, body=found.body.model_copy(update=fields))
    evidence = dataclasses.replace(evidence, **{document: changed})
    return decide(evidence, read(run.report, PrivacyReport), run.ledger()).reasons


BOUND = {
    "model": {
        "run_id": "tuesday",
        "attempt": 2,
        **dict.fromkeys(("config_sha", "plan_sha", "code_sha", "inputs_sha"), "0" * 64),
        "backbone": "resnet18",
        "embedding_dim": 9,
    },
    "users": {
        "run_id": "tuesday",
        **dict.fromkeys(("config_sha", "reservation_sha"), "0" * 64),
        "blocks": ["all/1"],
        "virtual_clients": 401,
        "groupings": 2,
        "image_size": 29,
        "channels": 3,
    },
}
OTHER_BOOTSTRAP = SimpleNamespace(samples=1, unit="user", groups=3)
MEASURED = {
    "audit": {
        "mechanism": None,
        "attack": "another",
        "unit": "image",
        **dict.fromkeys(("model_sha", "config_sha"), "0" * 64),
        "run_id": "tuesday",
        "users_at_most": 7,
        "bootstrap_samples": 7,
        "split_by_value": True,
    },
    "utility": {
        **dict.fromkeys(("model_sha", "config_sha"), "0" * 64),
        "run_id": "tuesday",
        **dict.fromkeys(("bootstrap.samples", "bootstrap.groups"), OTHER_BOOTSTRAP),
        "public_kind": "another",
        "embedding_space_id": "es-0",
        "headline_rate": "0.01",
        "recall_at_far": {},
    },
}


def cases(table):
    return [
        pytest.param(document, field, value, id=f"{document}.{field}")
        for document, fields in table.items()
        for field, value in fields.items()
    ]


@pytest.mark.parametrize(("document", "field", "value"), cases(BOUND))
def test_each_field_that_the_ledger_binds_is_compared(allowed_run, document, field, value):
    """As if the step had signed it: the sentence names the field, so no other rule caused it."""
    reasons = bent(allowed_run, document, **{field: value})
    named = [item.sentence for item in reasons if item.code == "not_what_was_reserved"]
    assert any(sentence.startswith(f"{document}.{field} ") for sentence in named)


@pytest.mark.parametrize(("document", "field", "value"), cases(MEASURED))
def test_each_field_of_a_measurement_is_compared(allowed_run, document, field, value):
    reasons = bent(allowed_run, document, **{field.partition(".")[0]: value})
    named = [item.sentence for item in reasons if item.code == f"{document}_stale"]
    assert any(f" another {field}" in sentence for sentence in named)


def test_commitments_to_the_data_are_compared_with_the_bind(allowed_run):
    evidence = read_evidence(allowed_run.config, allowed_run.artifacts)
    other = evidence.users.body.commitments.model_copy(update={"evaluation": "9" * 64})
    reasons = bent(allowed_run, "users", commitments=other)
    assert any(item.sentence.startswith("users.commitments ") for item in reasons)
