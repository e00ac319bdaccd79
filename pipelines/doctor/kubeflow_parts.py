"""What Kubeflow and Argo do to every run, read from their own configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from fedemb.pipelines.doctor.doctor import Doctor
from fedemb.pipelines.doctor.finding import Finding, judged
from fedemb.pipelines.steps import all_steps, key_claims

KUBEFLOW = "kubeflow"
"""Namespace of Kubeflow's own parts."""
API = f"/api/v1/namespaces/{KUBEFLOW}/services/ml-pipeline:8888/proxy/apis/v2beta1/healthz"
AGENT, AGENT_TTL = "ml-pipeline-persistenceagent", "TTL_SECONDS_AFTER_WORKFLOW_FINISH"
SCHEDULER, ZONE = "ml-pipeline-scheduledworkflow", "CRON_SCHEDULE_TIMEZONE"
REPOSITORIES = "artifact-repositories"
DEFAULT_REPOSITORY = "workflows.argoproj.io/default-artifact-repository"
CONTROLLER = "workflow-controller-configmap"
INSTALLATION, HOST_USERS = "pipeline-install-config", "defaultSecurityContextHostUsers"


class Unreadable(Exception):
    """Something that cannot be read; the text names it."""


def multi_user(doctor: Doctor) -> Iterator[Finding]:
    """Kubeflow Pipelines is installed in multi-user mode."""
    answer = doctor.api.get(API)
    if answer.status == 200:
        found = answer.body.get("multi_user") is True
    else:
        try:
            found = (_variable(doctor, "ml-pipeline", "MULTIUSER") or "false").lower() == "true"
        except Unreadable as error:
            remedy = "check for `multi_user: true` at /apis/v2beta1/healthz of the Kubeflow API"
            yield Finding("multi-user", "could not tell", str(error), remedy)
            return
    mode = "multi-user" if found else "single-user"
    what = f"Kubeflow Pipelines is installed in {mode} mode"
    remedy = "install it in multi-user mode, where each namespace has accounts of its own"
    yield judged("multi-user", found, what, remedy)


def argo(doctor: Doctor) -> Iterator[Finding]:
    """What Argo's controller adds to every pod and Workflow."""
    yield _archive(doctor)
    yield _time_to_live(doctor)
    try:
        data = _config_map(doctor, KUBEFLOW, CONTROLLER)
    except Unreadable as error:
        remedy = f"ask who may read the config map {CONTROLLER} in {KUBEFLOW}"
        for check in ("retry", "executor"):
            yield Finding(check, "could not tell", str(error), remedy)
        return
    defaults = _parsed(data, "workflowDefaults").get("spec", {})
    retry = defaults.get("retryStrategy") or defaults.get("templateDefaults", {}).get(
        "retryStrategy"
    )
    said = f"retries a step without a limit {retry.get('limit')} times" if retry else "retries none"
    yield Finding(
        "retry",
        "ok",
        f"Argo {said}; compiled private steps have limit 0. Argo starts a lost pod again whatever "
        "the limit; a private step that is started twice draws and charges nothing twice",
    )
    context = _parsed(data, "executor").get("securityContext", {})
    closed = context.get("runAsNonRoot") and context.get("seccompProfile")
    what = "Argo's own containers are closed" if closed else "Argo's own containers may run as root"
    remedy = "set executor.securityContext as Kubeflow 2.17 ships it"
    yield judged("executor", bool(closed), what, remedy)


def schedules(doctor: Doctor) -> Iterator[Finding]:
    """Kubeflow's scheduler reads cron in UTC."""
    try:
        zone = _variable(doctor, SCHEDULER, ZONE) or "UTC"
    except Unreadable as error:
        remedy = f"see that {ZONE} of its deployment in {KUBEFLOW} is UTC"
        yield Finding("schedules", "could not tell", str(error), remedy)
        return
    remedy = f"set {ZONE}=UTC; schedules are priced in UTC"
    utc = zone in ("UTC", "Etc/UTC")
    yield judged("schedules", utc, f"Kubeflow's scheduler is set to {zone}", remedy)


def mapped_volumes(doctor: Doctor) -> Iterator[Finding]:
    """Volumes of keys can be mounted in the user namespace that Kubeflow gives each pod."""
    if doctor.profile.key_volumes is None:
        return
    remedy = "check `hostUsers` of a step's pod and the file system of the volumes of keys"
    try:
        setting = _config_map(doctor, KUBEFLOW, INSTALLATION).get(HOST_USERS) or "false"
        if setting == "true":
            yield Finding("mapped-volumes", "ok", "pods run without a user namespace of their own")
            return
        claims = {name for step in all_steps().values() for name in key_claims(step.rights)}
        shared = sorted(name for name in claims if _is_nfs(doctor, name))
    except Unreadable as error:
        yield Finding("mapped-volumes", "could not tell", str(error), remedy)
        return
    what = "pods run in a user namespace (hostUsers: false), "
    what += f"and {shared[0]} is on NFS, so no pod starts" if shared else "and no key is on NFS"
    remedy = f"choose a storage class that supports idmapped mounts, or set {HOST_USERS} to true"
    yield judged("mapped-volumes", not shared, what, remedy)


def _is_nfs(doctor: Doctor, claim: str) -> bool:
    """Whether the volume of a claim is on NFS, which Linux cannot mount with mapped ids.

    Raises:
      Unreadable: claim or volume.
    """
    answer = doctor.api.get(doctor.mine(f"persistentvolumeclaims/{claim}"))
    name = answer.body.get("spec", {}).get("volumeName", "") if answer.status == 200 else ""
    volume = doctor.api.get(f"/api/v1/persistentvolumes/{name}") if name else answer
    if not name or volume.status != 200:
        raise Unreadable(f"volume of the claim {claim} could not be read ({volume.status})")
    spec = volume.body["spec"]
    return "nfs" in spec or "nfs" in spec.get("csi", {}).get("driver", "")


def _time_to_live(doctor: Doctor) -> Finding:
    """How long a finished Workflow can be seen with kubectl."""
    wanted = doctor.profile.ttl_seconds_after_finished
    try:
        text = _variable(doctor, AGENT, AGENT_TTL)
    except Unreadable as error:
        remedy = f"see {AGENT_TTL} of the deployment {AGENT} in {KUBEFLOW}"
        return Finding("time-to-live", "could not tell", str(error), remedy)
    if text is None or not text.isdigit():
        what = f"{AGENT_TTL} of {AGENT} is {text or 'not set'}"
        remedy = f"set {AGENT_TTL} to the seconds that finished Workflows stay"
        return Finding("time-to-live", "could not tell", what, remedy)
    seconds = min(int(text), wanted)
    who = "the persistence agent" if int(text) <= wanted else "Argo"
    what = f"{who} deletes a finished Workflow after {seconds} s; runs stay in Kubeflow's list"
    return Finding("time-to-live", "ok", what)


def _archive(doctor: Doctor) -> Finding:
    """Where Argo archives the log of each pod, and whether it can."""
    try:
        repository = _repository(doctor)
    except Unreadable as error:
        remedy = f"ask who may read the config map {REPOSITORIES} in {doctor.namespace}"
        return Finding("log-archive", "could not tell", str(error), remedy)
    if not repository.get("archiveLogs"):
        return Finding("log-archive", "ok", "Argo archives no logs")
    store = repository.get("s3", {})
    secret = store.get("accessKeySecret", {}).get("name", "")
    found = doctor.api.get(doctor.mine(f"secrets/{secret}")).status if secret else 404
    where = f"Argo archives every step's log to {store.get('endpoint')}"
    if found == 403:
        remedy = f"see that the secret {secret} is in {doctor.namespace}"
        return Finding("log-archive", "could not tell", where, remedy)
    if found != 200:
        return Finding(
            "log-archive",
            "unsafe",
            f"{where}, but its secret is missing here, and every pod ends with exit code 64",
            f"let Kubeflow make the secret {secret or 'it names'}, or set archiveLogs: false in "
            f"{REPOSITORIES} of {doctor.namespace}",
        )
    return Finding("log-archive", "ok", f"{where}; steps log public events only")


def _repository(doctor: Doctor) -> dict[str, Any]:
    """The artifact repository of runs: that of their namespace, else the controller's.

    Raises:
      Unreadable: neither can be read.
    """
    answer = doctor.api.get(doctor.mine(f"configmaps/{REPOSITORIES}"))
    if answer.status == 200:
        data = answer.body.get("data") or {}
        name = (answer.body["metadata"].get("annotations") or {}).get(DEFAULT_REPOSITORY)
        if name in data:
            return _parsed(data, str(name))
    elif answer.status != 404:
        raise Unreadable(
            f"config map {REPOSITORIES} in {doctor.namespace} could not be read ({answer.status})"
        )
    return _parsed(_config_map(doctor, KUBEFLOW, CONTROLLER), "artifactRepository")


def _parsed(data: dict[str, str], name: str) -> dict[str, Any]:
    return yaml.safe_load(data.get(name, "")) or {}


def _config_map(doctor: Doctor, namespace: str, name: str) -> dict[str, str]:
    answer = doctor.api.get(f"/api/v1/namespaces/{namespace}/configmaps/{name}")
    if answer.status != 200:
        raise Unreadable(f"config map {name} in {namespace} could not be read ({answer.status})")
    return answer.body.get("data") or {}


def _variable(doctor: Doctor, deployment: str, name: str) -> str | None:
    """Value of a variable of a deployment of Kubeflow's, or of the config map it comes from.

    Raises:
      Unreadable: the deployment, or what its variable refers to.
    """
    answer = doctor.api.get(f"/apis/apps/v1/namespaces/{KUBEFLOW}/deployments/{deployment}")
    if answer.status != 200:
        raise Unreadable(f"deployment {deployment} could not be read ({answer.status})")
    for container in answer.body["spec"]["template"]["spec"]["containers"]:
        for variable in container.get("env") or []:
            if variable["name"] == name:
                return _value(doctor, variable)
        for source in container.get("envFrom") or []:
            if reference := source.get("configMapRef"):
                data = _config_map(doctor, KUBEFLOW, reference["name"])
                if found := data.get(name.removeprefix(source.get("prefix", ""))):
                    return found
    return None


def _value(doctor: Doctor, variable: dict[str, Any]) -> str | None:
    if "valueFrom" not in variable:
        return variable.get("value")
    reference = variable["valueFrom"].get("configMapKeyRef")
    if reference is None:
        raise Unreadable(f"variable {variable['name']} comes from no config map")
    return _config_map(doctor, KUBEFLOW, reference["name"]).get(reference["key"])
