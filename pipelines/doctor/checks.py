"""Requirements on a cluster that admission policies cannot enforce, read from the cluster."""

from __future__ import annotations

from collections.abc import Iterator

from fedemb.foundation.canonical_json import Json, JsonObject
from fedemb.pipelines.compile.fields import list_at, text_at, value_at
from fedemb.pipelines.doctor.doctor import Check, Doctor, Finding, judged
from fedemb.pipelines.doctor.stores import stores
from fedemb.pipelines.steps import rights_of_groups

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


def _excess(doctor: Doctor, account: str, *actions: tuple[str, tuple[str, str, str]]) -> str | None:
    """Returns the first action that an account may do; empty: none; None: RBAC cannot be asked."""
    for verb, thing in actions:
        allowed = doctor.api.may(account, doctor.namespace, verb, thing)
        if allowed is None:
            return None
        if allowed:
            return f"{account} may {verb} {thing[1]} {thing[2]}".rstrip()
    return ""


def rights(doctor: Doctor) -> Iterator[Finding]:
    """No account of a step can help itself to more."""
    for account in (f"fedemb-{group}" for group in ("run", *rights_of_groups())):
        excess = _excess(
            doctor,
            account,
            ("create", ("", "pods", "")),
            ("list", ("", "secrets", "")),
            ("create", ("", "pods/exec", "")),
            ("create", ("", "serviceaccounts/token", "fedemb-train")),
            ("create", ("rbac.authorization.k8s.io", "rolebindings", "")),
            ("patch", ("admissionregistration.k8s.io", "validatingadmissionpolicies", "")),
        )
        if excess != "":
            what = "the rights of accounts" if excess is None else excess
            remedy = "take the role binding away that allows it"
            yield judged("rights", None if excess is None else False, what, remedy)
            return
    yield Finding("rights", "ok", "no account of a step has more rights than it needs")


def editors(doctor: Doctor) -> Iterator[Finding]:
    """Returns who may edit the namespace and is not a step, such as Kubeflow's contributors."""
    actions = [
        ("create", ("argoproj.io", "workflows", "")),
        ("delete", ("networking.k8s.io", "networkpolicies", "fedemb-nothing-else")),
    ]
    if secret := doctor.profile.group_secret:
        actions.insert(0, ("get", ("", "secrets", f"{secret.name}-partition")))
    excess = _excess(doctor, EDITOR, *actions)
    what = f"{excess}: it can be any step" if excess else f"{EDITOR} cannot act as a step"
    remedy = "have no notebooks and no contributors there, then accept this in a profile"
    yield judged("editors", None if excess is None else not excess, what, remedy)


def admission(doctor: Doctor) -> Iterator[Finding]:
    """Each policy is there, fails closed and denies."""
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
                yield judged("admission", None, f"the policy {name}", APPLY)
            elif policy.status != 200 or bound.status != 200:
                yield Finding("admission", "unsafe", f"{kind}/{name} is not in force", APPLY)
            elif value_at(policy.body, "spec", "failurePolicy") != "Fail":
                yield Finding("admission", "unsafe", f"{name} fails open", APPLY)
            elif names is _VALIDATING and "Deny" not in list_at(bound.body, *actions):
                yield Finding("admission", "unsafe", f"{name} warns and does not deny", APPLY)
    yield from _thief(doctor)


def _thief(doctor: Doctor) -> Iterator[Finding]:
    """Checks by a dry run that a pod without a step's label is refused a step's account."""
    closed: JsonObject = {
        "allowPrivilegeEscalation": False,
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    main: Json = {"name": "main", "image": "none", "securityContext": closed}
    pod: JsonObject = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "thief-"},
        "spec": {"serviceAccountName": "fedemb-train", "containers": [main]},
    }
    answer = doctor.api.post(doctor.mine("pods?dryRun=All"), pod)
    refused = None if answer.status != 201 else False
    if "ValidatingAdmissionPolicy" in answer.message:
        refused = True
    what = f"a pod without a step's label on a step's account: {answer.status}"
    yield judged("thief", refused, f"{what} {answer.message[:80]}".rstrip(), APPLY)


def pod_security(doctor: Doctor) -> Iterator[Finding]:
    """The namespace refuses open pods."""
    answer = doctor.api.get(f"/api/v1/namespaces/{doctor.namespace}")
    label = "pod-security.kubernetes.io/enforce"
    level = text_at(answer.body, "metadata", "labels", label) or "nothing"
    safe = None if answer.status == 403 else level == "restricted"
    yield judged("pod-security", safe, f"the namespace enforces {level}", APPLY)


def network(doctor: Doctor) -> Iterator[Finding]:
    """Nothing comes in or goes out but what a policy opens."""
    status = doctor.get("networking.k8s.io/v1|networkpolicies/fedemb-nothing-else").status
    safe = None if status == 403 else status == 200
    what = "all ways in and out are closed but those opened by name"
    yield judged("network", safe, what if safe else "the network policy is missing", APPLY)


def public_root(doctor: Doctor) -> Iterator[Finding]:
    """Kubeflow's own artifacts go to the public root."""
    answer = doctor.get("configmaps/kfp-launcher")
    root = text_at(answer.body, "data", "defaultPipelineRoot")
    named = root.startswith(("gs://", "s3://")) and "PROJECT" not in root
    own = root.startswith("minio://") or f"/{KUBEFLOW_ROOT}/{doctor.namespace}/" in f"{root}/"
    what = f"artifacts go to {root or 'the default store of Kubeflow'}"
    if own:
        what += ", Kubeflow's own root"
    safe = None if answer.status == 403 else named and not own
    yield judged(
        "public-root", safe, what, "apply launcher.yaml of the overlay with --force-conflicts"
    )


def multi_user(doctor: Doctor) -> Iterator[Finding]:
    """Kubeflow Pipelines is installed in multi-user mode; an absent field is not a yes."""
    answer = doctor.api.get(HEALTH)
    found = answer.body.get("multi_user") is True if answer.status == 200 else None
    what = f"Kubeflow Pipelines is installed in {'multi' if found else 'single'}-user mode"
    what = "healthz of the Kubeflow API" if found is None else what
    remedy = "install it in multi-user mode, where each namespace has accounts of its own"
    yield judged("multi-user", found, what, remedy)


CHECKS: tuple[Check, ...] = (
    multi_user,
    rights,
    editors,
    admission,
    pod_security,
    network,
    public_root,
    stores,
)


def check_cluster(doctor: Doctor) -> list[Finding]:
    """Returns the findings of all checks.

    Raises:
      StorageError: the API server does not answer.
    """
    return [finding for check in CHECKS for finding in check(doctor)]
