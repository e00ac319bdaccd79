"""Commands of every day: they import little, say what would happen, and list what has."""

import json
import shutil

import pytest

from fedemb.documents.utility import UtilityReport
from fedemb.errors import ConfigError, Refused
from fedemb.foundation.document import read
from fedemb.pipelines.cli.main import main
from fedemb.pipelines.run.directory import RunDirectory, RunState
from fedemb.reports.report import significant
from tests.kit.cli import ended, fedemb
from tests.kit.pipeline_runs import honest_run


def test_dry_run_says_what_would_run_and_cost_and_writes_nothing(tmp_path):
    said = fedemb("run", "--dry-run", "--runs", tmp_path / "runs")
    assert "steps: 10 would run\n" in said
    assert "differential privacy for one user" in said
    assert "a new ledger, which lets epsilon grow to 8, for this run alone" in said
    assert "refused" not in said
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError):
        fedemb("run", "--dry-run", "--set", "mechanism.rounds=0")


def test_dry_run_reads_a_persistent_ledger(tmp_path):
    policy = tmp_path / "policy"
    words = ("run", "--dry-run", "--policy", policy, "--runs", tmp_path / "runs")
    assert f"a new ledger, which lets epsilon grow to 8, in {policy}/ledger" in fedemb(*words)
    fedemb("ledger", "init", "--policy", policy, "-c", "quickstart")
    assert "admitted on all/0; 1 such runs fit in all" in fedemb(*words)
    code, said, _ = ended(*words, "--set", "mechanism.noise_multiplier=1.3")
    assert (code, "budget: refused: " in said) == (3, True)
    with pytest.raises(Refused, match=r"weekly|quickstart.*Nothing was read or written"):
        fedemb(*words[:1], *words[2:], "--set", "mechanism.noise_multiplier=1.3")
    assert not list((tmp_path / "runs").glob("*/config.yaml"))


def test_planned_series_above_its_cap_creates_no_policy(tmp_path, capsys):
    weekly = ("-c", "quickstart", "--set", "policy.planned_runs=52")
    dry_run = ("run", *weekly[:2], "--dry-run", *weekly[2:], "--runs", tmp_path / "runs")
    for words in (("ledger", "init", *weekly), dry_run):
        with pytest.raises(ConfigError, match=r"The 52 planned runs cost .* above policy\.eps"):
            fedemb(*words, "--policy", tmp_path)
    assert not list(tmp_path.iterdir())
    plan = ("plan", *weekly)
    assert "all 52 planned runs together: more than can be priced, above" in fedemb(*plan)
    quiet = (*plan, "--set", "mechanism.noise_multiplier=60", "--json")
    series = json.loads(fedemb(*quiet))["series"]
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
    outputs = tmp_path / "good" / "public" / "fedemb-1" / "step"
    outputs.mkdir(parents=True)
    shutil.copy(measured.utility, outputs / "utility_report")
    shutil.copy(measured.report, outputs / "privacy_report")
    epsilon = significant(json.loads(measured.report.read_text())["guarantee"]["epsilon"])
    report = read(measured.utility, UtilityReport).body
    gain = report.public_backbone.difference[report.headline_rate]
    listed = fedemb("runs", "--runs", tmp_path).split("\n")
    rows = {line.split("  ")[0].strip(): line for line in listed}
    assert "Released" in rows["good"]
    assert epsilon in rows["good"]
    assert f"{100 * gain.value:+.1f} points [" in rows["good"]
    assert "Refused: gate_release" in rows["bad"]
    assert "Stopped: partition_users" in rows["broken"]
    assert "Stopped: no step reported an error" in rows["new"]
    found = {row["run_id"]: row for row in json.loads(fedemb("runs", "--runs", tmp_path, "--json"))}
    assert found["good"]["gain"] == pytest.approx(gain.value)
    assert found["good"]["author"] == "unnamed"
    assert found["new"].keys() == {"run_id", "headline"}
    (tmp_path / "good" / "index.html").write_text("")
    fedemb("runs", "--runs", tmp_path, "--open")
    page = (tmp_path / "index.html").read_text()
    assert '<a href="good/index.html">good</a>' in page
    assert '<th scope="row" role="rowheader">new</th>' in page
    assert page.count("Stopped: no step reported an error") == 1
    with pytest.raises(SystemExit) as stopped:
        main(["runs", "--runs", str(tmp_path / "nowhere")])
    assert stopped.value.code == 2
