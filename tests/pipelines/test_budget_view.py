"""Budget view: parts add up, the forecast is what reserving finds, and every format agrees."""

import json
import math
import re
from datetime import UTC, datetime, timedelta

import pytest
import yaml
from typer.testing import CliRunner

from fedemb.errors import BudgetExceeded, ConfigError
from fedemb.keys.signatures import Signer
from fedemb.ledger import charged_content, ensure_trust, series_of, terms_of
from fedemb.ledger.external import declared_loss
from fedemb.pipelines.cli.main import app
from fedemb.pipelines.run.load_config import load_config, updated
from fedemb.pipelines.schedules.planned import planned_runs
from fedemb.privacy.mechanisms.registry import plan_mechanism
from fedemb.steps.watch_budget.forecast import scheduled
from fedemb.steps.watch_budget.page import budget_page
from fedemb.steps.watch_budget.prometheus import prometheus_text
from fedemb.steps.watch_budget.view import budget_view
from fedemb.storage import open_store
from tests.kit import ledger_kit
from tests.kit.schedule_kit import SCHEDULES

NOW = datetime(2027, 1, 6, 12, tzinfo=UTC)
CHANGES = {
    "policy.policy_id": "photos",
    "policy.composition": "renyi",
    "policy.epsilon_cap": 6.0,
    "mechanism.noise_multiplier": 4.0,
    "partition.blocks_per_cohort": 2,
}
DIGESTS = {name: "0" * 64 for name in ("plan_sha", "config_sha", "code_sha")}


class World:
    """A ledger in a folder, and schedules of runs that it will charge."""

    def __init__(self, root, **changes):
        self.config = updated(load_config("quickstart"), {**CHANGES, **changes})
        plan = plan_mechanism(self.config)
        self.kit = ledger_kit.Kit(str(root / "ledger"), str(root / "keys"), "photos")
        ensure_trust(open_store(self.kit.ledger_uri), self.kit.keys)
        self.ledger = self.kit.open()
        self.ledger.create_policy(terms_of(self.config, series_of(self.config, plan)), self.owner)
        self.content = {**charged_content(self.config, plan), **DIGESTS, "input": "photos"}
        self.schedules = root / "schedules"
        self.schedules.mkdir()
        self.changes = changes

    @property
    def owner(self):
        return Signer.load_or_create(self.kit.keys, "policy")

    def reserve(self, run_id, rounds=None, blocks=None):
        """Reserves a run, and commits it if the number of rounds is given."""
        content = {**self.content, "blocks_requested": blocks or self.content["blocks_requested"]}
        reservation = self.ledger.reserve(run_id=run_id, content=content)
        if rounds is not None:
            ledger_kit.bind(self.ledger, reservation, root=run_id)
            ledger_kit.commit(self.kit, self.ledger, reservation, rounds)
        return reservation

    def charge(self, name="survey", blocks=("all/0",), **form):
        event, delta = declared_loss(self.ledger.terms.renyi_order, **form)
        body = {"name": name, "blocks": list(blocks), "unit": "user", "relation": "REPLACE_ONE"}
        body |= {"event": event, "delta": delta, "declared": "rho", "reason": "quarterly survey"}
        self.ledger.charge(body, self.owner)

    def schedule(self, name="weekly", **fields):
        tree = yaml.safe_load((SCHEDULES / "example" / "weekly.yaml").read_text())
        tree |= {"name": name, "overrides": {**CHANGES, **self.changes}}
        tree |= {"end": NOW + timedelta(days=365), **fields}
        (self.schedules / f"{name}.yaml").write_text(yaml.safe_dump(tree))

    def view(self):
        found = scheduled(planned_runs(self.schedules), self.ledger, NOW)
        return budget_view(self.ledger, NOW, found.due, found.names, found.problems), found.due


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    made.schedule()
    return made


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
