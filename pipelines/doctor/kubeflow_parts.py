"""What Kubeflow and Argo do to every run, read from their own configuration."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from fedemb.foundation.canonical_json import JsonObject
from fedemb.pipelines.compile.fields import object_at, objects_at, text_at, value_at
from fedemb.pipelines.doctor.doctor import Doctor, Unreadable, reads
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


@reads(
    "multi-user",
    remedy="check for `multi_user: true` at /apis/v2beta1/healthz of the Kubeflow API",
)
def multi_user(doctor: Doctor) -> Iterator[Finding]:
    """Kubeflow Pipelines is installed in multi-user mode."""
    answer = doctor.api.get(API)
    if answer.status == 200:
        found = answer.body.get("multi_user") is True
    else:
        found = (_variable(doctor, "ml-pipeline", "MULTIUSER") or "false").lower() == "true"
    mode = "multi-user" if found else "single-user"
    what = f"Kubeflow Pipelines is installed in {mode} mode"
    remedy = "install it in multi-user mode, where each namespace has accounts of its own"
    yield judged("multi-user", found, what, remedy)


def argo(doctor: Doctor) -> Iterator[Finding]:
    """What Argo's controller adds to every pod and Workflow."""
    for check in (_archive, _time_to_live, _controller):
        yield from check(doctor)


@reads("retry", "executor", remedy=f"ask who may read the config map {CONTROLLER} in {KUBEFLOW}")
def _controller(doctor: Doctor) -> Iterator[Finding]:
    data = _config_map(doctor, KUBEFLOW, CONTROLLER)
    defaults = object_at(_parsed(data, "workflowDefaults"), "spec")
    general = object_at(defaults, "templateDefaults", "retryStrategy")
    retry = object_at(defaults, "retryStrategy") or general
    said = f"retries a step without a limit {retry.get('limit')} times" if retry else "retries none"
    yield Finding(
        "retry",
        "ok",
        f"Argo {said}; compiled private steps have limit 0. Argo starts a lost pod again whatever "
        "the limit; a private step that is started twice draws and charges nothing twice",
    )
    context = object_at(_parsed(data, "executor"), "securityContext")
    closed = context.get("runAsNonRoot") and context.get("seccompProfile")
    what = "Argo's own containers are closed" if closed else "Argo's own containers may run as root"
    remedy = "set executor.securityContext as Kubeflow 2.17 ships it"
    yield judged("executor", bool(closed), what, remedy)


@reads("schedules", remedy=f"see that {ZONE} of its deployment in {KUBEFLOW} is UTC")
def schedules(doctor: Doctor) -> Iterator[Finding]:
    """Kubeflow's scheduler reads cron in UTC."""
    zone = _variable(doctor, SCHEDULER, ZONE) or "UTC"
    remedy = f"set {ZONE}=UTC; schedules are priced in UTC"
    utc = zone in ("UTC", "Etc/UTC")
    yield judged("schedules", utc, f"Kubeflow's scheduler is set to {zone}", remedy)


@reads(
    "mapped-volumes",
    remedy="check `hostUsers` of a step's pod and the file system of the volumes of keys",
)
def mapped_volumes(doctor: Doctor) -> Iterator[Finding]:
    """Volumes of keys can be mounted in the user namespace that Kubeflow gives each pod."""
    if doctor.profile.key_volumes is None:
        return
    if text_at(_config_map(doctor, KUBEFLOW, INSTALLATION), HOST_USERS) == "true":
        yield Finding("mapped-volumes", "ok", "pods run without a user namespace of their own")
        return
    claims = {name for step in all_steps().values() for name in key_claims(step.rights)}
    shared = sorted(name for name in claims if _is_nfs(doctor, name))
    what = "pods run in a user namespace (hostUsers: false), "
    what += f"and {shared[0]} is on NFS, so no pod starts" if shared else "and no key is on NFS"
    remedy = f"choose a storage class that supports idmapped mounts, or set {HOST_USERS} to true"
    yield judged("mapped-volumes", not shared, what, remedy)


def _is_nfs(doctor: Doctor, claim: str) -> bool:
    """Whether the volume of a claim is on NFS, which Linux cannot mount with mapped ids.

    Raises:
      Unreadable: claim or volume.
    """
    answer = doctor.get(f"persistentvolumeclaims/{claim}")
    name = text_at(answer.body, "spec", "volumeName") if answer.status == 200 else ""
    volume = doctor.api.get(f"/api/v1/persistentvolumes/{name}") if name else answer
    if not name or volume.status != 200:
        raise Unreadable(f"volume of the claim {claim} could not be read ({volume.status})")
    spec = object_at(volume.body, "spec")
    return "nfs" in spec or "nfs" in text_at(spec, "csi", "driver")


@reads("time-to-live", remedy=f"see {AGENT_TTL} of the deployment {AGENT} in {KUBEFLOW}")
def _time_to_live(doctor: Doctor) -> Iterator[Finding]:
    """How long a finished Workflow can be seen with kubectl."""
    wanted = doctor.profile.ttl_seconds_after_finished
    text = _variable(doctor, AGENT, AGENT_TTL)
    if text is None or not text.isdigit():
        what = f"{AGENT_TTL} of {AGENT} is {text or 'not set'}"
        remedy = f"set {AGENT_TTL} to the seconds that finished Workflows stay"
        yield Finding("time-to-live", "could not tell", what, remedy)
        return
    seconds = min(int(text), wanted)
    who = "the persistence agent" if int(text) <= wanted else "Argo"
    what = f"{who} deletes a finished Workflow after {seconds} s; runs stay in Kubeflow's list"
    yield Finding("time-to-live", "ok", what)


@reads("log-archive", remedy=f"ask who may read the config map {REPOSITORIES} in {{namespace}}")
def _archive(doctor: Doctor) -> Iterator[Finding]:
    """Where Argo archives the log of each pod, and whether it can."""
    repository = _repository(doctor)
    if not repository.get("archiveLogs"):
        yield Finding("log-archive", "ok", "Argo archives no logs")
        return
    secret = text_at(repository, "s3", "accessKeySecret", "name")
    found = doctor.get(f"secrets/{secret}").status if secret else 404
    where = f"Argo archives every step's log to {value_at(repository, 's3', 'endpoint')}"
    if found == 403:
        remedy = f"see that the secret {secret} is in {doctor.namespace}"
        yield Finding("log-archive", "could not tell", where, remedy)
    elif found != 200:
        yield Finding(
            "log-archive",
            "unsafe",
            f"{where}, but its secret is missing here, and every pod ends with exit code 64",
            f"let Kubeflow make the secret {secret or 'it names'}, or set archiveLogs: false in "
            f"{REPOSITORIES} of {doctor.namespace}",
        )
    else:
        yield Finding("log-archive", "ok", f"{where}; steps log public events only")


def _repository(doctor: Doctor) -> JsonObject:
    """The artifact repository of runs: that of their namespace, else the controller's.

    Raises:
      Unreadable: neither can be read.
    """
    answer = doctor.get(f"configmaps/{REPOSITORIES}")
    if answer.status == 200:
        data = object_at(answer.body, "data")
        name = text_at(answer.body, "metadata", "annotations", DEFAULT_REPOSITORY)
        if name in data:
            return _parsed(data, name)
    elif answer.status != 404:
        raise Unreadable(
            f"config map {REPOSITORIES} in {doctor.namespace} could not be read ({answer.status})"
        )
    return _parsed(_config_map(doctor, KUBEFLOW, CONTROLLER), "artifactRepository")


def _parsed(data: JsonObject, name: str) -> JsonObject:
    return yaml.safe_load(text_at(data, name)) or {}


def _config_map(doctor: Doctor, namespace: str, name: str) -> JsonObject:
    answer = doctor.api.get(f"/api/v1/namespaces/{namespace}/configmaps/{name}")
    if answer.status != 200:
        raise Unreadable(f"config map {name} in {namespace} could not be read ({answer.status})")
    return object_at(answer.body, "data")


def _variable(doctor: Doctor, deployment: str, name: str) -> str | None:
    """Value of a variable of a deployment of Kubeflow's, or of the config map it comes from.

    Raises:
      Unreadable: the deployment, or what its variable refers to.
    """
    answer = doctor.api.get(f"/apis/apps/v1/namespaces/{KUBEFLOW}/deployments/{deployment}")
    if answer.status != 200:
        raise Unreadable(f"deployment {deployment} could not be read ({answer.status})")
    for container in objects_at(answer.body, "spec", "template", "spec", "containers"):
        for variable in objects_at(container, "env"):
            if variable["name"] == name:
                return _value(doctor, variable)
        for source in objects_at(container, "envFrom"):
            if reference := text_at(source, "configMapRef", "name"):
                data = _config_map(doctor, KUBEFLOW, reference)
                if found := text_at(data, name.removeprefix(text_at(source, "prefix"))):
                    return found
    return None


def _value(doctor: Doctor, variable: JsonObject) -> str | None:
    if "valueFrom" not in variable:
        return text_at(variable, "value") or None
    reference = object_at(variable, "valueFrom", "configMapKeyRef")
    if not reference:
        raise Unreadable(f"variable {variable['name']} comes from no config map")
    data = _config_map(doctor, KUBEFLOW, text_at(reference, "name"))
    return text_at(data, text_at(reference, "key")) or None
