"""Requirements on a cluster that admission policies cannot enforce, read from the cluster."""

from __future__ import annotations

from collections.abc import Iterator

from fedemb.foundation.canonical_json import Json, JsonObject
from fedemb.pipelines.compile.fields import list_at, text_at, value_at
from fedemb.pipelines.doctor.doctor import Check, Doctor, Unreadable, reads
from fedemb.pipelines.doctor.finding import Finding, judged, unread
from fedemb.pipelines.doctor.stores import stores
from fedemb.pipelines.steps import KIND_CLAIMS, all_steps, key_claims, rights_of_groups

_VALIDATING = (
    "fedemb-step-accounts",
    "fedemb-pods",
    "fedemb-claims",
    "fedemb-train-jobs",
    "fedemb-no-entry",
)
KUBEFLOW_ROOT = "private-artifacts"
"""Folder of a namespace's artifacts in Kubeflow's own store."""
HEALTH = "/api/v1/namespaces/kubeflow/services/ml-pipeline:8888/proxy/apis/v2beta1/healthz"
APPLY = "apply infra/kustomize again"

EDITOR = "default-editor"
"""The account on which Kubeflow runs notebooks, and runs that name none."""


def _may(doctor: Doctor, account: str, verb: str, thing: tuple[str, str, str]) -> bool:
    allowed = doctor.api.may(account, doctor.namespace, verb, thing)
    if allowed is None:
        raise Unreadable("RBAC could not be asked")
    return allowed


@reads("rights", remedy="ask who may create SubjectAccessReviews")
def rights(doctor: Doctor) -> Iterator[Finding]:
    """Each account may write its result, and cannot help itself to more."""
    needs = [
        ("create", ("argoproj.io", "workflowtaskresults", "")),
        ("get", ("", "configmaps", "kfp-launcher")),
    ]
    never = [
        ("create", ("", "pods", "")),
        ("list", ("", "secrets", "")),
        ("create", ("", "pods/exec", "")),
        ("create", ("", "serviceaccounts/token", "fedemb-train")),
        ("create", ("rbac.authorization.k8s.io", "rolebindings", "")),
        ("patch", ("admissionregistration.k8s.io", "validatingadmissionpolicies", "")),
    ]
    accounts = [f"fedemb-{group}" for group in ("run", *rights_of_groups())]  # run drives a run
    lacking, excess = [], []
    for account in accounts:
        for verb, thing in (*needs, *never):
            allowed = _may(doctor, account, verb, thing)
            if not allowed and (verb, thing) in needs:
                lacking.append(f"{account} may not {verb} {thing[1]}")
            if allowed and (verb, thing) in never:
                excess.append(f"{account} may {verb} {thing[1]}")
    if excess:
        yield Finding("rights", "unsafe", excess[0], "take the role binding away that allows it")
    if lacking:
        yield Finding("rights", "unsafe", lacking[0], APPLY)
    if not excess and not lacking:
        what = f"{len(accounts)} accounts have the rights they need and no more"
        yield Finding("rights", "ok", what)


@reads("editors", remedy="ask who may create SubjectAccessReviews")
def editors(doctor: Doctor) -> Iterator[Finding]:
    """Returns who may edit the namespace and is not a step, such as Kubeflow's contributors."""
    asked = [
        ("create", ("argoproj.io", "workflows", "")),
        ("delete", ("networking.k8s.io", "networkpolicies", "fedemb-nothing-else")),
    ]
    if secret := doctor.profile.group_secret:
        asked.insert(0, ("get", ("", "secrets", f"{secret.name}-partition")))
    for verb, thing in asked:
        if _may(doctor, EDITOR, verb, thing):
            remedy = "have no notebooks and no contributors there, then accept this in a profile"
            what = f"{EDITOR} may {verb} {thing[1]} {thing[2]}".rstrip()
            yield Finding("editors", "unsafe", f"{what}: it can be any step", remedy)
            return
    yield Finding("editors", "ok", f"{EDITOR} cannot act as a step")


def admission(doctor: Doctor) -> Iterator[Finding]:
    """Each policy is there, fails closed and denies; and a thief is refused."""
    actions = ("spec", "validationActions")
    for kind, names in {
        "mutatingadmissionpolicies": ("fedemb-step-accounts", "fedemb-step-pods"),
        "validatingadmissionpolicies": _VALIDATING,
    }.items():
        for name in names:
            path = "/apis/admissionregistration.k8s.io/v1"
            policy = doctor.api.get(f"{path}/{kind}/{name}")
            bound = doctor.api.get(f"{path}/{kind.replace('policies', 'policybindings')}/{name}")
            if 403 in (policy.status, bound.status):
                yield unread("admission", f"the policy {name}")
            elif policy.status != 200 or bound.status != 200:
                yield Finding("admission", "unsafe", f"{kind}/{name} is not in force", APPLY)
            elif value_at(policy.body, "spec", "failurePolicy") != "Fail":
                yield Finding("admission", "unsafe", f"{name} fails open", APPLY)
            elif names is _VALIDATING and "Deny" not in list_at(bound.body, *actions):
                yield Finding("admission", "unsafe", f"{name} warns and does not deny", APPLY)
    bad = "a pod without a step's label takes its account"
    good = "a pod without a step's label is refused its account"
    yield _refused(doctor, "thief", _pod_on("fedemb-train"), bad, good)


def _refused(doctor: Doctor, check: str, pod: JsonObject, bad: str, good: str) -> Finding:
    """Checks by a dry run that our policy rejects a forbidden pod."""
    answer = doctor.api.post(doctor.mine("pods?dryRun=All"), pod)
    if answer.status == 201:
        return Finding(check, "unsafe", bad, APPLY)
    if "ValidatingAdmissionPolicy" in answer.message:
        return Finding(check, "ok", good)
    what = f"a request for a pod returned {answer.status} ({answer.message[:80]})"
    return Finding(check, "could not tell", what, "ask as somebody who may create pods there")


def _pod_on(account: str, **spec: Json) -> JsonObject:
    """A closed pod without a step's label."""
    closed: JsonObject = {
        "allowPrivilegeEscalation": False,
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    main: Json = {"name": "main", "image": "none", "securityContext": closed}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "thief-"},
        "spec": {"serviceAccountName": account, "containers": [main], **spec},
    }


def pod_security(doctor: Doctor) -> Iterator[Finding]:
    """The namespace refuses open pods."""
    answer = doctor.api.get(f"/api/v1/namespaces/{doctor.namespace}")
    if answer.status != 200:
        state = "could not tell" if answer.status == 403 else "unsafe"
        what = f"the namespace {doctor.namespace} was not found ({answer.status})"
        yield Finding("pod-security", state, what, APPLY)
        return
    label = "pod-security.kubernetes.io/enforce"
    level = text_at(answer.body, "metadata", "labels", label) or "nothing"
    yield judged("pod-security", level == "restricted", f"the namespace enforces {level}", APPLY)


def network(doctor: Doctor) -> Iterator[Finding]:
    """Nothing comes in or goes out but what a policy opens."""
    answer = doctor.get("networking.k8s.io/v1|networkpolicies/fedemb-nothing-else")
    if answer.status == 200:
        yield Finding("network", "ok", "all ways in and out are closed but those opened by name")
    elif answer.status == 403:
        yield unread("network", "network policies")
    else:
        yield Finding("network", "unsafe", "pods may open any connection", APPLY)


def secrets(doctor: Doctor) -> Iterator[Finding]:
    """Checks that the profile's secrets and volumes exist."""
    named = {secret.name for step in doctor.profile.steps.values() for secret in step.secrets}
    if doctor.profile.group_secret:
        named |= {f"{doctor.profile.group_secret.name}-{group}" for group in rights_of_groups()}
    remedy = "create it as docs/cluster/reference.md describes"
    all_there = Finding("secrets", "ok", f"the {len(named)} secrets the profile names are there")
    yield _missing(doctor, "secrets", "secrets", named, remedy) or all_there


def _missing(doctor: Doctor, check: str, kind: str, names: set[str], remedy: str) -> Finding | None:
    """The first of several named things of the namespace that is not there."""
    for name in sorted(names):
        status = doctor.get(f"{kind}/{name}").status
        if status == 403:
            return unread(check, kind)
        if status != 200:
            return Finding(check, "unsafe", f"the {kind[:-1]} {name} is missing", remedy)
    return None


def key_volumes(doctor: Doctor) -> Iterator[Finding]:
    """Where keys lie on volumes, each role's is there, and a step is refused the others."""
    if doctor.profile.key_volumes is None:
        yield Finding("key-volumes", "ok", "keys lie on no volume of the cluster")
        return
    named = {name for step in all_steps().values() for name in key_claims(step.rights)}
    missing = _missing(doctor, "key-volumes", "persistentvolumeclaims", named, APPLY)
    if missing:
        yield missing
        return
    volume: Json = {
        "name": "keys",
        "persistentVolumeClaim": {"claimName": KIND_CLAIMS["reservation"]},
    }
    bad = "a pod without rights mounts the keys"
    good = "each role's key is on its own volume, closed to others"
    yield _refused(doctor, "key-volumes", _pod_on("fedemb-run", volumes=[volume]), bad, good)


def public_root(doctor: Doctor) -> Iterator[Finding]:
    """Kubeflow's own artifacts go to the public root."""
    answer = doctor.get("configmaps/kfp-launcher")
    if answer.status != 200:
        state = "could not tell" if answer.status == 403 else "unsafe"
        yield Finding("public-root", state, "kfp-launcher was not found", APPLY)
        return
    root = text_at(answer.body, "data", "defaultPipelineRoot")
    named = root.startswith(("gs://", "s3://")) and "PROJECT" not in root
    own = root.startswith("minio://") or f"/{KUBEFLOW_ROOT}/{doctor.namespace}/" in f"{root}/"
    what = f"artifacts go to {root or 'the default store of Kubeflow'}"
    if own:
        what += ", Kubeflow's own root"
    remedy = "apply launcher.yaml of the overlay with --force-conflicts"
    yield judged("public-root", named and not own, what, remedy)


def multi_user(doctor: Doctor) -> Iterator[Finding]:
    """Kubeflow Pipelines is installed in multi-user mode; an absent field is not a yes."""
    answer = doctor.api.get(HEALTH)
    if answer.status != 200:
        yield unread("multi-user", "healthz of the Kubeflow API")
        return
    found = answer.body.get("multi_user") is True
    what = f"Kubeflow Pipelines is installed in {'multi' if found else 'single'}-user mode"
    remedy = "install it in multi-user mode, where each namespace has accounts of its own"
    yield judged("multi-user", found, what, remedy)


CHECKS: tuple[Check, ...] = (
    multi_user,
    rights,
    editors,
    admission,
    pod_security,
    network,
    secrets,
    key_volumes,
    public_root,
    stores,
)


def check_cluster(doctor: Doctor) -> list[Finding]:
    """Returns the findings of all checks.

    Raises:
      StorageError: the API server does not answer.
    """
    return [finding for check in CHECKS for finding in check(doctor)]
