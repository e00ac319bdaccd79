"""Budget view: parts add up, the forecast is what reserving finds, and every format agrees."""

import json
import math
import re
from datetime import UTC, datetime

import pytest
from typer.testing import CliRunner

from fedemb.errors import BudgetExceeded, ConfigError
from fedemb.pipelines.cli.main import app
from fedemb.steps.watch_budget.page import budget_page
from fedemb.steps.watch_budget.prometheus import prometheus_text
from tests.kit.budget_world import CHANGES, NOW, World


def test_parts_of_a_block_add_up_to_what_the_ledger_charges(world):
    world.reserve("monday", rounds=30)
    world.reserve("tuesday", blocks=["all/0"])
    world.charge(rho=0.02)
    view, _ = world.view()
    first, second = view.blocks
    assert (first.block, second.block) == ("all/0", "all/1")
    assert first.total == world.ledger.spent("all/0").epsilon
    assert first.spent + first.reserved + first.external == pytest.approx(first.total)
    assert min(first.spent, first.reserved, first.external) > 0
    assert (first.runs, first.reservations, first.external_charges) == (1, 1, 1)
    assert first.remaining == pytest.approx(6 - first.total)
    assert second.total == second.spent == first.spent
    assert [row["name"] for row in view.charges] == ["survey"]
    assert [run_id for run_id, *_ in view.open_runs] == ["tuesday"]


def test_forecast_is_the_first_run_that_reserving_refuses(world):
    world.reserve("monday", rounds=30)
    world.charge(rho=0.02, blocks=["all/0", "all/1"])
    view, due = world.view()
    forecast = view.blocks[0].forecast
    assert 3 < forecast.fitting < forecast.runs == len(due) == 52
    for number in range(forecast.fitting):
        world.reserve(f"week-{number}")
    with pytest.raises(BudgetExceeded):
        world.reserve("one too many")
    assert world.ledger.spent("all/0").epsilon == pytest.approx(forecast.epsilon)
    assert forecast.reached == due[forecast.fitting].time
    assert forecast.reached.isocalendar()[:2] == tuple(map(int, forecast.week.split("-W")))
    assert f"cap reached in week {forecast.reached.isocalendar()[1]} of 2027" in forecast.sentence()


def test_blocks_are_forecast_apart_and_a_block_without_charges_is_shown(world):
    world.charge(rho=0.2)
    view, _ = world.view()
    spent, free = view.blocks
    assert spent.forecast.fitting < free.forecast.fitting
    assert free.total == 0
    assert view.first_reached is spent


def test_planned_series_is_forecast_to_its_number_of_runs(tmp_path):
    world = World(
        tmp_path,
        **{"policy.composition": "planned", "policy.planned_runs": 3, "policy.epsilon_cap": 9.0},
    )
    world.schedule()
    world.reserve("first", rounds=30)
    view, due = world.view()
    assert view.blocks[0].forecast.fitting == 2
    assert view.blocks[0].planned_runs_left == 2
    assert view.blocks[0].forecast.reached == due[2].time


def test_past_disabled_and_foreign_schedules_are_left_out(world, tmp_path):
    world.schedule("off", enabled=False)
    world.schedule("elsewhere", overrides={**CHANGES, "storage.ledger": str(tmp_path / "other")})
    world.schedule("another", overrides={**CHANGES, "policy.policy_id": "another"})
    world.schedule("changed", overrides={**CHANGES, "policy.epsilon_cap": 7.0})
    world.schedule("past", end=datetime(2027, 1, 5, tzinfo=UTC))
    view, due = world.view()
    assert view.schedules == ("past", "weekly")
    assert {run.schedule for run in due} == {"weekly"}
    assert min(run.time for run in due) > NOW
    assert sorted(text.split()[0] for text in view.problems) == ["changed", "elsewhere"]


def test_unbounded_charge_is_shown_as_infinite_in_every_format(world):
    for number in range(2):
        world.charge(f"survey-{number}", epsilon=0.1, delta=6e-6)
    view, due = world.view()
    row = view.blocks[0]
    assert row.total == row.external == math.inf
    assert row.forecast.fitting == 0
    assert row.forecast.sentence() == (
        "no scheduled run fits: the run of weekly on 11 January 2027 passes the cap"
    )
    found = json.loads(json.dumps(view.to_json(), allow_nan=False))["blocks"][0]
    assert found["total"] is found["remaining"] is None
    assert 'remaining{policy="photos",block="all/0"} -Inf' in prometheus_text([view])
    assert "infinite" in budget_page([(view, world.ledger, due)])


LINE = re.compile(
    r"# (HELP|TYPE) [a-z_]+ .+|"
    r'[a-z_]+\{[a-z_]+="([^"\\\n]|\\[\\n"])*"(,[a-z_]+="([^"\\\n]|\\[\\n"])*")*\} \S+'
)
"""One line of the text format 0.0.4."""


def test_metrics_file_is_valid_and_has_the_numbers_of_the_view(world):
    world.reserve("monday", rounds=30)
    view, _ = world.view()
    text = prometheus_text([view])
    assert text.endswith("\n")
    assert all(LINE.fullmatch(line) for line in text.splitlines())
    rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    labels = '{policy="photos",block="all/0"}'
    assert float(rows["fedemb_budget_epsilon_remaining" + labels]) == view.blocks[0].remaining
    reached = float(rows["fedemb_budget_cap_reached_timestamp_seconds" + labels])
    assert datetime.fromtimestamp(reached, UTC) == view.blocks[0].forecast.reached


def test_command_writes_page_metrics_and_json_of_all_policies(world, tmp_path):
    world.reserve("monday", rounds=30)
    for days in (7, 14):
        world.schedule(f"more-{days}", cron=f"0 0 {days} * * 2")
    page, metrics = tmp_path / "budget.html", tmp_path / "budget.prom"
    words = ["budget", "--ledger", world.kit.ledger_uri, "--schedules", str(world.schedules)]
    shown = CliRunner().invoke(app, [*words, "--html", str(page), "--prometheus", str(metrics)])
    assert shown.exit_code == 0, shown.output
    assert "cap reached in week" in shown.output
    assert "cap reached in week" in page.read_text()
    assert 'fedemb_budget_epsilon_cap{policy="photos"} 6.0' in metrics.read_text()
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert [item["policy_id"] for item in found["policies"]] == ["photos"]
    assert found["policies"][0]["schedules"] == ["more-14", "more-7", "weekly"]
    failed = CliRunner().invoke(app, [*words[:3], "--schedules", str(tmp_path / "none")])
    assert isinstance(failed.exception, ConfigError)
