"""Approvals have a deadline: later the release is refused, and late signatures never count."""

import subprocess
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedemb.documents.evidence import read_evidence
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.errors import AwaitingApproval, GateDenied, Refused
from fedemb.foundation.document import read
from fedemb.gate.decide import decide
from fedemb.keys.trust import Signer
from fedemb.ledger import name_approvers, read_reservation
from fedemb.pipelines.cli.main import app
from tests.kit.pipeline_runs import honest_run
from tests.kit.run_folder import run_folder

HOURS = 2.0
WAITS = {"exit_code": 6, "failed_step": "gate_release", "error": "AwaitingApproval"}


@pytest.fixture(scope="module")
def accounted(tmp_path_factory):
    policy = {**honest_run.config().policy.model_dump(), "approvals": 1}
    changes = {"policy": policy, "release.approval_hours": HOURS}
    return honest_run.start(tmp_path_factory.mktemp("run") / "run", **changes).until_gate()


@pytest.fixture
def run(accounted, tmp_path):
    copy = honest_run.copy_of(accounted, tmp_path / "run")
    copy.config = accounted.config
    return copy


@pytest.fixture
def deadline(run):
    found = read(run.report, PrivacyReport).body.approve_by
    assert found is not None
    return found


def clock_at(time):
    """Stands in for `datetime` of a module."""
    return type("Clock", (datetime,), {"now": classmethod(lambda cls, tz=None: time)})


@pytest.fixture
def later(deadline, monkeypatch):
    """Moves the clock of gate, pages and commands past the deadline."""

    for module in (
        "fedemb.gate.decide",
        "fedemb.pipelines.run.pages",
        "fedemb.pipelines.cli.approve",
    ):
        monkeypatch.setattr(f"{module}.datetime", clock_at(deadline + timedelta(seconds=1)))


def approve(run, at=None, monkeypatch=None):
    signer = Signer.of_approver(Ed25519PrivateKey.generate())
    name_approvers(run.ledger(), {"ada": signer.public_key}, "the board", run.keys)
    if at is not None:
        monkeypatch.setattr("fedemb.ledger.records.datetime", clock_at(at))
    report = read(run.report, PrivacyReport)
    return run.ledger().decide(
        read_reservation(run.reservation),
        code="not_approved",
        model_sha=report.body.model_sha,
        report_sha=report.sha,
        reason="",
        signer=signer,
    )


def codes(run, now):
    evidence = read_evidence(run.config, run.artifacts)
    report = read(run.report, PrivacyReport)
    return [reason.code for reason in decide(evidence, report, run.ledger(), now=now).reasons]


def test_deadline_turns_waiting_into_refused(run, deadline):
    assert codes(run, deadline) == ["not_approved"]
    assert codes(run, deadline + timedelta(seconds=1)) == ["no_approval_by_deadline"]
    assert codes(run, deadline + timedelta(days=400)) == ["no_approval_by_deadline"]


def test_approval_in_time_counts_at_any_later_decision(run, deadline):
    approve(run)
    assert codes(run, deadline - timedelta(minutes=1)) == []
    assert codes(run, deadline + timedelta(days=400)) == []


def test_approval_after_the_deadline_never_counts(run, deadline, monkeypatch):
    with monkeypatch.context() as patch:
        approve(run, deadline + timedelta(seconds=1), patch)
    assert len(run.ledger().state.decisions) == 1
    assert codes(run, deadline + timedelta(minutes=1)) == ["no_approval_by_deadline"]
    assert codes(run, deadline) == ["not_approved"]


def test_deadline_belongs_to_the_report_that_approvers_sign(run, deadline):
    for hours in (None, 10 * HOURS):
        run.config = run.config.updated({"release.approval_hours": hours})
        assert "report_differs" in codes(run, deadline + timedelta(seconds=1))
        with pytest.raises(GateDenied):
            run.do_gate()


def test_gate_exits_with_the_code_of_a_refusal_after_the_deadline(run, later, deadline):
    with pytest.raises(GateDenied) as denied:
        run.do_gate()
    assert not isinstance(denied.value, AwaitingApproval)
    assert denied.value.exit_code == 3
    assert f"no approval by {deadline:%Y-%m-%d %H:%M} UTC" in str(denied.value)
    assert not (run.root / "releases").exists()


def test_nobody_is_asked_to_sign_after_the_deadline(run, tmp_path, later):
    key = tmp_path / "ada"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    folder = run_folder(run, tmp_path / "runs", **WAITS)
    before = run.ledger().head
    with pytest.raises(Refused, match="were due by"):
        app(args=["approve", str(folder.root), "--key", str(key), "--yes"], standalone_mode=False)
    assert run.ledger().head == before


def test_time_of_the_report_starts_the_hours(run, deadline):
    body = read(run.report, PrivacyReport).body
    assert deadline - datetime.fromisoformat(body.time) == timedelta(hours=HOURS)
    assert deadline.tzinfo is not None
    assert deadline > datetime.now(UTC)
