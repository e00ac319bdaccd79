"""Steps as pods on a real node, behind admission, on volumes.

Each pod is that of the compiled pipeline, without the containers that Argo and Kubeflow add: their
images are in registries. Artifacts are on a volume. Steps of the image `light`
run in it. Those of `cpu`, which has 4 GB, run in it too, with the environment of this checkout on
volumes that no one may write to; account, keys and root are those of their pods all the same.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from node import Ended, Node
from typer.testing import CliRunner
from world import EXIT, IMAGE, USER, PodRun, World

from fedemb.config.parameters import parameters_of
from fedemb.data.builtin import write_builtin
from fedemb.pipelines.cli.main import app
from fedemb.pipelines.run.load_config import load_config
from fedemb.pipelines.steps import PIPELINE
from fedemb.runtime.provenance import code_digest
from fedemb.runtime.step import declared
from tests.kit.pipeline_runs import honest_run
from tests.kit.pipeline_runs.whole_run import SMALL_CLASSIFIER, SMALL_EMBEDDING

pytestmark = pytest.mark.timeout(3600)
"""Six pods that load TensorFlow one after the other, on a machine that may have other work."""


@pytest.fixture(scope="module")
def light(tmp_path_factory) -> Path:
    """The image, as an archive: `FEDEMB_LIGHT_ARCHIVE`, or what `make images` left in podman."""
    if given := os.environ.get("FEDEMB_LIGHT_ARCHIVE"):
        return Path(given)
    if shutil.which("podman") is None:
        pytest.skip("image `light` not found; run `make images` with podman")
    archive = tmp_path_factory.mktemp("image") / "light.tar"
    command = ["podman", "save", "--format", "docker-archive", "-o", archive, IMAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"image `light` not found; run `make images` ({done.stderr.strip()[-100:]})")
    return archive


@pytest.fixture(scope="module", params=["s3"])
def overlay(request, applied):
    """Keys on volumes, as a cluster without Secret Manager has them."""
    with applied(request.param):
        yield request.param


@pytest.fixture(scope="module")
def node(plane, overlay, light, tmp_path_factory) -> Iterator[Node]:
    """A node with the image, in the cluster as the quickstart leaves it."""
    if os.geteuid() or shutil.which("runc") is None:
        pytest.skip("a node needs root and runc (`apt-get install runc`)")
    with Node(plane, tmp_path_factory.mktemp("node") / "n") as node:
        node.load(light)
        yield node


@pytest.fixture(scope="module")
def world(plane, node, tmp_path_factory) -> World:
    """An honest run on volumes that belong to the user of the images."""
    return World(node, tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def same_code(world):
    """What the image holds is the code whose run it continues."""
    asked = "from fedemb.runtime.provenance import code_digest as d; print(d())"
    ended = world.step("plan-privacy", ["-c", asked], ["python3"])
    assert ended.exit_code == 0, ended.log
    if ended.log.strip() != code_digest():
        pytest.skip("the image `light` is of another code than this tree; run `make images`")


def test_step_runs_unprivileged_and_writes_only_to_tmp(world):
    script = "for f in /opt/fedemb/x /x /var/x /tmp/x; do touch $f && echo $f; done; id -u; env"
    ended = world.step("gate-release", ["-c", script], ["sh"])
    said = ended.log.splitlines()
    assert [line for line in said if line.endswith("/x")] == ["/tmp/x"]
    assert str(USER) in said
    assert sum("Read-only file system" in line for line in said) == 3


def test_a_step_sees_the_keys_of_its_rights_and_no_others(world):
    for step, held in {"gate-release": ["gate"], "account-privacy": ["report"]}.items():
        ended = world.step(step, ["-c", "ls /keys /keys/signing"], ["sh"])
        assert ended.log.split() == ["/keys:", "signing", "/keys/signing:", *held]


def _evidence(run: honest_run.HonestRun, step: str) -> dict[str, Path]:
    return {name: getattr(run.context().artifacts, name) for name in declared(step).inputs}


def _judge(world: World, step: str, out: Path, run: honest_run.HonestRun, **instead: Path) -> Ended:
    config = run.config.model_dump_json()
    return world.component(
        step,
        out,
        _evidence(run, step) | instead,
        config=config,
        ledger=run.ledger_uri,
        keys="/keys",
    )


@pytest.mark.usefixtures("same_code")
def test_refused_run_exits_with_code_3_and_show_outcome_reports_it(world):
    run, root = world.run, world.root / "public" / "fedemb" / "monday"
    bent = world.root / "bent.json"
    shutil.copy(run.report, bent)
    run.rewrite(bent, run_id="sunday")
    ended = _judge(world, "gate_release", root / "gate-release" / "7", run, privacy_report=bent)
    assert ended.exit_code == 3, ended.log
    assert '"kind": "step_failed"' in ended.log
    out = root / "show-outcome" / "8"
    status = {
        "state": "FAILED",
        "pipelineJobResourceName": "monday",
        "pipelineTaskName": "run",
        "error": {},
    }
    given = {**EXIT, **parameters_of(run.config), "run_id": "monday"}
    given = {name: given[name] for name in declared("show_outcome").parameters}
    ended = world.component("show_outcome", out, {}, status=status, **given)
    assert ended.exit_code == 0, ended.log
    assert (out / "summary").read_text().startswith("# Refused: ")
    metadata = json.loads((out / "executor_output.json").read_text())["artifacts"]["metrics"]
    assert metadata["artifacts"][0]["metadata"]["exit_code"] == 3.0


TASKS = {
    "embedding": ("quickstart", SMALL_EMBEDDING, "gain"),
    "classifier": ("dp_sgd_quickstart", SMALL_CLASSIFIER, "top_1"),
}
"""Preset, what is changed in it, and a figure that its last step shows."""


@pytest.mark.usefixtures("same_code")
@pytest.mark.parametrize("kind", TASKS)
def test_whole_pipeline_in_pods_ends_with_a_verified_release(world, kind):
    """A whole pipeline; what is released is verified by who has only the ledger."""
    preset, overrides, figure = TASKS[kind]
    config = load_config(preset, [*overrides, f"policy.policy_id={kind}"])
    photos, strokes = (world.root / f"{name}-{kind}.parquet" for name in ("glyphs", "strokes"))
    write_builtin(config.data.builtin, config.model.image_size, photos, strokes)
    sources = {"data.source.uri": str(photos), "pretraining.source.uri": str(strokes)}
    config = config.updated(sources)
    settings = world.root / f"{kind}.yaml"
    settings.write_text(config.model_dump_json())
    ledger = world.run.ledger_uri
    begin = ["ledger", "init", "--config", str(settings)]
    begun = CliRunner().invoke(app, [*begin, "--ledger", ledger, "--keys", world.run.keys_uri])
    assert begun.exit_code == 0, begun.output

    run = PodRun(world, PIPELINE, config, f"thursday-{kind}")
    for step in PIPELINE.declared():
        ended = run.do(step)
        assert ended.exit_code == 0, f"{step.name}: {ended.log[-3000:]}"
    ended = run.end("SUCCEEDED")
    assert ended.exit_code == 0, ended.log
    shown = run.folder(declared("show_outcome"))
    assert (shown / "summary").read_text().startswith("# Released\n")
    told = json.loads((shown / "executor_output.json").read_text())
    figures = told["artifacts"]["metrics"]["artifacts"][0]["metadata"]
    assert figure in figures
    assert 0 < figures["epsilon"] <= figures["epsilon_cumulative"] <= figures["epsilon_cap"]
    (marker,) = (world.root / run.run_id / "releases").glob("*/*.json")
    bundle = marker.with_suffix("")
    trust = ["--trust", f"{ledger}/trust.json", "--ledger", ledger]
    verified = CliRunner().invoke(app, ["verify", str(bundle), *trust])
    assert verified.exit_code == 0, verified.output
