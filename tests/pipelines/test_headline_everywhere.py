"""One headline in every place: CLI, pages, card, registries; approvals that wait; the checklist."""

import fcntl
import json
import os
import re
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from fedemb.documents.audit import AuditReport
from fedemb.documents.verdict import VerdictDocument
from fedemb.errors import AwaitingApproval, GateDenied, Refused
from fedemb.foundation.document import read
from fedemb.gate.decide import RULES
from fedemb.pipelines.cli.main import app
from fedemb.pipelines.cli.review import runs_table
from fedemb.pipelines.run.directory import RunState
from fedemb.pipelines.run.pages import collect_reports, render_index
from fedemb.privacy.mechanisms.registry import plan_mechanism
from fedemb.reports.audit_words import audit_answer
from fedemb.serving.registries import Release
from tests.kit.pipeline_runs import honest_run
from tests.kit.run_folder import run_folder

WAITING = {"exit_code": 6, "failed_step": "gate_release", "error": "AwaitingApproval"}
DENIED = {"exit_code": 3, "failed_step": "gate_release", "error": "GateDenied"}
REASON = "the board accepts an imported start"
WAIVED = f"Released with a waiver by ada: {REASON}"


def call(capsys, *words) -> str:
    with honest_run.stand_in_for_serving():
        app(args=[str(word) for word in words], standalone_mode=False)
    return capsys.readouterr().out


def title(page: str) -> str:
    return re.search(r'<p class="headline">(.*?)</p>', page)[1]


def policy(**changes):
    return {**honest_run.config().policy.model_dump(), **changes}


def without_gain(run):
    """The utility report of a model that may have gained by chance, signed and accounted."""
    start = json.loads(run.utility.read_text())["public_backbone"]
    chance = {"value": 0.2, "low": 0.0, "high": 0.4}
    gained = dict.fromkeys(start["difference"], chance)
    run.rewrite(run.utility, public_backbone={**start, "difference": gained})
    run.do_account()
    return run


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return honest_run.start(tmp_path_factory.mktemp("released") / "run").until_release()


@pytest.fixture(scope="module")
def waived(tmp_path_factory):
    """A model that gained nothing, waived by the policy owner and released."""
    run = without_gain(honest_run.start(tmp_path_factory.mktemp("waived") / "run").until_gate())
    before, os.environ["FEDEMB_ACTOR"] = os.environ.get("FEDEMB_ACTOR"), "ada"
    try:
        run.waive("no_gain_over_public", REASON)
    finally:
        os.environ.pop("FEDEMB_ACTOR") if before is None else None
    run.do_account()
    run.do_gate()
    run.do_release()
    return run


@pytest.fixture(scope="module")
def waiting(tmp_path_factory):
    """A run that two people must approve."""
    root = tmp_path_factory.mktemp("waiting") / "run"
    run = honest_run.start(root, policy=policy(approvals=2)).until_gate()
    with pytest.raises(AwaitingApproval):
        run.do_gate()
    return run


def bundle(run) -> Path:
    return run.root / "releases" / "glyphs" / "1.0"


@pytest.mark.long
def test_waiver_is_named_in_every_place(waived, tmp_path, capsys):
    folder = run_folder(waived, tmp_path / "runs")
    collect_reports(folder)
    assert title(render_index(folder)) == WAIVED
    assert WAIVED in "\n".join(runs_table([folder]))
    trust = Path(waived.ledger_uri) / "trust.json"
    assert WAIVED in call(capsys, "verify", bundle(waived), "--trust", trust)
    card = (bundle(waived) / "README.md").read_text()
    assert f"**{WAIVED}.** Epsilon of one user " in card
    release = Release.of(bundle(waived), "s3://releases/glyphs/1.0")
    assert release.properties["fedemb.headline"] == WAIVED
    assert release.properties["fedemb.waived"] == "no_gain_over_public"
    assert release.run.headline.sentence().startswith(f"{WAIVED}; epsilon of one user ")
    checklist = (folder.reports / "verdict.html").read_text()
    assert f"<code>no_gain_over_public</code> waived by ada: {REASON}" in checklist


def test_waived_release_whose_verdict_is_gone_is_not_shown_as_clean(waived, tmp_path):
    folder = run_folder(waived, tmp_path / "runs")
    folder.output("verdict").unlink()
    assert title(render_index(folder)) == WAIVED


def test_clean_release_is_released_in_every_place(released, tmp_path, capsys):
    folder = run_folder(released, tmp_path / "runs")
    assert title(render_index(folder)) == "Released"
    assert "  Released  " in runs_table([folder])[1]
    trust = Path(released.ledger_uri) / "trust.json"
    assert "\nReleased; epsilon of one user " in call(
        capsys, "verify", bundle(released), "--trust", trust
    )
    assert "**Released.** Epsilon of one user " in (bundle(released) / "README.md").read_text()
    release = Release.of(bundle(released), "s3://releases/glyphs/1.0")
    assert release.properties["fedemb.state"] == "Released"


def test_verdict_that_names_another_waiver_than_the_ledger_is_not_released(waived, tmp_path):
    run = honest_run.copy_of(waived, tmp_path / "run")
    verdict = json.loads(run.verdict.read_text())
    run.rewrite(run.verdict, waivers=[{**verdict["waivers"][0], "actor": "somebody else"}])
    with pytest.raises(GateDenied, match="not those of the ledger"):
        run.do_release()


def test_waiting_for_approval_is_no_refusal(waiting, tmp_path, capsys):
    folder = run_folder(waiting, tmp_path / "runs", **WAITING)
    page = render_index(folder)
    assert title(page) == "Waiting for approval: 0 of 2 given"
    assert 'class="verdict plain"' in page
    assert "Waiting for approval: 0 of 2 given" in runs_table([folder])[1]


def test_approvals_come_last_and_hide_no_other_reason(tmp_path):
    run = without_gain(honest_run.start(tmp_path / "run", policy=policy(approvals=2)).until_gate())
    with pytest.raises(GateDenied) as denied:
        run.do_gate()
    assert denied.value.exit_code == 3
    assert str(denied.value).startswith("the gain over ")
    verdict = read(run.verdict, VerdictDocument).body
    assert verdict.reasons == ["no_gain_over_public", "not_approved"]
    assert RULES[-1].code == verdict.checks[-1].rule == "not_approved"
    folder = run_folder(run, tmp_path / "runs", **DENIED)
    assert title(render_index(folder)) == "Refused: no gain over public"


def test_refusal_longer_than_a_name_of_a_file_is_shown(waiting, tmp_path):
    folder = run_folder(waiting, tmp_path / "runs", **WAITING)
    why = "the training images are unknown " * 12
    folder.write_state(replace(folder.read_state(), closing_lines=[f"release: refused: {why}"]))
    assert why.strip() in render_index(folder)


def test_run_that_holds_its_lock_is_running(released, tmp_path):
    folder = run_folder(released, tmp_path / "runs")
    folder.write_state(RunState(exit_code=1, seconds={"plan_privacy": 1.0}))
    assert "Stopped: no step reported an error" in runs_table([folder])[1]
    with (folder.root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = (
            "from fedemb.pipelines.run.directory import RunDirectory as R; from pathlib import "
        )
        command += f"Path; print(R(Path({str(folder.root)!r})).is_running())"
        done = subprocess.run(
            [os.sys.executable, "-c", command], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "True"
        assert "Running: " in runs_table([folder])[1]
    assert not folder.is_running()


def test_checklist_has_every_rule_with_its_state(waived, tmp_path):
    verdict = read(waived.verdict, VerdictDocument).body
    assert [check.rule for check in verdict.checks] == [rule.code for rule in RULES]
    states = {check.rule: check.outcome for check in verdict.checks}
    assert states.pop("no_gain_over_public") == "waived"
    assert {rule for rule, state in states.items() if state != "passed"} == {
        "change_not_covered",
        "tuning_not_charged",
        "log_loss_above_baseline",
        "worse_than_previous_release",
        "no_approval_by_deadline",
        "not_approved",
    }
    shown = {check.rule: (check.value, check.limit) for check in verdict.checks}
    assert shown["no_gain_over_public"] == ("+20.0 points [+0.0, +40.0]", "above 0 points")
    folder = run_folder(waived, tmp_path / "runs")
    collect_reports(folder)
    page = (folder.reports / "verdict.html").read_text()
    passed = sum(state == "passed" for state in states.values())
    assert f"{passed} rules passed, 0 failed, 1 waived; 6 do not apply to this run." in page
    assert all(rule.text in unescape(page) for rule in RULES)
    assert 'href="reports/verdict.html"' in render_index(folder)


@pytest.mark.long
def test_audit_answers_yes_or_no_before_its_evidence(released, tmp_path):
    folder = run_folder(released, tmp_path / "runs")
    collect_reports(folder)
    answer = "Yes: the priced mechanism ran; all checks passed."
    assert title((folder.reports / "audit_report.html").read_text()) == answer
    assert answer in render_index(folder)
    audit, plan = read(released.audit, AuditReport).body, plan_mechanism(released.config)
    fold = audit.mechanism.fold.model_copy(update={"same": False})
    mechanism = audit.mechanism.model_copy(update={"fold": fold})
    failed = audit_answer(audit.model_copy(update={"mechanism": mechanism}), plan)
    assert failed == "No: the priced mechanism did not run as planned (fold differs)."
    unknown = audit_answer(audit.model_copy(update={"mechanism": None}), plan)
    assert unknown.startswith("Unknown: ")


def test_forged_verdict_is_not_shown(waiting, tmp_path):
    folder = run_folder(waiting, tmp_path / "runs", **DENIED)
    path = folder.output("verdict")
    path.write_text(path.read_text().replace('"allow": false', '"allow": true'))
    assert title(render_index(folder)) == "Refused: gate_release, gate denied"


# ---- approving --------------------------------------------------------------------------------


def key(folder: Path, who: str) -> Path:
    path = folder / who
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", who, "-f", str(path)]
    subprocess.run(command, check=True)
    return path


def name_people(capsys, run, *keys: Path) -> None:
    named = [f"{path.name}={path}.pub" for path in keys]
    stores = ("--ledger", run.ledger_uri, "--keys", run.keys_uri)
    call(capsys, "ledger", "approvers", *named, *stores, "--reason", "the board")


def test_approver_is_shown_the_figures_and_what_the_gate_will_decide(waiting, tmp_path, capsys):
    run = honest_run.copy_of(waiting, tmp_path / "run")
    run.config = waiting.config
    ada, bob = key(tmp_path, "ada"), key(tmp_path, "bob")
    name_people(capsys, run, ada, bob)
    folder = run_folder(run, tmp_path / "runs", **WAITING)
    out = call(capsys, "approve", folder.root, "--key", ada, "--yes")
    lines = out.splitlines()
    order = (
        "Epsilon of one user, all runs: ",
        "Epsilon of this run: ",
        "Gain over the best baseline",
    )
    assert [next(i for i, line in enumerate(lines) if line.startswith(s)) for s in order] == sorted(
        next(i for i, line in enumerate(lines) if line.startswith(s)) for s in order
    )
    assert "after your signature: still waiting, 1 of 2 approvals" in out
    out = call(capsys, "approve", folder.root, "--key", bob, "--yes")
    assert "after your signature: the gate allows the release\n" in out
    run.do_gate()
    run.do_release()
    folder = run_folder(run, tmp_path / "after")
    page = render_index(folder)
    assert title(page) == "Released"
    assert "Approved by ada" in page
    assert "Approved by bob" in page
    trust = Path(run.ledger_uri) / "trust.json"
    assert "approved by ada, bob" in call(capsys, "verify", bundle(run), "--trust", trust)


def test_run_that_stays_refused_is_not_approved(tmp_path, capsys):
    run = without_gain(honest_run.start(tmp_path / "run", policy=policy(approvals=1)).until_gate())
    with pytest.raises(GateDenied):
        run.do_gate()
    ada = key(tmp_path, "ada")
    name_people(capsys, run, ada)
    folder = run_folder(run, tmp_path / "runs", **DENIED)
    head = run.ledger().head
    with pytest.raises(
        Refused, match=r"stays refused, with or without approvals: .*no_gain_over_public"
    ):
        call(capsys, "approve", folder.root, "--key", ada, "--yes")
    assert run.ledger().head == head


@pytest.mark.long
def test_waiver_without_a_name_is_the_owners_in_every_place(tmp_path, capsys, monkeypatch):
    """Without FEDEMB_ACTOR, the record names the key only."""
    monkeypatch.delenv("FEDEMB_ACTOR", raising=False)
    run = without_gain(honest_run.start(tmp_path / "run").until_gate())
    run.waive("no_gain_over_public", REASON)
    run.do_account()
    run.do_gate()
    run.do_release()
    folder = run_folder(run, tmp_path / "runs")
    reports = collect_reports(folder)
    shown = [path.read_text() for path in reports.values()]
    shown += [(bundle(run) / "README.md").read_text(), render_index(folder)]
    shown += [(run.root / "verdict.md").read_text()]
    assert not [text for text in shown if "unnamed" in text]
    assert f"Waived by the policy owner: `no_gain_over_public`, {REASON}" in shown[-3]
    assert f"waived by the policy owner: {REASON}" in shown[-1]
