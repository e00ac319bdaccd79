"""An honest run as `fedemb run` leaves it: a run directory with outputs and a state."""

import shutil
from pathlib import Path
from typing import Any

from fedemb.pipelines.run.directory import RunDirectory, RunState
from fedemb.pipelines.steps import PIPELINE
from tests.kit.pipeline_runs.honest_run import PLACES, HonestRun


def run_folder(run: HonestRun, parent: Path, **state: Any) -> RunDirectory:
    """Copies a run into a new run directory below `parent`, and writes its state."""
    stores = {"storage.ledger": run.ledger_uri, "storage.keys": run.keys_uri}
    made = RunDirectory.create(parent, run.run_id, run.config.updated(stores))
    for step, output in PLACES:
        path = getattr(run, output)
        target = made.public / "fedemb-1" / step.replace("_", "-") / output
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target)
        elif path.is_file():
            shutil.copy(path, target)
    done = dict.fromkeys(PIPELINE.steps, 1.0)
    if failed := state.get("failed_step"):
        done = {name: took for name, took in done.items() if name not in (failed, "release_model")}
    made.write_state(RunState(**{"exit_code": 0, "seconds": done, **state}))
    return made
