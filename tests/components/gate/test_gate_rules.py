"""Each deny rule of docs/reference/gate.md by itself, with its reason and remedy."""

import dataclasses
import json
import math
from datetime import UTC, datetime, timedelta

import pytest

from fedemb.documents.evidence import read_evidence
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.errors import ArtifactError, GateDenied, PlanMismatch, Refused, StorageError
from fedemb.foundation.canonical_json import file_digest
from fedemb.foundation.document import encode, parse, read
from fedemb.foundation.files import write_bytes
from fedemb.keys.trust import Signer, sign_document
from fedemb.ledger import read_reservation
from fedemb.privacy.registry import plan_mechanism
from fedemb.release import privacy_rules
from fedemb.release.decide import RULES, WAIVABLE, decide
from fedemb.release.privacy_report import build_report, covers_change_own_data
from fedemb.release.rule import differences
from fedemb.steps import reserve_budget
from tests.kit import ledger_kit
from tests.kit.pipeline_runs import honest_run

BLIND = {"value": 0.5, "low": 0.45, "high": 0.55}
NULLS = honest_run.SELF_TEST["no_leak"]
ATTACKED = {"auroc": BLIND, "tpr_at_fpr": {"0.01": BLIND}}


def verdict_of(run, *, now=None, same_environment=True, **changes):
    """Decides on a run whose report was made again after the change."""
    evidence = read_evidence(run.config, run.artifacts)
    report = read(run.report, PrivacyReport)
    if changes:
        signer = Signer.load_or_create(run.keys, "report")
        data = encode(sign_document({**report.content, **changes}, signer))
        report = parse(data, PrivacyReport, "changed")
    ledger = run.ledger()
    return decide(evidence, report, ledger, now=now, same_environment=same_environment)


def codes(verdict):
    return [reason.code for reason in verdict.reasons]


def table_of(run, factor):
    """The figures over all runs, with epsilons of the block table that differ by a factor."""
    cumulative = json.loads(run.report.read_text())["cumulative"]
    table = [{**row, "epsilon": row["epsilon"] * factor} for row in cumulative["blocks"]]
    return {**cumulative, "blocks": table}


@pytest.mark.parametrize(
    ("one", "other"),
    [({}, []), ({}, None), ([1], [1, 2]), (1.0, 1), (1, True), (1.0, math.nan), (1.0, 1.00001)],
)
def test_values_of_another_type_length_or_number_differ(one, other):
    assert differences({"a": one}, {"a": other}) == ["a"] == differences({"a": other}, {"a": one})


@pytest.mark.parametrize("same_environment", [True, False])
def test_block_table_that_differs_from_the_ledger_is_denied(run, same_environment):
    found = verdict_of(run, same_environment=same_environment, cumulative=table_of(run, 0.98))
    assert "report_differs" in codes(found)


def test_plan_or_report_of_another_backend_is_denied(run):
    """Each signed by its own step, and the report made again of a plan that names the other one."""
    report = json.loads(run.report.read_text())
    assert report["mechanism"]["backend"] == run.config.training.backend == "tensorflow"
    verdict = verdict_of(run, mechanism={**report["mechanism"], "backend": "jax"})
    assert codes(verdict) == ["report_differs"]
    assert "mechanism.backend" in verdict.reasons[0].sentence
    run.rewrite(run.plan, backend="jax")
    with pytest.raises(PlanMismatch, match="on jax, the configuration asks for tensorflow"):
        run.do_account()
    evidence = read_evidence(run.config, run.artifacts)
    ledger, plan = run.ledger(), plan_mechanism(run.config)
    made = build_report(
        evidence, plan, ledger, time=report["time"], head_sequence=ledger.head.sequence
    )
    assert made.mechanism.backend == "jax"
    verdict = verdict_of(run, **made.content())
    assert "plan_differs" in codes(verdict)
    assert not verdict.allow


def test_report_unsigned_or_signed_by_an_unknown_key_is_denied(run):
    report = json.loads(run.report.read_text())
    signature = report.pop("signature")
    write_bytes(run.report, encode(report))
    assert codes(verdict_of(run))[0] == "report_unsigned"
    write_bytes(run.report, encode({**report, "signature": {**signature, "value": "0" * 128}}))
    assert codes(verdict_of(run))[0] == "report_unsigned"
    write_bytes(run.report, encode(sign_document(report, Signer("report", b"1" * 32))))
    assert codes(verdict_of(run))[0] == "report_unsigned"


def test_accountants_that_disagree_are_denied(run, monkeypatch):
    monkeypatch.setattr(privacy_rules, "epsilon_rdp", lambda plan, delta: 0.1)
    assert "accountants_disagree" in codes(verdict_of(run))


@pytest.mark.planted_bug(14)
@pytest.mark.parametrize("extra", ["head/kernel", "optimizer/vars/0", "seed_generator/state", ""])
def test_foreign_tensor_in_the_model_file_is_denied(tmp_path, extra):
    """Without a name: a known one has another shape."""
    run = honest_run.start(tmp_path)
    names = ["layers/conv2d/vars/0", "layers/conv2d/vars/1", "layers/dense/vars/0", extra]
    tensors = [*honest_run.TENSORS, {"name": extra, "shape": [2]}]
    if not extra:
        names, tensors = None, [*honest_run.TENSORS[:-1], {**honest_run.TENSORS[-1], "shape": [9]}]
    honest_run.write_model_file(run.model / "backbone.keras", tensors, names)
    run.until_gate()
    assert "foreign_tensor" in codes(verdict_of(run))


@pytest.mark.planted_bug(14)
def test_weights_replaced_after_the_commit_are_denied(run):
    """Same names and shapes, and a model.json that names the new file: only the commit can tell."""
    tensors = json.loads((run.model / "model.json").read_text())["tensors"]
    honest_run.write_model_file(run.model / "backbone.keras", tensors, seed=1)
    swapped = file_digest(run.model / "backbone.keras")
    run.rewrite(run.model / "model.json", weights_sha=swapped)
    run.do("measure account")
    assert codes(verdict_of(run)) == ["model_card_changed"]


def test_model_folder_with_a_further_file_is_denied(run):
    (run.model / "head.keras").write_bytes(b"")
    with pytest.raises(GateDenied, match=r"head\.keras"):
        run.do_gate()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"self_test": {**honest_run.SELF_TEST, "missing_side_refused": False}}, "auditor_blind"),
        ({"self_test": {**honest_run.SELF_TEST, "planted_leak": BLIND}}, "auditor_blind"),
        ({"self_test": {**honest_run.SELF_TEST, "reversed_sign": BLIND}}, "auditor_blind"),
        (
            {"self_test": {**honest_run.SELF_TEST, "no_leak": {**NULLS, "alarms": 20}}},
            "auditor_blind",
        ),
        (
            {"self_test": {**honest_run.SELF_TEST, "no_leak": {**NULLS, "trials": 0}}},
            "auditor_blind",
        ),
        ({"figures": "open"}, "audit_figures_open"),
        ({"measured": {"plain": ATTACKED, "calibrated": ATTACKED}}, "audit_figures_open"),
    ],
)
def test_audit_with_failed_self_test_or_public_figures_is_denied(run, changes, code):
    run.rewrite(run.audit, **changes)
    run.do_account()
    assert code in codes(verdict_of(run))


@pytest.mark.parametrize("name", ["centralized", "utility_drop", "simulation"])
def test_figures_of_a_model_without_privacy_are_denied(run, name):
    utility = json.loads(run.utility.read_text())
    figure = {
        "centralized": utility["public_backbone"],
        "utility_drop": utility["public_backbone"]["difference"],
        "simulation": True,
    }[name]
    run.rewrite(run.utility, **{name: figure})
    run.do_account()
    assert codes(verdict_of(run)) == ["utility_without_privacy"]


def test_missing_audit_is_denied(run):
    run.audit.unlink()
    with pytest.raises(GateDenied, match="audit"):
        run.do_gate()


def test_release_without_evidence_of_its_mechanism_is_denied(run):
    run.rewrite(run.model / "model.json", mechanism_audit=None)
    run.rewrite(run.audit, mechanism=None)
    run.do_account()
    assert "audit_full_missing" in codes(verdict_of(run))


@pytest.mark.parametrize(
    ("part", "changes", "code"),
    [
        ("receipts", {"failed": 1}, "noise_receipt_failed"),
        ("receipts", {"together": False}, "noise_receipt_failed"),
        ("receipts", {"scaled": False}, "noise_receipt_failed"),
        ("receipts", {"rounds": 5}, "noise_receipt_failed"),
        ("fold", {"same": False}, "fold_differs"),
        ("fold", {"rounds": 5}, "fold_differs"),
        ("replay", {"failed": ["sum"]}, "replay_differs"),
        ("replay", {"rounds": 0}, "replay_differs"),
    ],
)
def test_failed_mechanism_evidence_is_denied_with_its_code(run, part, changes, code):
    """With any signer, the gate compares with the plan and names the failed check."""
    found = json.loads(run.audit.read_text())["mechanism"]
    bent = {**found, part: {**found[part], **changes}}
    run.rewrite(run.model / "model.json", mechanism_audit=bent)
    run.rewrite(run.audit, mechanism=bent)
    run.do_account()
    assert code in codes(verdict_of(run))


def test_mechanism_evidence_that_differs_from_the_model_card_is_denied(run):
    found = json.loads(run.audit.read_text())["mechanism"]
    bent = {**found, "replay": {"rounds": 3, "failed": []}}
    run.rewrite(run.audit, mechanism=bent)
    run.do_account()
    assert codes(verdict_of(run)) == ["audit_stale"]


def test_declared_tuning_runs_must_be_in_the_ledger(tmp_path):
    """With two compared runs: refused uncharged after one other run, allowed after two."""
    first = honest_run.start(tmp_path / "first", "compared-1").until_gate()
    tuned = {"tuning": {"data": "private", "private_runs": 2, "method": "grid of clip norms"}}
    final = honest_run.start(tmp_path / "final", "final", first.policy_root, **tuned)
    final.do_plan()
    with pytest.raises(Refused, match=r"has 1 other runs.*Nothing was charged"):
        final.do_reserve()
    assert ("final", 1) not in final.ledger().state.attempts
    honest_run.start(tmp_path / "second", "compared-2", first.policy_root).until_gate()
    final.until_gate()
    assert verdict_of(final).allow
    found = json.loads(final.report.read_text())["tuning"]
    assert found == {
        "data": "private",
        "private_runs": 2,
        "other_runs_before": 2,
        "simulations_before": 0,
    }


def test_tuning_counts_only_other_committed_runs(tmp_path, monkeypatch):
    first = honest_run.start(tmp_path / "first").until_gate()
    early = honest_run.start(tmp_path / "early", "early", first.policy_root)
    early.do("plan reserve")
    tuned = {"tuning": {"data": "private", "private_runs": 1, "method": "grid of clip norms"}}
    again = honest_run.start(tmp_path / "again", first.run_id, first.policy_root, **tuned)
    again.do_plan()
    with pytest.raises(Refused, match="has 0 other runs"):
        again.do_reserve(attempt=2)
    monkeypatch.setattr(reserve_budget, "check_before_charge", lambda *_, **__: None)
    again.do_reserve(attempt=2)
    again.do("partition train measure account")
    assert codes(verdict_of(again)) == ["tuning_not_charged"]


@pytest.mark.parametrize("days", [-1, 1])
def test_report_time_that_is_off_by_a_day_is_denied(run, days):
    when = datetime.now(UTC) + timedelta(days=days)
    assert "clock_skewed" in codes(verdict_of(run, time=when.isoformat(timespec="seconds")))


def test_report_of_an_older_ledger_head_is_denied(run):
    cumulative = json.loads(run.report.read_text())["cumulative"]
    ledger = run.ledger()
    older = {**cumulative, "ledger_sequence": 2, "ledger_head": ledger.chain.records[2].sha}
    assert "report_before_commit" in codes(verdict_of(run, cumulative=older))


def test_newer_ledger_records_do_not_deny(run, tmp_path):
    later = honest_run.start(tmp_path / "later", "tuesday", run.policy_root)
    later.do("plan reserve")
    assert verdict_of(run).allow


@pytest.mark.planted_bug(16)
def test_more_rounds_than_reserved_are_denied_already_by_the_accounting(run):
    run.rewrite(run.model / "model.json", rounds_run=7)
    with pytest.raises(PlanMismatch, match="rounds"):
        run.do_account()


def test_run_that_was_not_committed_is_denied(tmp_path, monkeypatch):
    run = honest_run.start(tmp_path)
    monkeypatch.setattr(run, "do_commit", lambda: None)
    run.do("plan reserve partition train measure")
    with pytest.raises(Refused, match="expected committed"):
        run.do_account()


def _cut_after(run, sequence):
    """The ledger as it was after a record, without a trace of what came later."""
    folder = run.policy_root / "ledger" / "weekly"
    for path in [*folder.glob("*.json"), *folder.glob("heads/*.json")]:
        if int(path.stem) > sequence:
            path.unlink()


def test_model_whose_trainer_was_killed_before_the_commit_is_denied(run):
    """The report is written before the commit, so it may exist under an open reservation."""
    _cut_after(run, 2)
    assert run.ledger().state.attempts["monday", 1].status == "bound"
    assert run.ledger().state.attempts["monday", 1].charge.rounds_charged == 6
    assert {"not_committed", "ledger_broken"} <= set(codes(verdict_of(run)))
    run.ledger().bind(
        read_reservation(run.reservation),
        inputs_sha=run.inputs_sha(),
        commitments=honest_run.COMMITMENTS,
        private_root=honest_run.PRIVATE_ROOT,
    )
    run.do_commit()  # the trainer resumed
    run.do_account()
    assert verdict_of(run).allow


@pytest.mark.planted_bug(16)
@pytest.mark.parametrize("says", [2, 6])
def test_commit_of_fewer_rounds_than_the_model_ran_is_denied(run, says):
    """A charge below the started rounds is found, whatever the model states."""
    _cut_after(run, 2)
    run.ledger().commit(
        read_reservation(run.reservation),
        rounds_started=2,
        round_log_sha=file_digest(run.model / "rounds.jsonl"),
        card_sha=file_digest(run.model / "model.json"),
        signer=Signer.load_or_create(run.keys, "trainer"),
    )
    run.rewrite(run.model / "model.json", rounds_run=says)
    wanted = "round_log_incomplete" if says == 2 else "more_rounds_than_reserved"
    assert wanted in codes(verdict_of(run))
    if says == 6:
        with pytest.raises(PlanMismatch, match="rounds"):
            run.do_account()


@pytest.mark.planted_bug(16)
def test_training_that_stopped_early_needs_a_waiver_of_the_policy_owner(run):
    """When to stop may have been read off private data, whatever was charged."""
    _cut_after(run, 2)
    lines = [json.loads(line) for line in (run.model / "rounds.jsonl").read_text().splitlines()]
    run.write_rounds(lines[:4])
    run.rewrite(run.model / "model.json", rounds_run=4)
    run.do("commit account")
    assert "stopped_early" in codes(verdict_of(run))
    run.waive("stopped_early", "the machine was given back after four rounds")
    run.do_account()
    assert verdict_of(run).waived == ("stopped_early",)


@pytest.mark.parametrize(
    "changes",
    [
        {"data.source.columns.cohort": "region", "partition.cohorts": ["north"]},
        {"partition.evaluation": {"by": "value", "column": "script", "values": ["Tifinagh"]}},
    ],
)
def test_change_of_own_data_is_claimed_only_if_covered(tmp_path, changes):
    """Another cohort is paid for by a second block, another value is evaluated exactly."""
    promising = {**changes, "policy.covers_change_own_data": True}
    run = honest_run.start(tmp_path / "promised", **promising)
    run.do_plan()
    with pytest.raises(Refused, match=r"epsilon does not hold.*Nothing was charged"):
        run.do_reserve()
    run = honest_run.start(tmp_path / "silent", **changes)
    assert not covers_change_own_data(run.config, plan_mechanism(run.config))
    assert covers_change_own_data(honest_run.config(), plan_mechanism(honest_run.config()))


def test_claim_to_cover_own_data_changes_that_does_not_hold_is_denied(tmp_path, monkeypatch):
    promising = {"policy.covers_change_own_data": True}
    run = honest_run.start(tmp_path, **promising).until_gate()
    assert verdict_of(run).allow
    monkeypatch.setattr(privacy_rules, "covers_change_own_data", lambda *_: False)
    assert codes(verdict_of(run)) == ["change_not_covered"]


def test_simulation_on_the_same_users_is_listed(tmp_path):
    """The run had no charge, and the report states it."""
    first = honest_run.start(tmp_path / "first", "looked", purpose="simulation")
    first.do("plan reserve")
    run = honest_run.start(tmp_path / "second", "final", first.policy_root).until_gate()
    assert json.loads(run.report.read_text())["tuning"]["simulations_before"] == 1
    assert verdict_of(run).allow


def test_blocks_charged_past_the_admission_check_are_denied(run):
    """A later record, well signed, that cuts the users into other blocks than the policy."""
    ledger = run.ledger()
    body = {**ledger.chain.records[1].body, "blocks": ["all/1"], "blocks_requested": ["all/1"]}
    signer = Signer.load_or_create(run.keys, "ledger")
    ledger_kit.forge(run.ledger_uri, signer, "reserve", body, run_id="tuesday")
    with pytest.raises(GateDenied, match="for life"):
        run.do_gate()


@pytest.mark.parametrize(
    "changes",
    [
        {"policy.renyi_order": 6.0},
        {"data.source.columns.user_id": "account"},
        {"data.source.columns.cohort": "month", "partition.cohorts": ["may"]},
        {"partition.blocks_per_cohort": 2},
        {"partition.evaluation": {"by": "hash", "fraction": 0.2}},
        {"data.source.label_scope": "global"},
    ],
    ids=str,
)
def test_run_with_other_terms_than_its_policy_is_refused_and_denied(tmp_path, run, changes):
    later = honest_run.start(tmp_path / "later", "tuesday", run.policy_root, **changes)
    later.do_plan()
    name = next(iter(changes)).removesuffix("label_scope")
    with pytest.raises(Refused, match=f"{name}.*for life.*another policy_id"):
        later.do_reserve()
    evidence = read_evidence(run.config, run.artifacts)
    bent = dataclasses.replace(evidence, config=run.config.updated(changes))
    ledger, report = run.ledger(), read(run.report, PrivacyReport)
    verdict = decide(bent, report, ledger)
    reasons = [reason for reason in verdict.reasons if reason.code == "policy_differs"]
    assert len(reasons) == 1
    assert name in reasons[0].sentence


@pytest.mark.parametrize("other", [None, "elsewhere"])
def test_gate_that_names_another_rollback_anchor_than_the_policy_is_denied(tmp_path, other):
    run = honest_run.start(
        tmp_path / "run", **{"storage.rollback_anchor": str(tmp_path / "anchor")}
    )
    run.until_gate()
    run.config = run.config.updated({"storage.rollback_anchor": other and str(tmp_path / other)})
    assert "policy_differs" in codes(verdict_of(run))


def test_injected_key_is_denied(run):
    run.rewrite(run.model / "model.json", key_injected=True)
    run.do_account()
    assert json.loads(run.report.read_text())["mechanism"]["noise_secure"] is False
    assert codes(verdict_of(run)) == ["model_card_changed", "key_injected"]


def test_imported_backbone_needs_a_waiver_of_the_policy_owner(tmp_path):
    changes = {"pretraining.kind": "import", "pretraining.import_path": "public.keras"}
    run = honest_run.start(tmp_path, **changes).until_gate()
    assert codes(verdict_of(run)) == ["pretraining_overlap_unchecked"]
    run.waive("pretraining_overlap_unchecked", model_sha="0" * 64)
    run.do_account()
    assert not verdict_of(run).allow
    run.waive("pretraining_overlap_unchecked", "checked by hand")
    waived = run.ledger().head.sequence
    assert not verdict_of(run).allow  # what the report does not tell its readers does not count
    run.do_account()
    verdict = verdict_of(run)
    assert verdict.allow
    assert verdict.waived == ("pretraining_overlap_unchecked",)
    assert json.loads(run.report.read_text())["waivers"][0]["sequence"] == waived
    assert "checked by hand" in run.page.read_text()


NO_GAIN = {"value": 0.2, "low": 0.0, "high": 0.4}
WORSE = {"value": -0.02, "low": -0.03, "high": -0.01}
SAME = {"value": 0.0, "low": -0.1, "high": 0.1}


def with_utility(run, **changes):
    """The run with another measurement, signed by who measures."""
    run.rewrite(run.utility, **changes)
    run.do_account()
    return run


def gaining(run, interval):
    public = json.loads(run.utility.read_text())["public_backbone"]
    return {
        "public_backbone": {**public, "difference": dict.fromkeys(public["difference"], interval)}
    }


def changed_to(run, interval):
    """The previous release had what this model has, less the change."""
    utility = json.loads(run.utility.read_text())
    previous, ours = utility["previous_release"], utility["recall_at_far"]
    recall = {
        rate: {**found, "value": found["value"] - interval["value"]} for rate, found in ours.items()
    }
    old = {**previous["old"], "recall_at_far": recall}
    change = dict.fromkeys(ours, interval)
    return {"previous_release": {**previous, "old": old, "change": change}}


@pytest.mark.planted_bug(19)
def test_model_without_gain_over_its_backbone_is_denied(run):
    (reason,) = verdict_of(with_utility(run, **gaining(run, NO_GAIN))).reasons
    assert reason.code == "no_gain_over_public"
    assert "+20.0 points [+0.0, +40.0]" in reason.sentence


@pytest.mark.planted_bug(19)
def test_gain_is_measured_against_the_best_baseline(run):
    utility = json.loads(run.utility.read_text())
    pixels, rates = utility["raw_pixels"], utility["raw_pixels"]["recall_at_far"]
    better = {
        **pixels,
        "recall_at_far": {rate: {**found, "value": 0.45} for rate, found in rates.items()},
        "difference": {rate: {"value": 0.05, "low": -0.02, "high": 0.12} for rate in rates},
    }
    (reason,) = verdict_of(with_utility(run, raw_pixels=better)).reasons
    assert reason.code == "no_gain_over_public"
    assert "(raw_pixels) is +5.0 points [-2.0, +12.0]" in reason.sentence


@pytest.mark.planted_bug(19)
def test_required_baselines_must_be_measured(run):
    assert codes(verdict_of(with_utility(run, raw_pixels=None))) == ["utility_stale"]


@pytest.mark.planted_bug(19)
def test_gain_measured_on_fewer_than_six_identities_is_denied(run):
    sure = {"value": 0.2, "low": 0.1, "high": 0.3}
    evaluated = json.loads(run.utility.read_text())["evaluated"]
    for identities, denied in ((5, ["no_gain_over_public"]), (6, [])):
        few = {"evaluated": {**evaluated, "identities": identities}}
        assert codes(verdict_of(with_utility(run, **gaining(run, sure), **few))) == denied


def test_model_worse_than_the_previous_release_is_denied_if_required(tmp_path):
    settings = {"release.no_worse_than": "previous_release", "release.min_gain_over_public": None}
    run = honest_run.start(tmp_path, **settings).until_gate()
    wanted = {"worse": (WORSE, ["worse_than_previous_release"]), "same": (SAME, [])}
    for interval, denied in wanted.values():
        assert codes(verdict_of(with_utility(run, **changed_to(run, interval)))) == denied
    previous = json.loads(run.utility.read_text())["previous_release"]
    not_comparable = {**previous, "old": None, "new_against_old": None, "change": None}
    for missing in (None, not_comparable):
        denied = verdict_of(with_utility(run, previous_release=missing))
        assert codes(denied) == ["worse_than_previous_release"]


def test_previous_release_without_a_measured_change_is_refused(run):
    previous = json.loads(run.utility.read_text())["previous_release"]
    run.rewrite(run.utility, previous_release={**previous, "change": None})
    with pytest.raises(ArtifactError, match="utility_report"):
        run.do_account()
    with pytest.raises(GateDenied):
        run.do_gate()


def test_waiver_of_a_non_waivable_rule_has_no_effect(run):
    run.waive("auditor_blind", "please")
    blind = {**honest_run.SELF_TEST, "planted_leak": BLIND}
    run.rewrite(run.audit, self_test=blind)
    run.do_account()
    assert "auditor_blind" not in WAIVABLE
    assert not verdict_of(run).allow


def test_simulation_gets_a_verdict_and_is_never_allowed(tmp_path):
    run = honest_run.start(tmp_path, purpose="simulation").until_gate()
    verdict = run.do_gate()
    assert (verdict["allow"], verdict["simulation"]) == (False, True)
    assert not verdict_of(run).allow
    assert "never released" in run.page.read_text()


@pytest.mark.parametrize("position", range(len(RULES)))
def test_rule_that_raises_denies_the_release(allowed_run, monkeypatch, position):
    """Fails closed: whatever goes wrong inside a rule is a reason."""
    from fedemb.release import decide as module

    def broken(case):
        raise RuntimeError("unforeseen")

    rule = dataclasses.replace(RULES[position], check=broken, applies=bool)
    monkeypatch.setattr(module, "RULES", (*RULES[:position], rule, *RULES[position + 1 :]))
    verdict = verdict_of(allowed_run)
    assert codes(verdict) == [rule.code]
    assert not verdict.reasons[0].waivable


def test_unreachable_store_does_not_deny(run, monkeypatch):
    """Nothing was found wrong: a denial would cost another run, and a retry costs nothing."""
    from fedemb.release import decide as module

    def unreachable(case):
        raise StorageError("the store could not be read: 503")

    rule = dataclasses.replace(RULES[-1], check=unreachable, applies=bool)
    monkeypatch.setattr(module, "RULES", (*RULES[:-1], rule))
    with pytest.raises(StorageError):
        run.do_gate()
