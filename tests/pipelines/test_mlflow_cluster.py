"""Runs of a cluster in MLflow: the last step of a run writes it, and can never fail by it."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedemb.errors import AwaitingApproval
from fedemb.keys.trust import Signer
from fedemb.ledger import name_approvers
from fedemb.reports.mlflow import settings_of
from fedemb.steps import show_outcome
from tests.kit.kubeflow_run import KubeflowRun
from tests.kit.pipeline_runs import honest_run
from tests.kit.servers.mlflow import mlflow_server

KEPT = {"privacy_report.json", "utility_report.json", "verdict.json", "outcome.html"}


@pytest.fixture(scope="module")
def mlflow():
    return pytest.importorskip("mlflow", reason="the mlflow package is not installed")


@pytest.fixture
def released(tmp_path, released_run):
    return KubeflowRun(tmp_path, released_run).upload()


def only_run(client):
    experiment = client.get_experiment_by_name("glyphs")
    (found,) = client.search_runs([experiment.experiment_id])
    return found


@pytest.mark.slow
def test_mlflow_run_of_a_cluster_is_updated_from_waiting_to_released(mlflow, tmp_path):
    policy = {**honest_run.config().policy.model_dump(), "approvals": 1}
    run = honest_run.start(tmp_path / "run", policy=policy).until_gate()
    with pytest.raises(AwaitingApproval):
        run.do_gate()
    waiting = KubeflowRun(tmp_path, run).upload()
    with mlflow_server(tmp_path) as url:
        client = mlflow.MlflowClient(url)
        waiting.show(mlflow=url)
        found = only_run(client)
        assert (found.info.run_name, found.info.status) == ("monday", "RUNNING")
        ada = Signer.of_approver(Ed25519PrivateKey.generate())
        name_approvers(run.ledger(), {"ada": ada.public_key}, "the board", run.keys)
        run.approve(ada)
        run.do("gate release")
        waiting.upload()
        for _ in range(2):
            waiting.show(mlflow=url)
        found = only_run(client)
        assert found.info.status == "FINISHED"
        assert found.data.tags["fedemb.headline"] == "Released"
        assert found.data.tags["fedemb.signatures"] == "not checked"
        assert found.data.metrics["epsilon"] == waiting.report["accounting"]["epsilon"]
        assert found.data.params["mechanism.noise_multiplier"] == "2.0"
        names = {item.path for item in client.list_artifacts(found.info.run_id)}
        assert names >= KEPT


def test_mlflow_on_a_cluster_gets_only_public_documents(released, monkeypatch):
    (released.folder / "train-model" / "1" / "diagnostics").write_text("realised clients")
    (released.folder / "evaluate-model" / "1" / "scores").write_text("a figure per user")
    found = []
    monkeypatch.setattr(show_outcome, "log_in_time", lambda run, _: found.append(run) or "")
    released.show(mlflow="http://mlflow.example", **{"rollback_anchor": "gs://anchor"})
    (tracked,) = found
    everything = repr((tracked.artifacts, settings_of(tracked.config), tracked.tags()))
    for word in ("realised clients", "figure per user", "gs://anchor", released.run.keys_uri):
        assert word not in everything


@pytest.mark.parametrize(
    ("address", "said"),
    [("http://127.0.0.1:9", "did not take the run"), ("file:///tmp/mlruns", "is not supported")],
)
def test_mlflow_failure_does_not_change_the_outcome_of_a_run(released, capfd, address, said):
    page, figures = released.show(mlflow=address)
    assert page.startswith("# Released\n")
    assert figures["exit_code"] == 0
    assert said in capfd.readouterr().err
