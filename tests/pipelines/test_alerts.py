"""Alerts of runs, of the page of a run on a cluster, and of budgets, at a real receiver."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fedemb.errors import AwaitingApproval, GateDenied, InputError, StorageError
from fedemb.pipelines.cli.main import app
from fedemb.pipelines.run.alerts import alert_run
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.steps.watch_budget.alerts import budget_alerts
from tests.kit.pipeline_runs import honest_run
from tests.kit.run_folder import run_folder

DEAD = "http://127.0.0.1:9/s3cret"


def events(receiver):
    return [(event["type"], event["subject"], event["data"]) for _, _, event in receiver.posts]


def test_refused_run_alerts_with_its_title_and_epsilons(receiver, tmp_path):
    floor = {"release.min_gain_over_public": 0.9}
    run = honest_run.start(tmp_path / "run", **floor).until_gate()
    with pytest.raises(GateDenied):
        run.do_gate()
    state = {"exit_code": 3, "failed_step": "gate_release", "error": "GateDenied"}
    assert alert_run(run_folder(run, tmp_path / "runs", **state)) == []
    ((kind, subject, data),) = events(receiver)
    assert (kind, subject) == ("dev.fedemb.run.refused", "monday")
    assert data["title"] == "Refused: no gain over public"
    assert (data["policy"], data["exit_code"], data["epsilon_cap"]) == ("weekly", 3, 3.0)
    assert not {"gain", "utility"} & set(data)


def test_run_that_waits_alerts_and_a_run_that_may_be_released_does_not(receiver, tmp_path):
    run = honest_run.start(tmp_path / "one", **{"policy.approvals": 1}).until_gate()
    with pytest.raises(AwaitingApproval):
        run.do_gate()
    state = {"exit_code": 6, "failed_step": "gate_release", "error": "AwaitingApproval"}
    alert_run(run_folder(run, tmp_path / "runs", **state))
    allowed = honest_run.start(tmp_path / "two", "tuesday").until_gate()
    allowed.do_gate()
    alert_run(run_folder(allowed, tmp_path / "runs"))
    ((kind, subject, data),) = events(receiver)
    assert (kind, subject) == ("dev.fedemb.run.waiting_for_approval", "monday")
    assert data["title"] == "Waiting for approval: 0 of 1 given"


CHILD = """#!{python}
# Stands for kfp and one step of it.
import json
fields = dict(step="partition_users", error="E", message="/private/ada.png", exit_code={code})
print("fedemb-event:", json.dumps(dict(kind="step_failed", **fields)))
raise SystemExit(1)
"""
EXECUTE = """
import sys
from pathlib import Path
from fedemb.pipelines.run.command import execute
from fedemb.pipelines.run.directory import RunDirectory
sys.executable = sys.argv[2]
sys.exit(execute(RunDirectory.open(Path(sys.argv[1]))))
"""


@pytest.mark.long
@pytest.mark.parametrize(("code", "kind"), [(2, "failed"), (3, "refused"), (5, None)])
def test_dead_receiver_changes_nothing_about_how_a_run_ends(receiver, tmp_path, code, kind):
    """Of two receivers one is alive and one is not. An interrupted run sends no alert."""
    honest = honest_run.start(tmp_path / "run")
    stores = {"storage.ledger": honest.ledger_uri, "storage.keys": honest.keys_uri}
    run = RunDirectory.create(tmp_path / "runs", "one", honest.config.updated(stores))
    child = tmp_path / "child"
    child.write_text(CHILD.format(python=sys.executable, code=code))
    child.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(run.root), str(child)],
        env={**os.environ, "FEDEMB_ALERT_SLACK": DEAD},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("alert to slack at 127.0.0.1 was not sent" in done.stderr) == bool(kind)
    assert "s3cret" not in done.stdout + done.stderr
    found = [(name, subject) for name, subject, _ in events(receiver)]
    assert found == ([(f"dev.fedemb.run.{kind}", "one")] if kind else [])
    assert "ada.png" not in json.dumps(events(receiver)), "messages of errors are not public"


def test_state_that_cannot_be_read_is_a_note(receiver, tmp_path):
    run = run_folder(honest_run.start(tmp_path / "run").until_gate(), tmp_path / "runs")
    (run.root / "state.json").write_text("{")
    (problem,) = alert_run(run)
    assert problem.startswith("no alert was sent")


def test_budget_alerts_name_low_blocks_and_the_schedule_that_passes_the_cap(world):
    world.reserve("monday", rounds=30, blocks=["all/0"])
    view, _ = world.view()
    assert [alert.kind for alert in budget_alerts(view, None)] == ["budget.cap_forecast"]
    low = view.blocks[0].remaining + 0.1
    found = budget_alerts(view, low)
    assert [(alert.kind, alert.subject) for alert in found] == [
        ("budget.low", "all/0"),
        ("budget.cap_forecast", "all/0"),
    ]
    assert found[0].facts["threshold"] == low
    assert "cap reached in week" in found[1].title
    assert found[1].facts["schedule"] == "weekly"


def test_block_without_finite_epsilon_alerts(world):
    for number in range(2):
        world.charge(f"survey-{number}", epsilon=0.1, delta=6e-6)
    view, _ = world.view()
    low = [alert for alert in budget_alerts(view, None) if alert.kind == "budget.low"]
    assert [alert.subject for alert in low] == ["all/0"]
    assert low[0].facts["epsilon_charged"] is None
    json.dumps(low[0].cloud_event(), allow_nan=False)


def call(*words):
    result = CliRunner().invoke(app, list(map(str, words)))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_budget_command_sends_alerts_only_if_asked(world, receiver, monkeypatch):
    words = ("budget", "--ledger", world.kit.ledger_uri, "--schedules", world.schedules)
    call(*words)
    assert not receiver.posts
    call(*words, "--alert", "--alert-below", 100)
    kinds = [kind for kind, _, _ in events(receiver)]
    assert kinds == ["dev.fedemb.budget.low"] * 2 + ["dev.fedemb.budget.cap_forecast"]
    monkeypatch.setenv("FEDEMB_ALERT_WEBHOOK", DEAD)
    assert "was not sent" in call(*words, "--alert")
    monkeypatch.delenv("FEDEMB_ALERT_WEBHOOK")
    with pytest.raises(InputError, match="--alert needs a destination"):
        call(*words, "--alert")


def test_test_alert_says_which_destination_received_it(receiver, monkeypatch):
    assert "sent: webhook at 127.0.0.1" in call("alert")
    ((kind, _, data),) = events(receiver)
    assert (kind, data["title"]) == ("dev.fedemb.test", "Test alert")
    monkeypatch.setenv("FEDEMB_ALERT_SLACK", DEAD)
    with pytest.raises(StorageError, match="alert to slack at"):
        call("alert")
    assert len(receiver.posts) == 2
    monkeypatch.delenv("FEDEMB_ALERT_SLACK")
    monkeypatch.delenv("FEDEMB_ALERT_WEBHOOK")
    with pytest.raises(InputError, match="Set FEDEMB_ALERT_WEBHOOK"):
        call("alert")
