"""Object stores on loopback: moto's S3 server and a Google Cloud Storage stand-in.

`s3_store_uri` and `gcs_store_uri` give the address of a fresh bucket, with the environment set so
that clients of this process and its children find it; `store_uri` runs a test on all three
backends. The servers start once a session and are stopped by process id.
"""

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.servers.free_port import free_port

HERE = Path(__file__).parent
_bucket_numbers = itertools.count()


@contextmanager
def serving(
    command: list[str], port: int, log: Path, **environment: str
) -> Iterator[subprocess.Popen]:
    """Runs a server until the block ends; waits until its port answers."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )
    try:
        deadline = time.monotonic() + 240  # a loaded machine takes minutes to import them
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{command[0]} did not start: {log.read_text()[-500:]}")
            time.sleep(0.05)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory) -> Iterator[int]:
    """Port of moto's S3 server."""
    port = free_port()
    program = Path(sys.executable).parent / "moto_server"
    command = [sys.executable, str(program), "-H", "127.0.0.1", "-p", str(port)]
    log = tmp_path_factory.mktemp("moto") / "log"
    with serving(command, port, log, MOTO_S3_DEFAULT_MAX_KEYS="50"):
        yield port


@pytest.fixture(scope="session")
def gcs_port(tmp_path_factory) -> Iterator[int]:
    """Port of the Google Cloud Storage stand-in."""
    port = free_port()
    command = [sys.executable, str(HERE.parent / "kit" / "servers" / "gcs_stand_in.py"), str(port)]
    with serving(command, port, tmp_path_factory.mktemp("gcs") / "log"):
        yield port


@pytest.fixture
def s3_environment(s3_port, monkeypatch) -> int:
    """Points S3 clients at the server; the value is its port."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stand-in")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "stand-in")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return s3_port


@pytest.fixture
def gcs_environment(gcs_port, monkeypatch) -> int:
    """Points Google Cloud Storage clients at the stand-in; the value is its port."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{gcs_port}")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    return gcs_port


@pytest.fixture
def s3_store_uri(s3_environment) -> str:
    """Address below a fresh S3 bucket."""
    import botocore.session

    bucket = f"fedemb-{os.getpid()}-{next(_bucket_numbers)}"
    botocore.session.get_session().create_client("s3").create_bucket(Bucket=bucket)
    return f"s3://{bucket}/root"


@pytest.fixture
def gcs_store_uri(gcs_environment) -> str:
    """Address below a fresh Google Cloud Storage bucket."""
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    bucket = f"fedemb-{os.getpid()}-{next(_bucket_numbers)}"
    storage.Client(credentials=AnonymousCredentials(), project="stand-in").create_bucket(bucket)
    return f"gs://{bucket}/root"


@pytest.fixture(params=["file", "gs", "s3"])
def store_uri(request, tmp_path) -> str:
    """A fresh store on each backend in turn."""
    if request.param == "file":
        return str(tmp_path / "store")
    return request.getfixturevalue("gcs_store_uri" if request.param == "gs" else "s3_store_uri")


@pytest.fixture(scope="session")
def engine(tmp_path_factory) -> dict[str, str]:
    """Environment in which a docker client finds an engine; podman's is started and stopped."""
    if os.environ.get("DOCKER_HOST"):
        yield dict(os.environ)
        return
    if shutil.which("podman") is None:
        pytest.skip("neither DOCKER_HOST nor podman: run `make test-containers`")
    socket = tmp_path_factory.mktemp("podman") / "socket"
    process = subprocess.Popen(["podman", "system", "service", "--time=0", f"unix://{socket}"])
    try:
        deadline = time.monotonic() + 30
        while not socket.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        yield {**os.environ, "DOCKER_HOST": f"unix://{socket}"}
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="session")
def untrained(tmp_path_factory):
    from tests.kit.pipeline_runs.training_run import prepare

    return prepare(tmp_path_factory.mktemp("untrained") / "run").root


@pytest.fixture(scope="session")
def untrained_classifier(tmp_path_factory):
    from tests.kit.pipeline_runs.training_run import classifier_config, prepare

    return prepare(tmp_path_factory.mktemp("untrained") / "run", classifier_config()).root


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    from tests.kit.pipeline_runs.evaluation_run import finished_run

    return finished_run(tmp_path_factory.mktemp("trained") / "run").root
