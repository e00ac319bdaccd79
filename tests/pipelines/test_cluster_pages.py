"""The commands of the cluster pages, each run as written, with folders for the stores.

Lines of a tool in `NOT_HERE` need a cloud and are not run. tests/cluster runs the lines of kubectl
at a real API server.
"""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from fedemb.foundation.canonical_json import file_digest
from fedemb.pipelines.cli.main import app
from tests.kit.pipeline_runs import honest_run
from tests.kit.servers.kfp_stand_in import KfpStandIn

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
QUICKSTART, REFERENCE = (
    (ROOT / "docs" / "cluster" / name).read_text() for name in ("quickstart.md", "reference.md")
)
OPERATIONS = {
    "tutorials/weekly_schedule.md": "fedemb schedule",
    "how_to/recover.md": "fedemb submit|fedemb ledger void",
    "how_to/rotate_keys.md": "fedemb ledger rotate-keys|fedemb ledger verify",
}
"""Page -> start of its lines that are run here, in order; its other lines need a run folder."""
NOT_HERE = {"aws", "gcloud", "terraform", "mc"}
AT_THE_CONTROL_PLANE = {"kubectl", "cp", "grep", "sed", "infra/s3/create_stores.sh"}
ELSEWHERE = {"doctor": 4, "check-data": 2}
"""Exit codes here: no cluster (tests/cluster has one), and fewer users than the policy needs."""
SHELL = {"export", "make"}
COLUMNS = ("GKE", "S3", "Laptop")


def lines_of(text: str) -> list[str]:
    """Every line of the indented blocks of a page; continued lines are joined."""
    blocks = re.findall(r"(?:^ {4,}\S.*\n)+", text, re.MULTILINE)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [re.split(r" # ", line)[0].strip() for line in lines if line[0] not in "#`|"]


def quickstart(column: str) -> str:
    """The page without the commands of the other columns."""
    of_some = r"^\*\*((?:GKE|S3|Laptop)[, \w]*)\*\*.*\n(?:(?: {4}.*)?\n)+"
    kept = re.compile(of_some, re.MULTILINE)
    return kept.sub(lambda found: found[0] if column in found[1] else "\n", QUICKSTART)


def commands(column: str) -> list[str]:
    """Returns the lines of a column of the quickstart, and those of `OPERATIONS`."""
    found = lines_of(quickstart(column))
    for page, wanted in OPERATIONS.items():
        lines = lines_of((ROOT / "docs" / page).read_text())
        picked = [line for line in lines if re.match(wanted, line)]
        assert picked, f"{page} has no line {wanted}"
        found += picked
    return list(dict.fromkeys(found))


OURS = [line for line in commands("GKE") if line.split()[0] == "fedemb"]


def test_every_command_of_the_pages_is_tested_or_needs_a_cloud():
    columns = [line for column in COLUMNS for line in commands(column)]
    assert len(columns) > len(set(columns)) + 30, "most lines are those of all columns"
    lines = [*columns, *lines_of(REFERENCE)]
    others = {line.split()[0] for line in lines} - {"fedemb"}
    assert others <= NOT_HERE | AT_THE_CONTROL_PLANE | SHELL
    assert "**not tested**" in REFERENCE


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A policy with a released run and a reservation that nothing came of; Kubeflow's stand-in."""
    root = tmp_path_factory.mktemp("world")
    run = honest_run.start(root / "monday").until_release()
    lost = honest_run.start(root / "tuesday", "tuesday", run.policy_root)
    lost.do("plan reserve")
    stores = {"private_root": "private", "ledger": "ledger", "keys": "keys", "releases": "releases"}
    config = run.config.updated(
        {
            "data.source.uri": "gs://images/glyphs.parquet",
            "training.backend": "jax",
            **{f"storage.{name}": str(root / place) for name, place in stores.items()},
        }
    )
    (root / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    for user in range(12):
        (root / "photos" / f"u{user}").mkdir(parents=True)
        for name in ("a.png", "b.png"):
            Image.new("RGB", (16, 16), (user * 20, 0, 0)).save(root / "photos" / f"u{user}" / name)
    with KfpStandIn() as kubeflow, pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("HOME", str(root))
        patch.delenv("KUBECONFIG", raising=False)
        yield root, run, kubeflow


def _schedules(root: Path) -> None:
    """`schedules/` as in the tutorial: the example, compiled, pinned."""
    folder = root / "schedules"
    (folder / "packages").mkdir(parents=True, exist_ok=True)
    package = folder / "packages" / "fedemb.yaml"
    shutil.copy(root / "fedemb.yaml", package)
    tree = yaml.safe_load((INFRA / "schedules" / "example" / "weekly.yaml").read_text())
    tree["package"]["sha256"] = file_digest(package)
    (folder / "weekly.yaml").write_text(yaml.safe_dump(tree))


def _here(line: str, root: Path, run: honest_run.HonestRun, url: str) -> list[str]:
    """The arguments of a line with its placeholders filled in."""
    fresh = "ledger init" in line or ("--trust trust.json" in line and "ledger verify" in line)
    ledger, keys = ("ledger", "keys") if fresh else (run.ledger_uri, run.keys_uri)
    image = "registry.example/fedemb@sha256:" + "a" * 64
    for placeholder, value in {
        "$RELEASES/NAME/VERSION": f"{run.releases_uri}/glyphs/1.0",
        "$LEDGER": ledger,
        "$PROFILES": "--profile gpu",
        "gsm://KEYS/fedemb": keys,
        "...@sha256:...": image,
        "mine.yaml --policy policy": (
            f"run.yaml --set storage.ledger={run.ledger_uri} --set storage.keys={run.keys_uri}"
        ),
        " --policy policy": f" --ledger {run.ledger_uri} --keys {run.keys_uri}",
        "check-data": f"check-data --set data.source.uri={root}/photos",
        "URL": url,
        "--model runs/week-1": f"--model {run.model / 'model.json'}",
        "RUN_ID": "tuesday",
    }.items():
        line = line.replace(placeholder, value)
    if "fedemb verify" in line:
        line = line.replace("trust.json", f"{run.ledger_uri}/trust.json")
    return shlex.split(line.rpartition("| ")[2].partition(" > ")[0])[1:]


@pytest.mark.long
def test_quickstart_commands_run_in_order(world):
    root, run, kubeflow = world
    assert len(OURS) > 15
    for line in OURS:
        arguments = _here(line, root, run, kubeflow.url)
        if arguments[0] == "schedule" and not (root / "schedules").exists():
            _schedules(root)
        if arguments[0] == "schedule" and not {"--dry-run", "--check"} & {*arguments}:
            arguments.append("--yes")  # it asks
        with honest_run.stand_in_for_serving():
            result: Result = CliRunner().invoke(app, arguments, input="user 7")
        code = ELSEWHERE.get(arguments[0], 0)
        ended = getattr(result.exception, "exit_code", result.exit_code)
        assert ended == code, f"{line}\n{result.output}\n{result.exception!r}"
    assert len(kubeflow.runs) == 2, "one submitted, one resumed; a dry run sends nothing"
