"""Commands of every day: they import little, say what would happen, and list what has."""

import json
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fedemb.documents.utility import UtilityReport
from fedemb.errors import ConfigError, Refused
from fedemb.foundation.document import read
from fedemb.pipelines.cli.main import app, main
from fedemb.pipelines.run.directory import RunDirectory, RunState
from tests.kit.pipeline_runs import honest_run

HEAVY = (
    "tensorflow keras kfp kubernetes apache_beam matplotlib pandas pyarrow PIL google.cloud.storage"
)
"""Modules that planning and help must not import."""
NUMBERS = f"numpy scipy dp_accounting jinja2 yaml rich fedemb.config fedemb.ledger {HEAVY}"
"""Nor who asks for help for these."""


def imported(script):
    """Modules that a fresh Python has after the script."""
    code = f"import sys\n{script}\nprint('\\n', *sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.long
def test_help_of_every_command_imports_nothing_heavy():
    script = """
import typer
from typer.testing import CliRunner
from fedemb.pipelines.cli.main import app
asked = []
def ask(command, words):
    assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0, words
    asked.append(words)
    for name, inner in getattr(command, "commands", {}).items():
        ask(inner, [*words, name])
ask(typer.main.get_command(app), [])
assert len(asked) > 25, asked
"""
    found = imported(script) & set(NUMBERS.split())
    assert not found


@pytest.mark.long
def test_planning_imports_accounting_and_nothing_heavier():
    plan = ["plan", "--config", "quickstart"]
    modules = imported(
        f"from fedemb.pipelines.cli.main import app; app({plan!r}, standalone_mode=False)"
    )
    assert "dp_accounting" in modules
    found = modules & set(HEAVY.split())
    assert not found


def run(capsys, *words):
    app([str(word) for word in words], standalone_mode=False)
    return capsys.readouterr().out


def test_dry_run_says_what_would_run_and_cost_and_writes_nothing(tmp_path, capsys):
    said = run(capsys, "run", "--dry-run", "--runs", tmp_path / "runs")
    assert "train_dp_fedemb: would run\n" in said
    assert "differential privacy for one user" in said
    assert "a new ledger, which lets epsilon grow to 8, for this run alone" in said
    assert "refused" not in said
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError):
        run(capsys, "run", "--dry-run", "--set", "mechanism.rounds=0")


def test_dry_run_asks_a_lasting_ledger(tmp_path, capsys):
    policy = tmp_path / "policy"
    words = ("run", "--dry-run", "--policy", policy, "--runs", tmp_path / "runs")
    assert f"a new ledger, which lets epsilon grow to 8, in {policy}/ledger" in run(capsys, *words)
    init = ("--ledger", policy / "ledger", "--keys", policy / "keys", "-c", "quickstart")
    run(capsys, "ledger", "init", *init)
    assert "admitted on all/0; 1 such runs fit in all" in run(capsys, *words)
    refused = run(capsys, *words, "--set", "mechanism.noise_multiplier=1.3")
    assert "budget: refused: " in refused
    done = CliRunner().invoke(app, [*map(str, words), "--set", "mechanism.noise_multiplier=1.3"])
    assert done.exit_code == 3
    with pytest.raises(Refused, match=r"weekly|quickstart.*Nothing was read or written"):
        run(capsys, *words[:1], *words[2:], "--set", "mechanism.noise_multiplier=1.3")
    assert not list((tmp_path / "runs").glob("*/config.yaml"))


def test_series_that_does_not_fit_its_cap_begins_no_policy(tmp_path, capsys):
    weekly = ("-c", "quickstart", "--set", "policy.planned_runs=52")
    stores = ("--ledger", tmp_path / "ledger", "--keys", tmp_path / "keys")
    with pytest.raises(Refused, match=r"the 52 planned runs cost epsilon .* above policy\.eps"):
        run(capsys, "ledger", "init", *weekly, *stores)
    assert not list(tmp_path.rglob("00000000.json"))
    plan = ("plan", *weekly)
    assert "all 52 planned runs together: more than can be priced, above" in run(capsys, *plan)
    quiet = (*plan, "--set", "mechanism.noise_multiplier=60", "--json")
    series = json.loads(run(capsys, *quiet))["series"]
    assert series["runs"] == 52
    assert 0 < series["epsilon"] < series["cap"]


def test_runs_lists_verdict_epsilon_and_gain(tmp_path, capsys):
    measured = honest_run.start(tmp_path / "measured", "good").until_release()
    config = measured.config.updated({"storage.ledger": measured.ledger_uri})
    for name, state in (
        ("good", {"exit_code": 0}),
        ("bad", {"exit_code": 3, "failed_step": "gate_release"}),
        ("broken", {"exit_code": 1, "failed_step": "partition_users"}),
        ("new", {}),
    ):
        made = RunDirectory.create(tmp_path, name, config)
        made.write_state(RunState(**state))
    outputs = tmp_path / "good" / "public" / "dp-fedemb-1" / "step"
    outputs.mkdir(parents=True)
    shutil.copy(measured.utility, outputs / "utility_report")
    shutil.copy(measured.plan, outputs / "privacy_plan")
    epsilon = f"{json.loads(measured.plan.read_text())['guarantee']['epsilon']:.2f}"
    report = read(measured.utility, UtilityReport).body
    gain = report.public_backbone.difference[report.headline_rate]
    listed = run(capsys, "runs", "--runs", tmp_path).split("\n")
    rows = {line.split("  ")[0].strip(): line for line in listed}
    assert "Released" in rows["good"]
    assert epsilon in rows["good"]
    assert f"{100 * gain.value:+.1f} points [" in rows["good"]
    assert "Refused: gate_release" in rows["bad"]
    assert "Stopped: partition_users" in rows["broken"]
    assert "Stopped: no step reported an error" in rows["new"]
    with pytest.raises(SystemExit) as stopped:
        main(["runs", "--runs", str(tmp_path / "nowhere")])
    assert stopped.value.code == 2
