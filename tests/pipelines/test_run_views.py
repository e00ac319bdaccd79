"""What a run shows while it runs, on a terminal and in a log."""

import io
import json

from rich.console import Console

from fedemb.documents.artifacts import Public, RunArtifacts
from fedemb.foundation.step_logging import EVENT_PREFIX
from fedemb.pipelines.cli.review import price
from fedemb.pipelines.dp_fedemb import DP_FEDEMB
from fedemb.pipelines.run.command import LiveView
from fedemb.pipelines.run.directory import RunDirectory, RunState, signed_plan
from fedemb.pipelines.run.load_config import load_config, with_data
from fedemb.pipelines.run.local import Pace, PlainView, _follow, _guarantee
from fedemb.runtime.step_context import StepContext
from fedemb.steps.plan_privacy import run as plan_privacy


class _Child:
    pid: int | None = None
    step = ""


LINES = [
    EVENT_PREFIX + json.dumps({"kind": "step_started", "step": "account_privacy", "pid": 1}),
    "INFO fedemb.reports.lineage: nothing to see",
    "13:00 WARNING fedemb.reports.lineage: lineage was not sent (ConnectionError)",
    "WARNING other.package: noise of a library",
    EVENT_PREFIX + json.dumps({"kind": "step_finished", "step": "account_privacy", "seconds": 2}),
]


def _shown(view, render):
    for line in LINES:
        _follow(line, RunState(), view, _Child(), Pace())  # pyright: ignore[reportArgumentType]
    return render()


def test_warning_of_a_step_is_shown_and_the_noise_of_libraries_is_not():
    written: list[str] = []
    plain = _shown(PlainView(written.append), lambda: "\n".join(written))
    live = LiveView(DP_FEDEMB.steps)
    console = Console(file=io.StringIO(), width=120)
    terminal = _shown(live, lambda: (console.print(live), console.file.getvalue())[1])
    for text in (plain, terminal):
        assert "lineage was not sent (ConnectionError)" in text
        assert "noise" not in text
        assert "nothing to see" not in text


def test_outputs_are_published_by_type():
    kinds = {kind for outputs in DP_FEDEMB.published().values() for kind in outputs.values()}
    assert Public in kinds
    assert {kind.__name__ for kind in kinds} == {"Public", "Noised"}


def test_a_projection_without_a_finite_epsilon_is_said_so(tmp_path):
    config = with_data(load_config("omniglot_identities"), "/images.parquet")
    run = RunDirectory.create(tmp_path / "runs", "one", config)
    folder = run.public / "dp-fedemb-1" / "plan-privacy"
    folder.mkdir(parents=True)
    artifacts = RunArtifacts(privacy_plan=folder / "privacy_plan")
    context = StepContext(artifacts, config=config, keys=str(tmp_path / "keys"))
    plan = plan_privacy(context).json
    assert [item["epsilon"] is None for item in plan["projections"]] == [True, False, False]
    assert "projected epsilon: infinite at 100,000 users, 8.65 at" in _guarantee(run)
    body = signed_plan(run)
    nobody = body.model_copy(update={"projections": body.projections[:1]})
    assert price("simulation", nobody) == ("100,000 (projected)", "infinite")
    unbounded = body.guarantee.model_copy(update={"epsilon": None})
    release = body.model_copy(update={"guarantee": unbounded})
    assert price("release", release)[1] == "infinite"
