"""An honest run as Kubeflow leaves it: outputs in the public root, shown by the exit step."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedemb.config.parameters import parameters_of
from fedemb.runtime.step import declared
from tests.kit.pipeline_runs.honest_run import PLACES, HonestRun


class KubeflowRun:
    """A run below `<root>/public/fedemb/<id>/<task>/<execution>/<output>`."""

    def __init__(self, root: Path, run: HonestRun, job: str = "monday"):
        self.root, self.run, self.job = root, run, job
        self.folder = root / "public" / "fedemb" / job

    @property
    def report(self) -> dict[str, Any]:
        """The privacy report as JSON."""
        return json.loads(self.run.report.read_text())

    def upload(self, *tasks: str) -> KubeflowRun:
        """Writes the outputs that exist, of some tasks or of all; returns itself."""
        for step, name in PLACES:
            task, path = step.replace("_", "-"), getattr(self.run, name)
            if (tasks and task not in tasks) or not path.exists():
                continue
            target = self.folder / task / "1" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, target, dirs_exist_ok=True)
            else:
                shutil.copy(path, target)
        for task in (path.name for path in self.folder.iterdir() if path.name != "show-outcome"):
            for name in declared(task.replace("-", "_")).files:
                if not (missing := self.folder / task / "1" / name).exists():
                    missing.write_text("{}")  # an output that honest runs do not make
        return self

    def show(self, state: str = "COMPLETE", **parameters: Any) -> tuple[str, dict[str, float]]:
        """Runs the exit step with the parameters of the run; returns its summary and metrics."""
        step = declared("show_outcome")
        place, figures = self.folder / "show-outcome" / "1", {}
        place.mkdir(parents=True, exist_ok=True)
        pod: dict[str, Any] = {
            name: SimpleNamespace(path=str(place / name), uri=str(place / name), metadata={})
            for name in step.outputs
        }
        pod["metrics"].log_metric = figures.__setitem__
        given = {"run_id": self.run.run_id, "reused": "{}", "mlflow": ""}
        given |= {**parameters_of(self.run.config), **parameters}
        given = {name: given[name] for name in step.parameters}
        step.component.python_func(status=SimpleNamespace(state=state), **given, **pod)
        short, html = (place / "summary").read_text(), (place / "outcome").read_text()
        assert re.search(r"<h1>(.*?)</h1>", html)[1] == short.partition("\n")[0].removeprefix("# ")
        return short, figures
