"""A release waits for the people its policy names: real keys, forged and replayed approvals."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedemb.documents.evidence import read_evidence
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.errors import (
    ArtifactError,
    AwaitingApproval,
    GateDenied,
    InputError,
    LedgerError,
    Refused,
    SignatureInvalid,
    StorageError,
)
from fedemb.foundation.document import read
from fedemb.keys.trust import Signer, key_id_of
from fedemb.ledger import name_approvers, read_reservation
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.release.decide import WAIVABLE, decide
from fedemb.release.rule import Reason, Verdict
from tests.kit import ledger_kit
from tests.kit.cli import fedemb, ssh_key
from tests.kit.pipeline_runs import honest_run
from tests.kit.run_folder import run_folder

POLICY = {"approvals": 2}
HOURS = 2.0


def person() -> Signer:
    return Signer.of_approver(Ed25519PrivateKey.generate())


def name(run, reason="the release board", **people: Signer):
    keys = {who: signer.public_key for who, signer in people.items()}
    return name_approvers(run.ledger(), keys, reason, run.keys)


def verdict_of(run, now=None):
    evidence = read_evidence(run.config, run.artifacts)
    return decide(evidence, read(run.report, PrivacyReport), run.ledger(), now=now)


def codes(run, now=None):
    return [reason.code for reason in verdict_of(run, now).reasons]


def started(root, run_id="monday", policy_root=None, **changes):
    policy = {**honest_run.config().policy.model_dump(), **POLICY}
    changes = {"policy": policy, "release.approval_hours": HOURS, **changes}
    return honest_run.start(root, run_id, policy_root, **changes).until_gate()


@pytest.fixture(scope="module")
def accounted(tmp_path_factory):
    return started(tmp_path_factory.mktemp("accounted") / "run")


@pytest.fixture
def run(accounted, tmp_path):
    copy = honest_run.copy_of(accounted, tmp_path / "run")
    copy.config = accounted.config
    return copy


@pytest.fixture
def ada():
    return person()


@pytest.fixture
def bob():
    return person()


@pytest.fixture
def named(run, ada, bob):
    """The run, whose approvers are ada and bob."""
    name(run, ada=ada, bob=bob)
    return run


@pytest.fixture
def half(named, ada):
    """The run, approved by ada, of ada and bob."""
    named.approve(ada)
    return named


def put(run, signer, actor, body):
    ledger_kit.forge(run.ledger_uri, signer, "decision", body, actor=actor)


def body_of(run, **changes):
    report = read(run.report, PrivacyReport)
    return {
        "reservation": read_reservation(run.reservation).sequence,
        "model_sha": report.body.model_sha,
        "report_sha": report.sha,
        "code": "not_approved",
        "reason": "",
        **changes,
    }


def test_gate_denies_until_the_required_number_of_approvals_is_reached(half, run, bob):
    assert codes(run) == ["not_approved"]
    (reason,) = verdict_of(run).reasons
    assert "requires 2 approvals" in reason.sentence
    assert "has 1, by ada" in reason.sentence
    run.approve(bob)
    assert verdict_of(run).allow
    run.do("gate release")
    assert run.problems() == []
    card = (run.bundle / "README.md").read_text()
    assert "Release approved by ada" in card
    assert "Release approved by bob" in card


@pytest.mark.parametrize(
    ("codes", "waits"),
    [
        (["not_approved"], True),
        ([], False),
        (["approvals_invalid"], False),
        (["worse_than_previous_release"], False),
        (["not_approved", "fold_differs"], False),
    ],
)
def test_verdict_waits_only_if_missing_approvals_are_the_only_reason(codes, waits):
    """Approvals by arbitrary readers of a waiting release are refused."""
    reasons = tuple(Reason(code, "a problem", "a remedy") for code in codes)
    verdict = Verdict(allow=not reasons, reasons=reasons)
    assert verdict.waiting is waits


def test_one_person_counts_once_however_often_they_approve(named, run, ada):
    first = run.approve(ada)
    assert run.approve(ada) == first
    put(run, ada, "ada", body_of(run))
    assert codes(run) == ["not_approved"]


def test_one_person_with_a_new_key_counts_once(named, run, ada, bob):
    first, laptop = run.approve(ada), person()
    name(run, "a new laptop", ada=laptop, bob=bob)
    assert run.approve(laptop) == first
    put(run, laptop, "ada", body_of(run))
    assert codes(run) == ["not_approved"]


def test_one_key_under_a_new_name_counts_once(half, run, ada, bob):
    name(run, "another name", eve=ada, bob=bob)
    put(run, ada, "eve", body_of(run))
    assert codes(run) == ["not_approved"]


def test_one_key_under_two_names_is_refused(run, ada):
    with pytest.raises(LedgerError, match="listed twice"):
        name(run, ada=ada, bob=ada)


def test_approval_of_an_earlier_report_does_not_count_for_a_later_one(half, run, bob):
    run.approve(bob)
    before = read(run.report, PrivacyReport).sha
    run.do_account()  # takes the newer head of the ledger into account
    assert read(run.report, PrivacyReport).sha != before
    assert codes(run) == ["not_approved"]


def test_approval_of_another_model_does_not_count(half, run, bob):
    put(run, bob, "bob", body_of(run, model_sha="7" * 64))
    assert codes(run) == ["not_approved"]


def test_approval_for_another_run_of_the_policy_does_not_count(half, run, ada, bob, tmp_path):
    release = {**run.config.release.model_dump(), "version": "2.0"}
    other = started(tmp_path / "other", "tuesday", run.policy_root, release=release)
    other.approve(ada)
    other.approve(bob)
    assert verdict_of(other).allow
    assert codes(run) == ["not_approved"]


@pytest.mark.parametrize("who", ["stranger", "ledger", "policy", "report"])
def test_approval_by_a_key_that_may_not_approve_is_refused_or_breaks_the_ledger(half, run, who):
    if who == "stranger":
        with pytest.raises(Refused, match="does not belong to an approver"):
            run.approve(person())
        put(run, person(), "bob", body_of(run))
    else:  # a step's key, dressed up in the role
        signer = Signer.load_or_create(run.keys, who)
        signer.role = "approver"
        put(run, signer, "bob", body_of(run))
    with pytest.raises(SignatureInvalid, match="does not hold in the role 'approver'"):
        verdict_of(run)
    with pytest.raises(GateDenied):
        run.do_gate()


def test_approval_under_another_name_breaks_the_ledger(named, run, ada):
    put(run, ada, "bob", body_of(run))
    with pytest.raises(LedgerError, match="does not bear the name its key was given"):
        run.ledger().state  # noqa: B018


def test_removed_approver_cannot_approve_or_reuse_the_key(half, run, ada, bob):
    name(run, "ada left", bob=bob)
    with pytest.raises(Refused, match="does not belong to an approver"):
        run.approve(ada)
    with pytest.raises(StorageError, match="nothing was written"):  # removed while she signed
        run.ledger().chain.trust.require(ada.trusted())
    put(run, ada, "ada", body_of(run, report_sha="8" * 64))
    with pytest.raises(SignatureInvalid, match="had retired"):
        run.ledger()


def test_retired_approver_key_cannot_be_added_again(named, run, ada, bob):
    name(run, "ada left", bob=bob)
    with pytest.raises(LedgerError, match="was retired before"):
        name(run, "ada is back", ada=ada, bob=bob)


def test_only_the_policy_owner_names_approvers(run, ada):
    thief = Signer.load_or_create(run.keys, "ledger")
    with pytest.raises(LedgerError, match="needs a key of the role 'policy'"):
        run.ledger().name_approvers({"ada": ada.public_key}, "me", thief)
    owner = Signer("policy", b"9" * 32)
    with pytest.raises(SignatureInvalid, match="not trusted in the role"):
        run.ledger().name_approvers({"ada": ada.public_key}, "me", owner)


def test_key_rotation_cannot_add_an_approver(run, ada):
    trust = run.ledger().chain.trust.with_approvers([ada.public_key], 3)
    later = replace(trust.current("approver"), generation=2)
    later = replace(later, public_key=person().public_key)
    later = replace(later, key_id=key_id_of(later.public_key))
    with pytest.raises(LedgerError, match="exactly one newer key"):
        trust.rotated([vars(later)], 4)


def test_number_of_approvals_is_fixed_for_the_policy(run):
    policy = {**run.config.policy.model_dump(), "approvals": 0}
    run.config = run.config.updated({"policy": policy})
    assert "policy_differs" in codes(run)


# ---- the deadline -----------------------------------------------------------------------------


@pytest.fixture
def deadline(run):
    body = read(run.report, PrivacyReport).body
    assert body.approve_by - datetime.fromisoformat(body.time) == timedelta(hours=HOURS)
    assert body.approve_by > datetime.now(UTC)
    return body.approve_by


def clock_at(time):
    """Stands in for `datetime` of a module."""
    return type("Clock", (datetime,), {"now": classmethod(lambda cls, tz=None: time)})


def test_approval_deadline_turns_waiting_into_refused(run, deadline):
    assert codes(run, deadline) == ["not_approved"]
    assert codes(run, deadline + timedelta(seconds=1)) == ["no_approval_by_deadline"]
    assert codes(run, deadline + timedelta(days=400)) == ["no_approval_by_deadline"]


def test_approval_in_time_counts_at_any_later_decision(half, run, bob, deadline):
    run.approve(bob)
    assert codes(run, deadline - timedelta(minutes=1)) == []
    assert codes(run, deadline + timedelta(days=400)) == []


def test_approval_after_the_deadline_never_counts(half, run, bob, deadline, monkeypatch):
    with monkeypatch.context() as late:
        late.setattr("fedemb.storage.LocalStore.clock", lambda _: None)
        late.setattr("fedemb.ledger.records.datetime", clock_at(deadline + timedelta(seconds=1)))
        run.approve(bob)
    assert len(run.ledger().state.decisions) == 2
    assert codes(run, deadline + timedelta(minutes=1)) == ["no_approval_by_deadline"]
    assert codes(run, deadline) == ["not_approved"]


def test_gate_refuses_after_the_approval_deadline(run, tmp_path, deadline, monkeypatch):
    for module in ("release.decide", "pipelines.run.pages", "pipelines.cli.approve"):
        clock = clock_at(deadline + timedelta(seconds=1))
        monkeypatch.setattr(f"fedemb.{module}.datetime", clock)
    with pytest.raises(GateDenied) as denied:
        run.do_gate()
    assert not isinstance(denied.value, AwaitingApproval)
    assert denied.value.exit_code == 3
    state = {"exit_code": 6, "failed_step": "gate_release", "error": "AwaitingApproval"}
    folder, before = run_folder(run, tmp_path / "runs", **state), run.ledger().head
    with pytest.raises(Refused, match="were due by"):
        fedemb("approve", folder.root, "--key", ssh_key(tmp_path, "ada"), "--yes")
    assert run.ledger().head == before


# ---- the command ------------------------------------------------------------------------------


def waiting(run, parent, **changes):
    """The folder of a run that the gate has judged, as `fedemb run` leaves it."""
    with pytest.raises(GateDenied):
        run.do_gate()
    folder = run_folder(run, parent, exit_code=6, failed_step="gate_release")
    if changes:
        folder.change_config(folder.config().updated(changes))
    return folder.root


def test_run_without_a_verdict_cannot_be_approved(run, tmp_path):
    key, stores = ssh_key(tmp_path, "ada"), ("--ledger", run.ledger_uri, "--keys", run.keys_uri)
    fedemb("ledger", "approvers", f"ada={key}.pub", *stores, "--reason", "alone")
    folder, head = waiting(run, tmp_path / "runs"), run.ledger().head
    for path in folder.rglob("verdict"):
        path.unlink()
    with pytest.raises(Refused, match="has not decided about report"):
        fedemb("approve", folder, "--key", key, "--yes")
    assert run.ledger().head == head


def test_waiver_is_one_record_of_the_policy_owner_for_one_model(run, tmp_path):
    folder = waiting(run, tmp_path / "runs")
    waive = ("approve", folder, "--waive", WAIVABLE[0], "--keys", run.keys_uri, "--yes")
    for _ in range(2):  # again changes nothing
        said = fedemb(*waive, "--reason", "agreed")
        assert f"{WAIVABLE[0]} is waived for this model" in said
    (record,) = run.ledger().state.decisions
    assert record.body == body_of(run, code=WAIVABLE[0], report_sha=None, reason="agreed")
    run.ledger().verify()
    state, model = run.ledger().state, record.body["model_sha"]
    assert state.waivers_of(model, record.sequence) == {WAIVABLE[0]: record}
    others = (
        ("0" * 64, record.sequence),
        ("f" * 64, record.sequence),
        (model, record.sequence - 1),
    )
    assert not any(state.waivers_of(*other) for other in others)


def test_waiver_is_refused_unless_owner_reason_and_rule_allow_it(run, tmp_path):
    folder, head = waiting(run, tmp_path / "runs"), run.ledger().head
    waive = ("approve", folder, "--yes", "--reason", "agreed", "--waive")
    for rule in ("epsilon_above_cap", "not_approved", "foo"):
        with pytest.raises(Refused, match="cannot be waived"):
            fedemb(*waive, rule, "--keys", run.keys_uri)
    with pytest.raises(InputError, match="Pass --policy or --keys"):
        fedemb(*waive, WAIVABLE[0])
    with pytest.raises(InputError, match="--reason is empty"):
        fedemb(*waive, WAIVABLE[0], "--keys", run.keys_uri, "--reason", " ")
    with pytest.raises(InputError, match="Pass --key to approve"):
        fedemb(*waive[:3])
    with pytest.raises(LedgerError):
        fedemb(*waive, WAIVABLE[0], "--keys", tmp_path / "other")
    assert run.ledger().head == head


def test_decision_cannot_be_signed_in_the_other_role(named, run, ada):
    """The policy owner approves nothing, and an approver waives nothing."""
    owner, waiver = Signer.load_or_create(run.keys, "policy"), {"code": WAIVABLE[0]}
    with pytest.raises(LedgerError, match="needs a key of the role 'approver'"):
        put(run, owner, "ada", body_of(run))
    with pytest.raises(LedgerError, match="needs a key of the role 'policy'"):
        put(run, ada, "ada", body_of(run, report_sha=None, **waiver))
    put(run, ada, "ada", body_of(run, **waiver))  # signed in its role, but of no form
    with pytest.raises(LedgerError, match="only an approval, names its report"):
        run.ledger().state  # noqa: B018


def test_decision_about_a_run_that_did_not_commit_breaks_the_ledger(tmp_path):
    run = honest_run.start(tmp_path / "run")
    run.do("plan reserve")
    reservation, sha = read_reservation(run.reservation).sequence, "1" * 64
    waiver = {"reservation": reservation, "model_sha": sha, "report_sha": None, "reason": "agreed"}
    owner = Signer.load_or_create(run.keys, "policy")
    put(run, owner, "ada", {**waiver, "code": WAIVABLE[0]})
    with pytest.raises(LedgerError, match="only about a committed run"):
        run.ledger().state  # noqa: B018


def test_release_terms_changed_after_the_approval_are_denied(half, run, bob):
    """Otherwise a floor could be lifted, or the licence changed, after the approvals."""
    run.approve(bob)
    assert verdict_of(run).allow
    approved = run.config
    for changes in (
        {"release.min_gain_over_public": None},
        {"release.min_gain_over_public": -0.5},
        {"release.no_worse_than": "previous_release"},
        {"release.licence": "apache-2.0"},
        {"release.version": "2"},
        {"release.name": "faces"},
        {"release.approval_hours": 48.0},
        {"release.approval_hours": None},
    ):
        run.config = approved.updated(changes)
        assert "report_differs" in codes(run), changes
        with pytest.raises(GateDenied, match="report"):
            run.do_gate()


def test_policy_without_approvals_refuses_approvers_and_approvals(tmp_path):
    run = honest_run.start(tmp_path / "run").until_gate()
    run.do_gate()
    key, before = ssh_key(tmp_path, "ada"), run.ledger().head
    with pytest.raises(Refused, match="releases without approvals"):
        fedemb("approve", run_folder(run, tmp_path / "runs").root, "--key", key, "--yes")
    stores = ("--ledger", run.ledger_uri, "--keys", run.keys_uri, "--reason", "a board")
    with pytest.raises(Refused, match="releases without approvals"):
        fedemb("ledger", "approvers", f"ada={key}.pub", *stores)
    assert run.ledger().head == before


def test_folder_that_holds_the_report_of_another_run_is_not_approved(run, tmp_path):
    stores = {"storage.ledger": run.ledger_uri, "storage.keys": run.keys_uri}
    folder = RunDirectory.create(tmp_path / "runs", "friday", run.config.updated(stores))
    report = folder.public / "fedemb-1" / "account-privacy" / "privacy_report"
    report.parent.mkdir(parents=True)
    report.write_bytes(run.report.read_bytes())
    key, head = ssh_key(tmp_path, "ada"), run.ledger().head
    fedemb(
        *("ledger", "approvers", f"ada={key}.pub", "--ledger", run.ledger_uri),
        *("--keys", run.keys_uri, "--reason", "alone"),
    )
    named = run.ledger().head
    with pytest.raises(ArtifactError, match="run friday belongs to another run"):
        fedemb("approve", folder.root, "--key", key, "--yes")
    assert run.ledger().head == named != head


def test_approvals_and_waivers_require_the_rollback_anchor_of_the_policy(tmp_path):
    rollback_anchor = str(tmp_path / "anchor")
    run = started(tmp_path / "run", **{"storage.rollback_anchor": rollback_anchor})
    key, stores = ssh_key(tmp_path, "ada"), ("--ledger", run.ledger_uri, "--keys", run.keys_uri)
    also = ("--rollback-anchor", rollback_anchor)
    fedemb("ledger", "approvers", f"ada={key}.pub", *stores, "--reason", "alone", *also)
    folder = waiting(run, tmp_path / "runs")
    other = waiting(run, tmp_path / "others", **{"storage.rollback_anchor": None})
    waiver = ("--waive", WAIVABLE[0], "--keys", run.keys_uri, "--reason", "agreed")
    acts = (("--key", key, "--yes"), (*waiver, "--yes"))
    for act in acts:
        with pytest.raises(Refused, match="has a rollback anchor for life, and none was named"):
            fedemb("approve", other, *act)
    record = run.ledger().head
    Path(run.ledger_uri, record.name).unlink()
    Path(run.ledger_uri, "weekly", "heads", f"{record.sequence:08d}.json").unlink()
    for act in acts:
        with pytest.raises(LedgerError, match="older than its markers"):
            fedemb("approve", folder, *act)
