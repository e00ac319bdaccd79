"""Every Beam engine gives the bytes of the one in this process.

Job services, engines and workers are processes of their own, started here and stopped by their
process id. Engines outside Python are named by the environment; `make test-flink`
fetches them: FEDEMB_FLINK_JOB_SERVER, FEDEMB_SPARK_JOB_SERVER (class paths of job servers of Beam),
FEDEMB_PRISM (Beam's engine in Go).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import serving
from tests.kit.pipeline_runs.partition_run import Partitioner, Result, picture, rows_of
from tests.kit.servers.free_port import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
JAVA_17 = [
    f"--add-opens=java.base/{package}=ALL-UNNAMED"
    for package in ("java.lang", "java.util", "java.nio", "java.net", "sun.nio.ch")
]
"""What Flink and Spark reach into."""


def server(command: list[str], port: int, log: Path) -> AbstractContextManager[object]:
    """Runs a server until the end of the block, from when its port answers."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # workers: `python`
    where = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    return serving(command, port, log, PATH=path, PYTHONPATH=where)


def python_service(port: int) -> list[str]:
    module = "apache_beam.runners.portability.local_job_service_main"
    return [sys.executable, "-m", module, f"--port={port}"]


def given(variable: str, what: str) -> str:
    """The path that an environment variable names, or a skip in a sentence."""
    path = os.environ.get(variable, "")
    if not path:
        pytest.skip(f"no {what} on this machine; `make test-flink` fetches it or says why not")
    return path


def ports_of(port: int) -> list[str]:
    return [f"--job-port={port}", "--artifact-port=0", "--expansion-port=0"]


def prism(port: int) -> list[str]:
    binary = given("FEDEMB_PRISM", "Prism, Beam's engine in Go")
    return [binary, f"--job_port={port}", "--serve_http=false", "--log_level=warn"]


def flink(port: int) -> list[str]:
    jars = given("FEDEMB_FLINK_JOB_SERVER", "job server of Flink")
    driver = "org.apache.beam.runners.flink.FlinkJobServerDriver"
    return ["java", *JAVA_17, "-cp", jars, driver, "--flink-master=[local]", *ports_of(port)]


def spark(port: int) -> list[str]:
    jars = given("FEDEMB_SPARK_JOB_SERVER", "job server of Spark")
    driver = "org.apache.beam.runners.spark.SparkJobServerDriver"
    return ["java", *JAVA_17, "-cp", jars, driver, "--spark-master-url=local[2]", *ports_of(port)]


@pytest.mark.parametrize("engine", [python_service, prism, flink, spark])
def test_engine_with_external_workers_gives_the_bytes_of_this_process(
    engine: Callable[[int], list[str]], tmp_path: Path
) -> None:
    job_port, worker_port = free_port(), free_port()
    command = engine(job_port)
    pool = [sys.executable, "-m", "apache_beam.runners.worker.worker_pool_main"]
    with (
        server([*pool, f"--service_port={worker_port}"], worker_port, tmp_path / "workers.log"),
        server(command, job_port, tmp_path / "engine.log"),
    ):
        same_bytes(
            tmp_path,
            [
                "--runner=PortableRunner",
                f"--job_endpoint=localhost:{job_port}",
                "--environment_type=EXTERNAL",
                f"--environment_config=localhost:{worker_port}",
                "--parallelism=2",
            ],
        )


@pytest.mark.parametrize(
    "options",
    [
        ["--direct_running_mode=multi_processing", "--direct_num_workers=2"],
        ["--runner=DirectRunner", "--direct_running_mode=multi_threading"],
        ["--runner=PortableRunner", "--job_endpoint=embed", "--environment_type=LOOPBACK"],
    ],
)
def test_runner_of_the_package_gives_the_bytes_of_this_process(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    same_bytes(tmp_path, options)


def same_bytes(folder: Path, options: list[str]) -> None:
    """Partitions good and bad rows on the engine and here, with many shards and files of groups."""
    partition = Partitioner(folder)
    rows = [*rows_of(25), *rows_of(3)]
    rows += [
        {"image": image, "user_id": "user 3", "label": "1"} for image in (b"x", b"", picture(9))
    ]
    settings: dict[str, Any] = {"partition__shards": 5, "partition__virtual_clients": 40_000}
    here: Result = partition(rows, **settings)
    there: Result = partition(rows, options=options, **settings)
    assert there.counts == here.counts
    assert there.counts["duplicate"] == 9
    assert there.files == here.files
    assert len([name for name in here.files if name.endswith(".arrow")]) == 6
