"""Kubeflow's stand-in, a receiver of alerts, and a ledger with schedules."""

from pathlib import Path

import pytest

from tests.kit.budget_world import World
from tests.kit.schedule_kit import IMAGE, change_schedule
from tests.kit.servers.alert_receivers import Webhook
from tests.kit.servers.kfp_stand_in import KfpStandIn


@pytest.fixture(scope="session")
def package(tmp_path_factory) -> Path:
    """The compiled pipeline."""
    from fedemb.pipelines.compile.cluster import compile_pipeline, parse_images

    path = tmp_path_factory.mktemp("package") / "dp-fedemb.yaml"
    compile_pipeline(path, profile="cpu", images=parse_images([IMAGE]))
    return path


@pytest.fixture
def folder(tmp_path, package) -> Path:
    """A folder with the example schedule, pinned to the compiled pipeline."""
    (tmp_path / "dp-fedemb.yaml.package").write_bytes(package.read_bytes())
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


@pytest.fixture
def receiver(monkeypatch):
    for kind in ("SLACK", "EMAIL"):
        monkeypatch.delenv(f"FEDEMB_ALERT_{kind}", raising=False)
    with Webhook() as found:
        monkeypatch.setenv("FEDEMB_ALERT_WEBHOOK", found.url)
        yield found


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    made.schedule()
    return made
