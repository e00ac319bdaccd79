"""An honest run as `fedemb run` leaves it: a run directory with outputs and a state."""

import shutil
from pathlib import Path
from typing import Any

from fedemb.pipelines.run.directory import RunDirectory, RunState
from fedemb.pipelines.steps import pipeline_of
from tests.kit.pipeline_runs.honest_run import HonestRun

OUTPUTS = {
    "plan_privacy": {"privacy_plan": "plan"},
    "reserve_budget": {"reservation": "reservation"},
    "partition_users": {"users": "users"},
    "pretrain_public": {"pretrained": "pretrained"},
    "train_dp_fedemb": {"model": "model"},
    "evaluate_embeddings": {"utility_report": "utility"},
    "audit_privacy": {"audit_report": "audit"},
    "account_privacy": {"privacy_report": "report"},
    "gate_release": {"verdict": "verdict"},
}
"""Step -> output -> what `HonestRun` calls its path; those of `release_model` are in its root."""


def run_folder(run: HonestRun, parent: Path, **state: Any) -> RunDirectory:
    """Copies a run into a new run directory below `parent`, and writes its state."""
    stores = {"storage.ledger": run.ledger_uri, "storage.keys": run.keys_uri}
    made = RunDirectory.create(parent, run.run_id, run.config.updated(stores))
    paths = {
        (step, output): getattr(run, attribute)
        if attribute != "pretrained"
        else run.root / attribute
        for step, outputs in OUTPUTS.items()
        for output, attribute in outputs.items()
    }
    paths |= {
        ("release_model", "release"): run.root / "release.json",
        ("gate_release", "verdict_page"): run.root / "verdict.md",
    }
    for (step, output), path in paths.items():
        target = made.public / "dp-fedemb-1" / step.replace("_", "-") / output
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target)
        elif path.is_file():
            shutil.copy(path, target)
    done = dict.fromkeys(pipeline_of(run.config).steps, 1.0)
    if failed := state.get("failed_step"):
        done = {name: took for name, took in done.items() if name not in (failed, "release_model")}
    made.write_state(RunState(**{"exit_code": 0, "seconds": done, **state}))
    return made
