"""MLflow's own server, from its package."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.kit.servers.free_port import free_port


@contextmanager
def mlflow_server(folder: Path):
    """Starts a server that stores metadata and artifacts in a folder, and yields its address."""
    port = free_port()
    command = [Path(sys.executable).parent / "mlflow", "server", "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--port", str(port)]
    command += ["--artifacts-destination", str(folder / "artifacts"), "--host", "127.0.0.1"]
    log = (folder / "server.log").open("w")
    server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=folder)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{url}/health", server, log.name)
        yield url
    finally:
        os.killpg(server.pid, 15)
        server.wait(30)
        log.close()


def wait_for(url, server, log, seconds=240):
    for _ in range(seconds * 2):
        assert server.poll() is None, Path(log).read_text()
        try:
            with urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"no answer from {url}: {Path(log).read_text()}")
