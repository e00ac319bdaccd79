"""What a training step asks of Kubeflow Trainer when it has several hosts."""

import pytest

from fedemb.embedding.hosts import CHIEF, Place
from fedemb.errors import ConfigError
from fedemb.training.train_job import HOSTS, POD, RUNTIME, hosts_of_the_step, train_job

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
    job = train_job()
    assert job["spec"]["runtimeRef"]["name"] == VARIABLES[RUNTIME]
    assert job["spec"]["trainer"]["numNodes"] == 2, "the chief is the step"
    assert job["spec"]["trainer"]["env"] == [{"name": CHIEF, "value": "10.0.0.7:2222"}]
    (owner,) = job["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Pod", "run-1-train", "uid-1")
    # What Kubeflow Trainer then tells its first node of two.
    pod.setenv(CHIEF, job["spec"]["trainer"]["env"][0]["value"])
    pod.setenv("JAX_NUM_PROCESSES", "2")
    pod.setenv("JAX_PROCESS_ID", "0")
    assert Place.of_environment() == Place("10.0.0.7:2222", 3, 1)


@pytest.mark.parametrize(
    ("name", "value"), [(HOSTS, "1"), (HOSTS, "x"), (HOSTS, ""), *((name, "") for name in POD)]
)
def test_variables_that_no_compiled_pipeline_has_are_refused_in_a_sentence(pod, name, value):
    pod.setenv(name, value)
    with pytest.raises(ConfigError, match="compile the pipeline with `fedemb compile`"):
        train_job()


def test_a_step_of_one_host_starts_none(monkeypatch):
    for name in (HOSTS, "JAX_NUM_PROCESSES"):
        monkeypatch.delenv(name, raising=False)
    with hosts_of_the_step() as place:
        assert place is None
