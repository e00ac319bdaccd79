"""What a training step asks of Kubeflow Trainer when it has several hosts."""

import json
import subprocess
import sys

import pytest

from fedemb.errors import ConfigError, StorageError
from fedemb.training.host_messages import (
    CHIEF,
    HOSTS,
    POD,
    RUNTIME,
    JobHost,
    hosts_of_the_step,
    train_job,
)
from tests.kit.servers.receiver import Receiver

VARIABLES = {
    HOSTS: "3",
    RUNTIME: "fedemb-hosts-0123456789",
    **dict(zip(POD, ("10.0.0.7", "fedemb", "run-1-train", "uid-1"), strict=True)),
}


@pytest.fixture
def pod(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_the_job_names_its_runtime_the_other_hosts_and_their_chief(pod):
    _, _, job = train_job()
    assert job["spec"]["runtimeRef"]["name"] == VARIABLES[RUNTIME]
    assert job["spec"]["trainer"]["numNodes"] == 2, "the chief is the step"
    assert job["spec"]["trainer"]["env"] == [{"name": CHIEF, "value": "10.0.0.7:2222"}]
    (owner,) = job["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Pod", "run-1-train", "uid-1")
    # What Kubeflow Trainer then tells its first node of two.
    pod.setenv(CHIEF, job["spec"]["trainer"]["env"][0]["value"])
    pod.setenv("JAX_NUM_PROCESSES", "2")
    pod.setenv("JAX_PROCESS_ID", "0")
    assert JobHost.of_environment() == JobHost("10.0.0.7:2222", 3, 1)


@pytest.mark.parametrize(
    ("name", "value"), [(HOSTS, "1"), (HOSTS, "x"), (HOSTS, ""), *((name, "") for name in POD)]
)
def test_invalid_host_variables_of_the_step_are_refused(pod, name, value):
    pod.setenv(name, value)
    with pytest.raises(ConfigError, match="compile the pipeline with `fedemb compile`"):
        train_job()


def test_step_with_one_host_creates_no_train_job(monkeypatch):
    for name in (HOSTS, "JAX_NUM_PROCESSES"):
        monkeypatch.delenv(name, raising=False)
    with hosts_of_the_step() as place:
        assert place is None


@pytest.fixture
def api(pod):
    """The cluster's API server, of which the pod's account knows the address."""
    from kubernetes import client, config

    server = Receiver()
    server.answer = b'{"metadata": {"name": "fedemb-hosts-abcde"}}'

    def load():
        settings = client.Configuration()
        settings.host, settings.retries = server.url, False
        client.Configuration.set_default(settings)

    pod.setattr(config, "load_incluster_config", load)
    yield server
    server.close()


def test_hosts_are_created_with_the_step_and_deleted_after_it(api):
    failed = RuntimeError("in a round")
    with pytest.raises(RuntimeError, match="in a round"), hosts_of_the_step():
        raise failed
    (path, _, body), (name, _, _) = api.sent
    assert api.methods == ["POST", "DELETE"]
    assert path == "/apis/trainer.kubeflow.org/v1alpha1/namespaces/fedemb/trainjobs"
    assert name == f"{path}/fedemb-hosts-abcde"
    assert json.loads(body) == train_job()[2]


@pytest.mark.parametrize(
    ("status", "error", "sentence"),
    [
        (404, ConfigError, "install Kubeflow Trainer 2"),
        (403, ConfigError, "refused the TrainJob"),
        (503, StorageError, "resume the run"),
    ],
)
def test_cluster_that_creates_no_hosts_is_an_error(api, status, error, sentence):
    api.refused = {"POST": status}
    with pytest.raises(error, match=sentence), hosts_of_the_step():
        pass


def test_unresponsive_cluster_is_an_error(api):
    api.close()
    with pytest.raises(StorageError, match="does not answer"), hosts_of_the_step():
        pass


def test_training_job_that_cannot_be_deleted_does_not_fail_training(api):
    """The job's owner is the pod, which takes it along."""
    api.refused = {"DELETE": 500}
    with hosts_of_the_step() as place:
        assert place == JobHost("10.0.0.7:2222", 3, 0)


# ---- What Keras loads in a step process ----


SCRIPT = """
import gc, json, sys
from fedemb.models.keras_backend import load_keras, use_backend
if {backend!r}:
    use_backend({backend!r})
load_keras()
import keras
found = {{name: name in sys.modules for name in ("sklearn", "jax")}}
found |= {{"backend": keras.backend.backend(), "collects": gc.isenabled()}}
found["frozen"] = gc.get_freeze_count() > 100_000
import jax, sklearn
found["later"] = bool(jax.__version__ and sklearn.__version__)
print(json.dumps(found))
"""


def _found(backend, home):
    command = [sys.executable, "-c", SCRIPT.format(backend=backend)]
    env = {"KERAS_HOME": str(home), "TF_CPP_MIN_LOG_LEVEL": "3", "HOME": str(home)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "jax"), [("tensorflow", False), ("", False), ("jax", True)], ids=str
)
def test_optional_packages_are_left_out_and_can_be_imported_later(backend, jax, tmp_path):
    pytest.importorskip("sklearn")
    assert _found(backend, tmp_path) == {
        "sklearn": False,
        "jax": jax,
        "backend": backend or "tensorflow",
        "collects": True,
        "frozen": True,
        "later": True,
    }


@pytest.mark.long
def test_keras_settings_file_selects_jax(tmp_path):
    (tmp_path / "keras.json").write_text(json.dumps({"backend": "jax"}))
    assert _found("", tmp_path)["backend"] == "jax"
