"""`fedemb tune` through the whole pipeline: one charge, one model, and what is said about it."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fedemb.ledger import open_ledger, read_trust
from fedemb.pipelines.cli.main import app
from fedemb.storage import open_store
from tests.kit.pipeline_runs.whole_run import SMALL_CLASSIFIER, closing_line, fedemb, finish

SEARCH = {
    "mean_trials": 2,
    "law": "geometric",
    "recipes": {
        "narrow": {"mechanism.l2_norm_clip": 0.3},
        "short": {"mechanism.rounds": 3},
        "slow": {"training.server.learning_rate": 0.2, "training.server.ema_decay": 0.0},
    },
}
SETTINGS = [
    *SMALL_CLASSIFIER,
    "partition.evaluation.fraction=0.3",
    "mechanism.rounds=4",
    # Half of the users a round move the head alone, so that no key gives useless probabilities.
    "mechanism.units_per_round=120",
    "mechanism.sampling_probability=0.5",
    "model.trainable=head",
]


def tune(folder: Path) -> list[str]:
    file = folder / "recipes.yaml"
    file.write_text(yaml.safe_dump(SEARCH))
    settings = [part for item in SETTINGS for part in ("--set", item)]
    runs = str(folder / "runs")
    words = ("tune", str(file), "-c", "dp_sgd_quickstart", "--runs", runs, "--run-id", "tuned")
    return fedemb(*words, *settings)


def step_process(folder: Path) -> int:
    """Returns the id of the process of the running step of a run below a folder.

    A silent step writes nothing to the log of the run before its end, not even its start.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process ended
            command = (process / "cmdline").read_text()
            if "kfp.dsl.executor_main" in command and str(folder) in command:
                return int(process.name)
    raise AssertionError("no step is running")


def released(folder: Path, output: str) -> None:
    """What must hold of a finished search."""
    run, best = folder / "runs" / "tuned", "best of a private search over 3 recipes"
    assert best in closing_line(output, "guarantee")
    (card,) = run.glob("public/*/train-dp-sgd/model/model.json")
    assert json.loads(card.read_text())["recipe"] in SEARCH["recipes"]
    (page,) = run.glob("public/*/audit-privacy/audit_page")
    for audit in (page, run / "reports" / "audit_report.html"):
        assert "Yes: the priced mechanism ran" in audit.read_text(), "of the recipe that won"
    (report,) = run.glob("public/*/account-privacy/privacy_report")
    found = json.loads(report.read_text())
    assert found["accounting"]["event"]["type"] == "repeat_and_select"
    assert (
        found["cumulative"]["blocks"][0]["epsilon"] > found["tuning"]["search"]["epsilon_one_trial"]
    )
    root = f"{run}/policy/ledger"
    ledger = open_ledger(root, "dp_sgd_quickstart", trust=read_trust(open_store(root)))
    kinds = [record.kind for record in ledger.chain.records]
    assert kinds == ["policy", "reserve", "bind", "commit", "evaluation", "release"]
    trust = ["--trust", f"{root}/trust.json", "--ledger", root]
    bundle = closing_line(output, "release").partition(" (")[0]
    cli = CliRunner()
    assert cli.invoke(app, ["verify", bundle, *trust]).exit_code == 0
    assert best in (Path(bundle) / "README.md").read_text()
    listed = cli.invoke(app, ["runs", str(folder / "runs")]).output
    assert "private search over 3 recipes" in listed
    shown = cli.invoke(app, ["ledger", "show", "--ledger", root]).output
    assert "private search, 2 trials on average" in shown
    log = (run / "run.log").read_text()
    assert "round 1/" not in log, "rounds would reveal the number of trials"


@pytest.mark.long
def test_search_ends_with_one_released_model_that_says_so(tmp_path):
    done = finish(tune(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    released(tmp_path, done.stdout)


@pytest.mark.slow
def test_killed_search_is_resumed_without_another_charge(tmp_path):
    private = tmp_path / "runs" / "tuned" / "private"
    with subprocess.Popen(tune(tmp_path), stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 600
        while not list(private.glob("**/trial-*/rounds/*.record")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(step_process(tmp_path), signal.SIGKILL)
        process.communicate(timeout=300)
    assert process.returncode != 0
    done = finish(fedemb("run", "--resume", str(tmp_path / "runs" / "tuned")))
    assert done.returncode == 0, done.stdout + done.stderr
    released(tmp_path, done.stdout)
