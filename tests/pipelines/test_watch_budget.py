"""Budgets on a cluster: the step that watches them, its alerts, and its recurring run."""

import json
from datetime import timedelta
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedemb.documents.run_artifacts import RunArtifacts
from fedemb.errors import ConfigError, LedgerError
from fedemb.pipelines.budget import BUDGET
from fedemb.pipelines.cli.main import app
from fedemb.pipelines.compile.cluster import compile_pipeline, parse_images
from fedemb.pipelines.compile.rules import read_compiled, violations
from fedemb.pipelines.schedules.load import planned_runs, planned_text
from fedemb.runtime.step import declared
from fedemb.runtime.step_context import StepContext
from fedemb.steps.watch_budget import watch
from fedemb.steps.watch_budget.forecast import parse_planned
from tests.kit.budget_world import NOW, World
from tests.kit.schedule_kit import IMAGE
from tests.kit.servers.alert_receivers import smtp_server


def run(world, tmp_path, schedules=None, below=0.0):
    out = RunArtifacts(budget=tmp_path / "budget.json", budget_page=tmp_path / "budget.html")
    text = planned_text(planned_runs(world.schedules)) if schedules is None else schedules
    given = {"ledger": world.kit.ledger_uri, "schedules": text, "alert_below": below}
    return watch.run(StepContext(out, **given), NOW), json.loads(out.budget.read_text())


def test_step_on_a_cluster_finds_what_the_command_finds(world, receiver, tmp_path):
    world.reserve("monday", rounds=30)
    metrics, body = run(world, tmp_path)
    view, _ = world.view()
    (policy,) = body["policies"]
    assert policy == view.to_json()
    assert metrics["epsilon_remaining"] == view.blocks[0].remaining
    assert metrics["scheduled_runs_fitting"] == view.blocks[0].forecast.fitting
    assert "cap reached in week" in (tmp_path / "budget.html").read_text()


def test_low_budget_and_schedule_above_the_cap_are_alerted_by_http_and_mail(
    world, receiver, tmp_path, monkeypatch
):
    world.reserve("monday", rounds=30, blocks=["all/0"])
    least = world.view()[0].blocks[0].remaining
    with smtp_server() as box:
        monkeypatch.setenv(
            "FEDEMB_ALERT_EMAIL", f"smtp://127.0.0.1:{box.port}/?from=a@x.org&to=b@x.org"
        )
        run(world, tmp_path, below=least + 0.1)
    found = [(event["type"], event["subject"]) for _, _, event in receiver.posts]
    assert found == [
        ("dev.fedemb.budget.low", "all/0"),
        ("dev.fedemb.budget.cap_forecast", "all/0"),
    ]
    assert receiver.posts[1][2]["data"]["schedule"] == "weekly"
    assert len(box.messages) == 2
    assert "is below" in box.messages[0][2]["Subject"]


def test_budget_that_is_enough_alerts_nobody(tmp_path, receiver):
    world = World(tmp_path, **{"policy.epsilon_cap": 1000.0})
    world.schedule()
    run(world, tmp_path)
    assert receiver.posts == []


def test_dead_receiver_changes_nothing(world, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FEDEMB_ALERT_WEBHOOK", "http://127.0.0.1:9/s3cret")
    metrics, _ = run(world, tmp_path, below=100.0)
    assert "scheduled_runs_fitting" in metrics
    assert "was not sent" in caplog.text
    assert "s3cret" not in caplog.text


def test_broken_ledger_is_an_alert_and_a_failure(world, receiver, tmp_path):
    world.reserve("monday", rounds=30)
    second = min((tmp_path / "ledger").rglob("*2.json"))
    second.unlink()
    with pytest.raises(LedgerError):
        run(world, tmp_path)
    ((_, _, event),) = receiver.posts
    assert event["type"] == "dev.fedemb.budget.unknown"
    assert event["data"]["title"] == "Budget not readable: exit code 3"


def test_schedules_travel_as_text_and_past_runs_are_not_due(world):
    planned = planned_runs(world.schedules)
    assert parse_planned(planned_text(planned)) == planned
    assert parse_planned("") == []
    assert len(planned[0].times) > 50
    assert planned[0].moments()[0] < NOW + timedelta(days=7)
    with pytest.raises(ConfigError, match="schedule weekly is not valid"):
        parse_planned('{"weekly": {"config": {}}}')


def test_component_gives_its_outputs_and_metrics(world, tmp_path):
    step, figures = declared("watch_budget"), {}
    pod = {name: SimpleNamespace(path=str(tmp_path / name), uri="") for name in step.outputs}
    pod["metrics"].log_metric = figures.__setitem__
    step.component.python_func(ledger=world.kit.ledger_uri, schedules="{}", alert_below=0.0, **pod)
    assert (tmp_path / "budget_page").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "budget").read_text())["schema"] == "fedemb/budget/1"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    path = tmp_path_factory.mktemp("package") / "budget.yaml"
    compile_pipeline(path, profile="cpu", images=parse_images([IMAGE]), pipeline=BUDGET)
    return path


def test_compiled_pipeline_keeps_the_rules(package):
    spec, platform = read_compiled(package)
    assert violations([spec, platform]) == []
    assert list(spec["root"]["dag"]["tasks"]) == ["watch-budget"]
    assert set(spec["root"]["inputDefinitions"]["parameters"]) == set(BUDGET.parameters)


def schedule(kfp, package, world, *words):
    words = ("schedule", "budget", package, "--ledger", "gs://ledger", *words)
    words += ("--host", kfp.url, "--namespace", "team-a", "--schedules", world.schedules)
    result = CliRunner().invoke(app, list(map(str, words)))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_recurring_run_is_created_once_and_replaced_when_schedules_change(kfp, package, world):
    assert "created recurring run" in schedule(kfp, package, world, "--alert-below", 1)
    assert "already scheduled" in schedule(kfp, package, world, "--alert-below", 1)
    (made,) = kfp.recurring.values()
    assert made["display_name"] == "fedemb-budget"
    given = made["runtime_config"]["parameters"]
    assert (given["ledger"], given["alert_below"]) == ("gs://ledger", 1)
    assert [item.name for item in parse_planned(given["schedules"])] == ["weekly"]
    world.schedule("monthly", cron="0 0 3 1 * *")
    assert "replaced recurring run" in schedule(kfp, package, world, "--alert-below", 1)
    (made,) = kfp.recurring.values()
    given = made["runtime_config"]["parameters"]
    assert {item.name for item in parse_planned(given["schedules"])} == {"monthly", "weekly"}
