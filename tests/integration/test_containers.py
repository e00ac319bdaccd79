"""Every step in a container: a failing one fails the run, images have what they promise.

Needs podman (or docker) and the images of `make images`; `make test-containers` provides both.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIGHT = os.environ.get("FEDEMB_LIGHT_IMAGE", "localhost/fedemb-light:0.1.0")
CPU = os.environ.get("FEDEMB_CPU_IMAGE", "localhost/fedemb-cpu:0.1.0")
HERE = Path(__file__).parent
SMALL = [
    "data.builtin.users=2000",
    "partition.virtual_clients=60",
    "mechanism.rounds=3",
    "mechanism.noise_multiplier=2.0",
    "policy.users_lower_bound=1500",
    "pretraining.epochs=1",
    "release.min_gain_over_public=null",  # three rounds of a few hundred people gain nothing
    "evaluation.bootstrap_samples=20",
    "audit.bootstrap_samples=20",
    "audit.max_users=200",
]
PIPELINE = """
import sys
from kfp import dsl, local
from tests.kit.servers.docker_runner import container_runner

@dsl.component(base_image="fedemb-python-light:unpinned", install_kfp_package=False)
def first(fail: bool, note: dsl.Output[dsl.Artifact]):
    import os
    from fedemb.privacy import accounting
    if fail:
        os._exit(3)
    with open(note.path, "w") as file:
        file.write("from the first step")

@dsl.component(base_image="fedemb-python-light:unpinned", install_kfp_package=False)
def second(note: dsl.Input[dsl.Artifact]) -> str:
    with open(note.path) as file:
        text = file.read()
    print("second ran on", text)
    return text

@dsl.pipeline(name="toy")
def toy(fail: bool):
    second(note=first(fail=fail).outputs["note"])

if __name__ == "__main__":
    local.init(
        runner=container_runner(images={"fedemb-python-light:unpinned": sys.argv[1]}),
        pipeline_root=sys.argv[2],
        raise_on_error=True,
    )
    toy(fail=sys.argv[3] == "fail")
"""


def _inspect(engine: dict[str, str], image: str) -> dict:
    import docker

    client = docker.DockerClient(base_url=engine["DOCKER_HOST"])
    try:
        return client.images.get(image).attrs
    except docker.errors.ImageNotFound:
        pytest.skip(f"no image {image} here: run `make test-containers`")


def _run_toy(engine: dict[str, str], folder: Path, mode: str) -> subprocess.CompletedProcess:
    _inspect(engine, LIGHT)
    (folder / "toy.py").write_text(PIPELINE)
    return subprocess.run(
        [sys.executable, str(folder / "toy.py"), LIGHT, str(folder / "root"), mode],
        env={**engine, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_two_steps_pass_an_artifact_between_containers(engine, tmp_path):
    result = _run_toy(engine, tmp_path, "pass")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "second ran on from the first step" in result.stdout


def test_a_failing_step_fails_the_run_and_stops_it(engine, tmp_path):
    result = _run_toy(engine, tmp_path, "fail")
    assert result.returncode != 0
    assert "second ran on" not in result.stdout


@pytest.mark.parametrize("image", [LIGHT, CPU])
def test_image_has_no_entrypoint_an_unprivileged_user_and_labels(engine, image):
    config = _inspect(engine, image)["Config"]
    assert not config.get("Entrypoint")
    assert config["User"] == "65532:65532"
    for label in ("title", "version", "revision", "licenses", "created"):
        assert config["Labels"][f"org.opencontainers.image.{label}"]


def _python(engine: dict[str, str], image: str, program: str) -> str:
    import docker

    _inspect(engine, image)
    client = docker.DockerClient(base_url=engine["DOCKER_HOST"])
    output = client.containers.run(
        image, ["python3", "-c", program], remove=True, network_mode="none", stderr=False
    )
    return output.decode()


def test_light_image_holds_accounting_ledger_and_gate_without_tensorflow(engine):
    program = (
        "import importlib, importlib.util as u\n"
        "assert u.find_spec('tensorflow') is None and u.find_spec('apache_beam') is None\n"
        "for step in ('plan_privacy.plan', 'reserve_budget.reserve', 'account_privacy.account',"
        " 'gate_release.gate'):\n"
        "    importlib.import_module('fedemb.steps.' + step)\n"
        "from fedemb.storage import gcs, s3\n"
        "from fedemb.privacy import accounting, ledger\n"
        "print('fine')"
    )
    assert _python(engine, LIGHT, program).strip() == "fine"


def test_both_images_carry_the_same_code_and_a_list_of_parts(engine):
    program = (
        "import json\n"
        "from fedemb.runtime.provenance import code_digest\n"
        "parts = json.load(open('/opt/fedemb/sbom.cdx.json'))['components']\n"
        "print(json.dumps([code_digest(), len(parts)]))"
    )
    light, cpu = (json.loads(_python(engine, image, program)) for image in (LIGHT, CPU))
    assert light[0] == cpu[0]
    assert 50 < light[1] < cpu[1]


def _run_pipeline(engine: dict[str, str], root: Path, data: Path) -> subprocess.CompletedProcess:
    for image in (LIGHT, CPU):
        _inspect(engine, image)
    program = [
        sys.executable,
        str(HERE.parent / "kit" / "pipeline_runs" / "pipeline_in_containers.py"),
    ]
    return subprocess.run(
        [*program, str(root), LIGHT, CPU, str(data)],
        env={**engine, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )


@pytest.mark.timeout(3600)
def test_whole_pipeline_runs_with_every_step_in_a_container(engine, tmp_path):
    """Runs the same pipeline without containers, to measure their cost."""
    from fedemb.pipelines.run.command import prepare

    run = prepare("quickstart", SMALL, tmp_path)
    started = time.monotonic()
    result = _run_pipeline(engine, run.root, tmp_path / "builtin-data")
    contained = time.monotonic() - started
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    released = run.document("release")
    assert Path(run.stores()["releases"], released["tree"]).is_dir()
    assert run.document("verdict")["allow"] is True

    settings = [word for item in SMALL for word in ("--set", item)]
    command = [
        sys.executable,
        "-m",
        "fedemb.pipelines.cli.main",
        "run",
        "--runs",
        str(tmp_path),
        *settings,
    ]
    started = time.monotonic()
    subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(HERE.parents[1])}, check=True, timeout=3000
    )
    bare = time.monotonic() - started
    _figure("pipeline, every step in a container", "10 steps", f"{contained:.0f} s")
    _figure("the same run without containers", "10 steps", f"{bare:.0f} s")
    _figure(
        "price of containers",
        f"{(contained - bare) / 10:+.1f} s a step",
        f"{contained / bare:.2f}x",
    )


def _figure(*words: str) -> None:
    """A line of the table that `make test-containers` prints at its end."""
    if path := os.environ.get("FIGURES"):
        with Path(path).open("a") as file:
            file.write("|".join(words) + "\n")


@pytest.mark.timeout(1800)
def test_refusal_of_a_step_in_a_container_fails_the_run_before_data_is_read(engine, tmp_path):
    from fedemb.pipelines.run.command import prepare

    run = prepare("quickstart", [*SMALL, "policy.epsilon_cap=0.01"], tmp_path)
    result = _run_pipeline(engine, run.root, tmp_path / "builtin-data")
    assert result.returncode != 0
    assert "BudgetExceeded" in result.stdout
    assert not list(run.root.glob("private/**/users*"))
