"""Kubeflow's stand-in, a compiled pipeline and a folder of schedules."""

from pathlib import Path

import pytest

from tests.kit.schedule_kit import IMAGE, change_schedule
from tests.kit.servers.kfp_stand_in import KfpStandIn


@pytest.fixture(scope="session")
def package(tmp_path_factory) -> Path:
    """The compiled pipeline."""
    from fedemb.pipelines.cluster.compile import compile_pipeline, parse_images

    path = tmp_path_factory.mktemp("package") / "fedemb.yaml"
    compile_pipeline(path, profile="cpu", images=parse_images([IMAGE]))
    return path


@pytest.fixture
def folder(tmp_path, package) -> Path:
    """A folder with the example schedule, pinned to the compiled pipeline."""
    (tmp_path / "fedemb.yaml.package").write_bytes(package.read_bytes())
    change_schedule(tmp_path, "weekly")
    return tmp_path


@pytest.fixture
def kfp(monkeypatch, tmp_path):
    """Stand-in of the Kubeflow API; no Kubernetes API can be asked."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with KfpStandIn() as server:
        yield server


@pytest.fixture
def cluster(kfp, monkeypatch, tmp_path):
    """The stand-in as the Kubernetes API, too."""
    monkeypatch.setenv("KUBECONFIG", str(kfp.kubeconfig(tmp_path / "kubeconfig.json")))
    return kfp
