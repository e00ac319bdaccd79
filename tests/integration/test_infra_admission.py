"""The admission policies, their expressions evaluated: who gets which account, who is refused.

The API server evaluates the same language (CEL) with its own library; here it is cel-python's.
"""

import re
from pathlib import Path

import pytest
import yaml

from fedemb.training import host_messages as train_job

celpy = pytest.importorskip("celpy", reason="the package cel-python is not installed")

INFRA = Path(__file__).parents[2] / "infra"
GROUPS = yaml.safe_load((INFRA / "rights.yaml").read_text())["groups"]
ACCOUNTS = {
    step.replace("_", "-"): f"fedemb-{group}"
    for group, rights in GROUPS.items()
    for step in rights["steps"]
}
CONTROLLER = "system:serviceaccount:kubeflow:argo"
POLICIES = list(yaml.safe_load_all((INFRA / "kustomize/base/step_accounts.yaml").read_text()))
MUTATING, _, VALIDATING, _ = (policy["spec"] for policy in POLICIES)


def _evaluate(expression: str, **names):
    environment = celpy.Environment()
    program = environment.program(environment.compile(expression))
    return program.evaluate({name: celpy.json_to_cel(value) for name, value in names.items()})


def _pod(step: str | None, account: str) -> dict:
    labels = {"labels": {"fedemb.dev/step": step}} if step else {}
    return {"metadata": {"name": "pod", **labels}, "spec": {"serviceAccountName": account}}


def _admitted(pod: dict, user: str, validations=VALIDATING["validations"]) -> bool:
    """As the API server: an expression that cannot be evaluated refuses (failurePolicy: Fail)."""
    names = {
        "object": pod,
        "request": {"userInfo": {"username": user}},
        "variables": {"accounts": ACCOUNTS},
    }
    try:
        return all(bool(_evaluate(rule["expression"], **names)) for rule in validations)
    except celpy.CELEvalError:
        return False


def test_both_policies_hold_the_same_map_of_steps_to_accounts():
    for policy in (MUTATING, VALIDATING):
        (variable,) = policy["variables"]
        assert dict(_evaluate(variable["expression"])) == ACCOUNTS
        assert policy["failurePolicy"] == "Fail"


@pytest.mark.parametrize("step", ACCOUNTS)
def test_a_step_gets_the_account_of_its_group_and_is_then_admitted(step):
    pod = _pod(step, "fedemb-run")
    assert _evaluate(MUTATING["matchConditions"][0]["expression"], object=pod)
    assert not _admitted(pod, CONTROLLER), "without the first policy nothing runs"
    patch = MUTATING["mutations"][0]["jsonPatch"]["expression"]
    value = re.search(r"value:\s*(.*)\}\]", patch, re.DOTALL).group(1)
    account = _evaluate(value, object=pod, variables={"accounts": ACCOUNTS})
    assert account == ACCOUNTS[step]
    assert _admitted(_pod(step, account), CONTROLLER)


REFUSED = {
    "a step on another group's account": (_pod("evaluate-embeddings", "fedemb-train"), CONTROLLER),
    "an unknown step": (_pod("look-at-users", "fedemb-train"), CONTROLLER),
    "a pod without label on a group's account": (_pod(None, "fedemb-train"), CONTROLLER),
    "a step made by hand": (_pod("train-dp-fedemb", "fedemb-train"), "alice@example.org"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_a_step_on_its_account_is_refused(case):
    assert not _admitted(*REFUSED[case])


def test_each_rule_is_needed():
    rules = VALIDATING["validations"]
    for rule in rules:
        others = [other for other in rules if other is not rule]
        assert any(_admitted(pod, user, others) for pod, user in REFUSED.values()), rule["message"]


def test_drivers_and_other_pods_run_as_before():
    assert _admitted(_pod(None, "fedemb-run"), CONTROLLER)
    assert _admitted(_pod(None, "default-editor"), "system:serviceaccount:kube-system:replicaset")
    assert not _evaluate(
        MUTATING["matchConditions"][0]["expression"], object=_pod(None, "fedemb-run")
    )


HOSTS = next(
    policy["spec"]["validations"]
    for policy in yaml.safe_load_all((INFRA / "kustomize/base/pods.yaml").read_text())
    if policy["metadata"]["name"] == "fedemb-train-jobs"
)


@pytest.fixture
def job(monkeypatch):
    """The TrainJob of a training step."""
    variables = {train_job.HOSTS: "3", train_job.RUNTIME: "fedemb-hosts-0123456789"}
    for name, value in {**variables, **dict.fromkeys(train_job.POD, "x")}.items():
        monkeypatch.setenv(name, value)
    return train_job.train_job()[2]


def test_the_hosts_of_a_training_step_are_admitted(job):
    assert _admitted(job, "system:serviceaccount:fedemb:fedemb-train", HOSTS)


@pytest.mark.parametrize(
    "plant",
    [
        lambda spec: spec["runtimeRef"].update(kind="ClusterTrainingRuntime"),
        lambda spec: spec["runtimeRef"].update(name="torch-distributed"),
        lambda spec: spec["trainer"].update(image="busybox"),
        lambda spec: spec["trainer"].update(command=["sh"]),
        lambda spec: spec.update(podTemplateOverrides=[{"spec": {"serviceAccountName": "a"}}]),
        lambda spec: spec["trainer"]["env"].append({"name": "JAX_PLATFORMS", "value": "cpu"}),
        lambda spec: spec["trainer"].update(env=[{"name": "FEDEMB_CHIEF", "valueFrom": {}}]),
    ],
)
def test_hosts_of_any_other_kind_are_refused(job, plant):
    plant(job["spec"])
    assert not _admitted(job, "system:serviceaccount:fedemb:fedemb-train", HOSTS)
