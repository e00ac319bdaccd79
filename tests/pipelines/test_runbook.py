"""The runbook's commands, each run as it stands, with this machine's folders for the stores.

What needs a cloud is not run: such lines begin with a tool of `NOT_HERE`, and the runbook's last
section names it. Lines of kubectl are run by tests/cluster at a real API server.
"""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from fedemb.foundation.digests import file_digest
from fedemb.pipelines.cli.main import app
from tests.kit.pipeline_runs import honest_run
from tests.kit.servers.kfp_stand_in import KfpStandIn

INFRA = Path(__file__).parents[2] / "infra"
RUNBOOK = (INFRA / "README.md").read_text()
NOT_HERE = {"gcloud", "terraform", "mc"}
AT_THE_CONTROL_PLANE = {"kubectl", "cp", "grep"}
SHELL = {"cd", "for", "done", "key=$(openssl"}


def commands() -> list[str]:
    """Every line of the indented blocks, continued lines joined, comments and remarks cut off."""
    blocks = re.findall(r"(?:^ {4,}\S.*\n)+", RUNBOOK, re.MULTILINE)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [re.split(r"  +(?=[#\w])| #", line)[0].strip() for line in lines if line[0] not in "#`|"]


def _first_word(line: str) -> str:
    return line.removeprefix("printf '%s' \"$USER_ID\" | ").split()[0]


OURS = [line for line in commands() if _first_word(line) == "fedemb"]


def test_every_line_is_run_somewhere_or_named_as_not_tried():
    others = {_first_word(line) for line in commands()} - {"fedemb", "printf"}
    assert others <= NOT_HERE | AT_THE_CONTROL_PLANE | SHELL
    untried = RUNBOOK.partition("| not tried")[2]
    assert all(f"`{tool}`" in untried for tool in NOT_HERE)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A policy with a released run and a reservation that nothing came of; Kubeflow's stand-in."""
    root = tmp_path_factory.mktemp("world")
    run = honest_run.start(root / "monday").until_gate()
    run.do_gate()
    run.do_release()
    lost = honest_run.start(root / "tuesday", "tuesday", run.policy_root)
    lost.do_plan()
    lost.do_reserve()
    stores = {
        "private_root": "private",
        "deletion_marks": "policy/deletion_marks",
        "ledger": "ledger",
        "keys": "keys",
        "releases": "releases",
    }
    config = run.config.updated(
        {
            "data.source.uri": "gs://images/glyphs.parquet",
            "training.backend": "jax",
            **{f"storage.{name}": str(root / place) for name, place in stores.items()},
        }
    )
    (root / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with KfpStandIn() as kubeflow, pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("HOME", str(root))
        patch.delenv("KUBECONFIG", raising=False)
        yield root, run, kubeflow


def _schedules(root: Path) -> None:
    """`schedules/`, as its section of the runbook says: the example, compiled, pinned."""
    folder = root / "schedules"
    (folder / "packages").mkdir(parents=True, exist_ok=True)
    package = folder / "packages" / "dp-fedemb.yaml"
    shutil.copy(root / "dp-fedemb.yaml", package)
    tree = yaml.safe_load((INFRA / "schedules" / "example" / "weekly.yaml").read_text())
    tree["package"]["sha256"] = file_digest(package)
    (folder / "weekly.yaml").write_text(yaml.safe_dump(tree))


def _here(line: str, root: Path, run: honest_run.HonestRun, url: str) -> list[str]:
    """The arguments of a line with its placeholders filled in."""
    fresh = "ledger init" in line or ("--trust trust.json" in line and "ledger verify" in line)
    ledger, keys = ("ledger", "keys") if fresh else (run.ledger_uri, run.keys_uri)
    image = "registry.example/fedemb@sha256:" + "a" * 64
    for placeholder, value in {
        "gs://RUNS-fedemb-releases/NAME/VERSION": f"{run.releases_uri}/glyphs/1.0",
        "gs://RUNS-fedemb-ledger": ledger,
        "gsm://KEYS/fedemb": keys,
        "...@sha256:...": image,
        "--ledger ...": f"--ledger {run.ledger_uri}",
        "--keys ...": f"--keys {run.keys_uri}",
        "--reason ...": "--reason tried",
        "storage.ledger=...": f"storage.ledger={run.ledger_uri}",
        "storage.keys=...": f"storage.keys={run.keys_uri}",
        "storage.deletion_marks=...": f"storage.deletion_marks={root}/policy/deletion_marks",
        "URL": url,
        "RULE": "delta_above_customary",
        "model.json": str(run.model / "model.json"),
        "RUN_ID": "tuesday",
    }.items():
        line = line.replace(placeholder, value)
    if "fedemb verify" in line:
        line = line.replace("trust.json", f"{run.ledger_uri}/trust.json")
    return shlex.split(line.rpartition("| ")[2])[1:]


def test_the_commands_run_in_their_order(world):
    root, run, kubeflow = world
    assert len(OURS) > 15
    for line in OURS:
        arguments = _here(line, root, run, kubeflow.url)
        if arguments[0] == "schedule" and not (root / "schedules").exists():
            _schedules(root)
        if arguments[:2] == ["schedule", "apply"]:
            arguments.append("--yes")  # it asks
        with honest_run.stand_in_for_serving():
            result: Result = CliRunner().invoke(app, arguments, input="user 7")
        code = 4 if arguments[0] == "doctor" else 0  # no cluster here; tests/cluster has one
        ended = getattr(result.exception, "exit_code", result.exit_code)
        assert ended == code, f"{line}\n{result.output}\n{result.exception!r}"
    assert len(kubeflow.runs) == 2, "one submitted, one resumed; a dry run sends nothing"
