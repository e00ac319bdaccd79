"""A release told to real servers: after it, without harm to it, once however often told."""

import json
import os
from urllib.request import urlopen

import pytest

from fedemb.errors import GateDenied
from fedemb.pipelines.cli.main import app
from fedemb.release.registries import BUNDLE, Release, register
from tests.kit.pipeline_runs import honest_run
from tests.kit.servers.receiver import Receiver


@pytest.fixture(scope="module")
def release(released_run):
    return Release.of(released_run.bundle, "s3://releases/glyphs/1.0")


@pytest.fixture
def receiver():
    server = Receiver()
    yield server
    server.close()


redirected = receiver
"""Another server, of somebody else."""


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory):
    from tests.kit.servers import mlflow

    with mlflow.mlflow_server(tmp_path_factory.mktemp("mlflow")) as url:
        yield url


@pytest.mark.slow
def test_mlflow_registry_has_one_version_with_epsilon_and_gain(release, mlflow_server):
    from mlflow import MlflowClient

    for _ in range(2):
        assert register(release, f"mlflow+{mlflow_server}") == ""
    client = MlflowClient(mlflow_server, mlflow_server)
    (version,) = client.search_model_versions("name = 'glyphs'")
    assert version.source == "s3://releases/glyphs/1.0"
    assert version.tags[BUNDLE] == release.properties[BUNDLE]
    assert version.tags["fedemb.unit"] == "user"
    assert version.tags["fedemb.ledger_head"] == release.properties["fedemb.ledger_head"]
    for name in ("epsilon", "delta", "gain"):
        assert float(version.tags[f"fedemb.{name}"]) == release.run.metrics()[name]
    (tracked,) = client.search_runs([client.get_experiment_by_name("glyphs").experiment_id])
    assert tracked.data.metrics == release.run.metrics()
    assert tracked.info.status == "FINISHED"
    assert tracked.info.run_id == version.run_id


KUBEFLOW = os.environ.get("FEDEMB_MODEL_REGISTRY")


@pytest.mark.skipif(not KUBEFLOW, reason="no FEDEMB_MODEL_REGISTRY; `make test-registry`")
def test_kubeflow_registry_has_one_version_with_epsilon_and_gain(release):
    for _ in range(2):
        assert register(release, f"kubeflow+{KUBEFLOW}") == ""
    api = f"{KUBEFLOW}/api/model_registry/v1alpha3"

    def ask(path):
        with urlopen(f"{api}/{path}", timeout=30) as answer:
            return json.loads(answer.read())

    model = ask("registered_model?name=glyphs")
    (version,) = ask(f"registered_models/{model['id']}/versions")["items"]
    properties = version["customProperties"]
    assert properties[BUNDLE]["string_value"] == release.properties[BUNDLE]
    for name in ("epsilon", "delta", "gain"):
        assert properties[f"fedemb.{name}"]["double_value"] == release.run.metrics()[name]
    (artifact,) = ask(f"model_versions/{version['id']}/artifacts")["items"]
    assert artifact["uri"] == "s3://releases/glyphs/1.0"


@pytest.mark.long  # imports MLflow
@pytest.mark.parametrize("status", [401, 500])
def test_registry_refusal_is_reported_with_its_answer(release, receiver, status):
    receiver.status = status
    assert str(status) in register(release, f"mlflow+{receiver.url}")
    assert register(release, f"kubeflow+{receiver.url}") != ""


@pytest.mark.long
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_registry_token_is_not_sent_to_redirects(  # noqa: PLR0917
    release, receiver, redirected, status, monkeypatch, tmp_path
):
    """The token of a registry is not sent to another address."""
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token"))
    receiver.status, receiver.sends_on_to = status, redirected.url.replace("127.0.0.1", "localhost")
    assert register(release, f"mlflow+{receiver.url}") != ""
    assert redirected.sent == []
    assert register(release, f"kubeflow+{receiver.url}") != ""
    assert "secret" not in repr(redirected.sent)


@pytest.fixture
def registered(monkeypatch):
    """Addresses that got a release, and the releases; one address is dead."""
    found = []

    def tell(release, address):
        found.append((release, address))
        return "dead" if "dead" in address else ""

    for module in ("steps.release_model", "release.registries"):
        monkeypatch.setattr(f"fedemb.{module}.register", tell)
    return found


def test_failed_registry_does_not_undo_the_release(tmp_path, registered, caplog):
    addresses = ["mlflow+https://dead.example", "kubeflow+https://registry.example"]
    run = honest_run.start(tmp_path / "run", storage={"registries": addresses}).until_gate()
    run.do_gate()
    released = run.do_release()
    assert run.problems() == []
    assert f"was not made known to {addresses[0]}" in caplog.text
    assert "fedemb register" in caplog.text
    assert [address for _, address in registered] == addresses
    assert {release.uri for release, _ in registered} == {released["uri"]}
    config = json.loads((run.bundle / "config.json").read_text())
    assert config["storage"]["registries"] == []  # their addresses are not published
    run.do_release()
    assert len(registered) == 4  # sent again, with the same key
    assert len({release.properties[BUNDLE] for release, _ in registered}) == 1


def test_denied_run_is_not_registered(tmp_path, registered):
    policy = {**honest_run.config().policy.model_dump(), "approvals": 1}
    storage = {"registries": ["mlflow+https://mlflow.example"]}
    run = honest_run.start(tmp_path / "run", policy=policy, storage=storage).until_gate()
    with pytest.raises(GateDenied):
        run.do_gate()
    with pytest.raises(GateDenied):
        run.do_release()
    assert registered == []


def test_register_command_registers_a_released_bundle(released_run, registered, capsys):
    address, trust = "mlflow+https://mlflow.example", str(released_run.trust)
    words = ["register", str(released_run.bundle), "--trust", trust, "--to", address]
    app(args=words, standalone_mode=False)
    assert f"glyphs 1.0 is known to {address}" in capsys.readouterr().out
    assert registered[0][0].name == "glyphs"
