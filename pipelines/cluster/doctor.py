"""Requirements on a cluster that admission policies cannot enforce, read from the cluster.

Checks the access of each step's account by asking the stores.

Of S3 it is asked with the access key of each account, of Google Cloud by reading the buckets' IAM
policies. No content is read or replaced: a part is sent to an upload that there is not, an object
is asked for by its head. The expected access is the table of `infra/rights.yaml`.
"""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from fedemb.config import RunConfig
from fedemb.errors import Refused, StorageError
from fedemb.foundation.canonical_json import JsonObject
from fedemb.pipelines.cluster.compile import AS_NOBODY, CLOSED, Profile
from fedemb.pipelines.cluster.kubernetes import Answer, KubernetesApi
from fedemb.pipelines.cluster.rules import list_at, text_at, value_at
from fedemb.pipelines.steps import rights_of_groups
from fedemb.runtime.step import Rights


class Unreadable(StorageError):
    """Something could not be read, so a check could not tell."""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    check: str
    """Its name; a profile accepts an unsafe one by it."""
    state: Literal["unsafe", "could not tell", "accepted", "ok"]
    what: str
    """Observed state."""
    remedy: str = ""
    """Remedy; empty unless unsafe."""


def table(findings: Sequence[Finding]) -> str:
    """One line for each finding, the unsafe ones first."""
    order = ["unsafe", "accepted", "could not tell", "ok"]
    return "\n".join(
        f"{item.state:<15} {item.check:<14} {item.what}{item.remedy and '; '}{item.remedy}"
        for item in sorted(findings, key=lambda item: order.index(item.state))
    )


def require_safe(findings: Sequence[Finding]) -> None:
    """Raises unless the profile accepts every unsafe finding.

    Raises:
      Refused: it does not accept one.
    """
    if unsafe := [finding for finding in findings if finding.state == "unsafe"]:
        first = unsafe[0]
        raise Refused(
            f"{len(unsafe)} finding(s) on this cluster are unsafe, first {first.check}: "
            f"{first.what}; {first.remedy}, or name it in the profile's `accepts`"
        )


@dataclass(frozen=True)
class Doctor:
    """APIs that a check of a cluster reads, and the expected state."""

    api: KubernetesApi
    namespace: str
    """Namespace of the runs."""
    profile: Profile
    configs: Sequence[RunConfig] = ()
    """Configurations of the runs, which name the stores."""

    def get(self, path: str) -> Answer:
        """Reads an object; a path without a leading slash is one of the namespace.

        Raises:
          Unreadable: it is forbidden.
        """
        mine = f"/api/v1/namespaces/{self.namespace}/{path}"
        answer = self.api.get(path if path.startswith("/") else mine)
        if answer.status == 403:
            raise Unreadable(f"{path} may not be read from here. Ask who may read it.")
        return answer


VERBS = ("list", "read", "write", "delete")
_OF_WORD = {
    "names": {"list"},
    **{word: {"list", "read"} for word in ("read", "private")},
    **{word: {"list", "read", "write"} for word in ("append", "create", "write")},
}
"""Word of the table -> actions on a whole bucket."""
PARALLEL = 8
"""Questions asked at a time."""


@dataclass(frozen=True)
class Place:
    """A part of a store whose rights are one."""

    store: Literal["public_root", "private_root", "ledger", "releases", "rollback_anchor", "input"]
    """Its name in the configuration, or the private images."""
    address: str
    """gs:// or s3://"""
    folder: str = ""
    """Folder of each run in the private root; empty: rights are the whole bucket's."""

    def __str__(self) -> str:
        name = "the private images" if self.store == "input" else f"storage.{self.store}"
        return f"{self.folder} in {name}" if self.folder else name

    @property
    def bucket(self) -> str:
        """The bucket's name."""
        return urlsplit(self.address).netloc

    @property
    def prefix(self) -> str:
        """Prefix of the names of its objects."""
        path = urlsplit(self.address).path.strip("/")
        return f"{path}/" if path else ""

    @property
    def verbs(self) -> tuple[str, ...]:
        """Actions to check. Only records must be permanent; elsewhere writers may delete."""
        return VERBS if self.store in ("ledger", "releases", "rollback_anchor") else VERBS[:3]

    def allowed(self, rights: Rights) -> set[str]:
        """Returns the actions that the table allows an account here.

        Names are granted for a whole bucket only: who may see one folder sees all names.
        """
        match self.store:
            case "public_root":
                return _OF_WORD["write"]
            case "private_root":
                inside = _OF_WORD.get(rights.private.get(self.folder, "none"), set())
                return inside - {"list"} | ({"list"} if rights.private else set())
            case "input":
                return set[str]().union(*(_OF_WORD.get(kind, set()) for kind in rights.input))
            case store:
                return _OF_WORD.get(getattr(rights, store), set())


Held = Callable[[str, Place, str], bool]
"""Whether the account of a group may do something in a place."""


def _folders() -> set[str]:
    """Folders of a run in the private root."""
    return {folder for row in rights_of_groups().values() for folder in row.private}


def _rows() -> dict[str, Rights]:
    """Group -> its row of the table; that of `run`, which drives runs, grants nothing."""
    return {"run": Rights(), **rights_of_groups()}


def places(configs: Iterable[RunConfig]) -> list[Place]:
    """Every place that configurations of runs name, keys left out."""
    found: list[Place] = []
    for config in configs:
        storage, uri = config.storage, config.data.source.uri
        if root := storage.private_root:
            found += [Place("private_root", root, folder) for folder in sorted(_folders())]
        if uri != "builtin":
            found.append(Place("input", uri.rpartition("/")[0] if urlsplit(uri).path else uri))
        for name in ("public_root", "ledger", "releases", "rollback_anchor"):
            if address := getattr(storage, name):
                found.append(Place(name, address))
    return list(dict.fromkeys(found))


def stores(doctor: Doctor) -> Iterator[str]:
    """Each account may do in each store what the table says, and no more."""
    named = places(doctor.configs)
    for scheme, open_held in (("gs", _held_on_google), ("s3", _held_on_s3)):
        there = [place for place in named if place.address.startswith(f"{scheme}://")]
        if there:
            yield from _compared(open_held(doctor, there), there)
    yield from _everybody_of_a_project(named)
    if not named:
        raise Unreadable("No configuration names a store; name the run's configuration by --config")
    for place in named:
        if urlsplit(place.address).scheme not in ("gs", "s3"):
            raise Unreadable(
                f"{place} is a folder. Use gs:// or s3:// stores on a cluster "
                "(docs/cluster/quickstart.md, step 3)."
            )


def _compared(held: Held, there: Sequence[Place]) -> Iterator[str]:
    """Yields each right too many, then each too few."""
    rows = _rows()
    questions = [(group, place, verb) for group in rows for place in there for verb in place.verbs]
    with ThreadPoolExecutor(PARALLEL) as pool:
        answers = list(pool.map(lambda question: held(*question), questions))
    for wanted, word in ((False, "may"), (True, "may not")):
        for (group, place, verb), allowed in zip(questions, answers, strict=True):
            if wanted == (verb in place.allowed(rows[group])) and allowed != wanted:
                yield f"fedemb-{group} {word} {verb} {place}"


# S3: each account is asked for by its own key.


def _held_on_s3(doctor: Doctor, there: list[Place]) -> Held:
    clients = {group: _client(doctor, group) for group in _rows()}
    samples = {place: _sample(place, clients) for place in there}

    def held(group: str, place: Place, verb: str) -> bool:
        asked = clients[group]
        folder = f"doctor/{place.folder}/" if place.folder else ""
        probe = f"{place.prefix}{folder}doctor-{secrets.token_hex(8)}"
        match verb:
            case "list":
                ask, more = asked.list_objects_v2, {"Prefix": probe, "MaxKeys": 1}
            case "read":
                ask, more = asked.head_object, {"Key": samples[place] or probe}
            case "write":
                upload = {"UploadId": secrets.token_hex(16), "PartNumber": 1, "Body": b""}
                ask, more = asked.upload_part, {"Key": probe, **upload}
            case _:
                ask, more = asked.delete_object, {"Key": probe}
        return _ask(ask, Bucket=place.bucket, **more) is not None

    return held


def _client(doctor: Doctor, group: str) -> Any:
    from botocore.config import Config
    from botocore.session import Session

    secret = doctor.profile.group_secret
    if secret is None:
        raise Unreadable("The profile has no access keys of the groups. Set `group_secret`.")
    name, environment = f"{secret.name}-{group}", doctor.profile.steps["default"].environment
    answer = doctor.get(f"secrets/{name}")
    if answer.status != 200:
        raise Unreadable(f"Secret {name} is not there. Create the access key of the group.")
    named = {
        variable: base64.b64decode(text_at(answer.body, "data", key)).decode()
        for key, variable in secret.keys.items()
    }
    return Session().create_client(
        "s3",
        # Seen from here the store may have another address than seen from a pod.
        endpoint_url=os.environ.get("AWS_ENDPOINT_URL") or environment.get("AWS_ENDPOINT_URL"),
        region_name=environment.get("AWS_DEFAULT_REGION"),
        aws_access_key_id=named.get("AWS_ACCESS_KEY_ID"),
        aws_secret_access_key=named.get("AWS_SECRET_ACCESS_KEY"),
        config=Config(connect_timeout=5, read_timeout=20, retries={"max_attempts": 2}),
    )


def _sample(place: Place, clients: Mapping[str, Any]) -> str | None:
    """An object that is there, if some account lists one.

    For a missing object S3 answers "forbidden" to accounts that may not list.
    """
    inside = f"/{place.folder}/" if place.folder else ""
    for group, client in clients.items():
        if "list" in place.allowed(_rows()[group]):
            found = _ask(client.list_objects_v2, Bucket=place.bucket, Prefix=place.prefix)
            if found is not None:
                names = (item["Key"] for item in found.get("Contents", []))
                return next((name for name in names if inside in name), None)
    return None


def _ask(ask: Callable[..., Any], **what: Any) -> Mapping[str, Any] | None:
    """The answer; empty where what is asked about is not there; None: it is forbidden."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return ask(**what)
    except ClientError as error:
        if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") in (401, 403):
            return None
        code = str(error.response.get("Error", {}).get("Code"))
        if code in ("404", "NoSuchKey", "NoSuchUpload"):
            return {}
        raise Unreadable(
            f"Bucket {what['Bucket']} returned {code}. Check its name, address and permissions."
        ) from error
    except BotoCoreError as error:
        name = type(error).__name__
        raise Unreadable(
            f"the store does not answer from here ({name}); set AWS_ENDPOINT_URL to where it does"
        ) from error


# Google Cloud: grants are in the policy of each bucket.

_OF_ROLE = {
    "roles/storage.objectUser": set(VERBS),
    "roles/storage.objectViewer": {"list", "read"},
    "roles/storage.legacyBucketReader": {"list"},
    "fedembGet": {"read"},
    "fedembList": {"list"},
    "fedembAppend": {"list", "read", "write"},
    "fedembRollbackAnchor": {"list", "read", "write"},
    "fedembWrite": {"read", "write", "delete"},
}
"""Role, or the last part of a custom role's name, as infra/terraform/gcs makes them -> verbs."""
_EVERYBODY = ("allUsers", "allAuthenticatedUsers")
_OF_A_PROJECT = ("projectViewer:", "projectEditor:")


def _everybody_of_a_project(named: Iterable[Place]) -> Iterator[str]:
    """Default grants of a new Google bucket to viewers and editors of its project."""
    closed = dict.fromkeys(
        place.bucket
        for place in named
        if place.address.startswith("gs://") and place.store not in ("public_root", "input")
    )
    for bucket in closed:
        for binding in _bindings(bucket):
            for member in sorted(binding["members"]):
                if member.startswith(_OF_A_PROJECT):
                    yield f"{member} holds {binding['role']} on the bucket {bucket}"


def _held_on_google(doctor: Doctor, there: list[Place]) -> Held:
    accounts = {group: _google_account(doctor, group) for group in _rows()}
    granted = {bucket: _bindings(bucket) for bucket in {place.bucket for place in there}}

    def held(group: str, place: Place, verb: str) -> bool:
        members = {f"serviceAccount:{accounts[group]}", *_EVERYBODY}
        return any(
            verb in _OF_ROLE.get(str(binding["role"]).rpartition("/roles/")[2], set(VERBS))
            for binding in granted[place.bucket]
            if members & set(binding["members"]) and _reaches(binding.get("condition"), place)
        )

    return held


def _reaches(condition: Mapping[str, str] | None, place: Place) -> bool:
    """Whether a binding holds in a place; one whose condition is not ours holds everywhere."""
    said = (condition or {}).get("expression")
    return said not in {condition_of(folder) for folder in _folders() - {place.folder}}


def condition_of(folder: str) -> str:
    """The condition by which infra/terraform/gcs binds a role to one folder of each run."""
    return (
        f'resource.name.extract("/objects/{{run}}/{folder}/") != ""'
        f' || resource.name.endsWith("/{folder}.tree")'
    )


def _google_account(doctor: Doctor, group: str) -> str:
    answer = doctor.get(f"serviceaccounts/fedemb-{group}")
    annotation = "iam.gke.io/gcp-service-account"
    account = text_at(answer.body, "metadata", "annotations", annotation)
    if not account:
        raise Unreadable(
            f"Account fedemb-{group} has no Google service account. Add the annotation of Workload "
            "Identity."
        )
    return account


def _bindings(bucket: str) -> list[Mapping[str, Any]]:
    from google.api_core.exceptions import GoogleAPICallError
    from google.auth.exceptions import GoogleAuthError
    from google.cloud import storage

    try:
        client = storage.Client(project="unused")
        policy = client.bucket(bucket).get_iam_policy(requested_policy_version=3, timeout=20)
    except (GoogleAPICallError, GoogleAuthError, OSError) as error:
        raise Unreadable(
            f"the IAM policy of {bucket} could not be read ({type(error).__name__}); ask who has "
            "storage.buckets.getIamPolicy"
        ) from error
    return list(policy.bindings)


KUBEFLOW_ROOT = "private-artifacts"
"""Folder of a namespace's artifacts in Kubeflow's own store."""
HEALTH = "/api/v1/namespaces/kubeflow/services/ml-pipeline:8888/proxy/apis/v2beta1/healthz"
EDITOR = "default-editor"
"""The account on which Kubeflow runs notebooks, and runs that name none."""


def _excess(doctor: Doctor, account: str, *actions: tuple[str, str, str, str]) -> Iterator[str]:
    """Yields each action (verb, API group, resource, name) that an account may do."""
    for verb, group, resource, name in actions:
        allowed = doctor.api.may(account, doctor.namespace, verb, (group, resource, name))
        if allowed is None:
            raise Unreadable("The rights of accounts may not be read. Ask who may read them.")
        if allowed:
            yield f"{account} may {verb} {resource} {name}".rstrip()


def rights(doctor: Doctor) -> Iterator[str]:
    """No account of a step can help itself to more."""
    for group in _rows():
        yield from _excess(
            doctor,
            f"fedemb-{group}",
            ("create", "", "pods", ""),
            ("list", "", "secrets", ""),
            ("create", "", "pods/exec", ""),
            ("create", "", "serviceaccounts/token", "fedemb-train"),
            ("create", "rbac.authorization.k8s.io", "rolebindings", ""),
            ("patch", "admissionregistration.k8s.io", "validatingadmissionpolicies", ""),
        )


def editors(doctor: Doctor) -> Iterator[str]:
    """No editor of the namespace, such as a contributor of Kubeflow, can act as a step."""
    actions = [
        ("create", "argoproj.io", "workflows", ""),
        ("delete", "networking.k8s.io", "networkpolicies", "fedemb-nothing-else"),
    ]
    if secret := doctor.profile.group_secret:
        actions.insert(0, ("get", "", "secrets", f"{secret.name}-partition"))
    for excess in _excess(doctor, EDITOR, *actions):
        yield f"{excess}: it can be any step"


def admission(doctor: Doctor) -> Iterator[str]:
    """Each policy is there, fails closed and denies."""
    for kind, *names in (
        ("mutating", "step-accounts", "step-pods"),
        ("validating", "step-accounts", "pods", "claims", "train-jobs", "no-entry"),
    ):
        path = f"/apis/admissionregistration.k8s.io/v1/{kind}admissionpolic"
        for name in names:
            policy = doctor.get(f"{path}ies/fedemb-{name}")
            bound = doctor.get(f"{path}ybindings/fedemb-{name}")
            actions = list_at(bound.body, "spec", "validationActions")
            if policy.status != 200 or bound.status != 200:
                yield f"{kind}admissionpolicies/fedemb-{name} is not in force"
            elif value_at(policy.body, "spec", "failurePolicy") != "Fail":
                yield f"fedemb-{name} fails open"
            elif kind == "validating" and "Deny" not in actions:
                yield f"fedemb-{name} warns and does not deny"


def thief(doctor: Doctor) -> Iterator[str]:
    """A pod without a step's label is refused a step's account: a dry run."""
    main: JsonObject = {"name": "main", "image": "none", "securityContext": CLOSED}
    pod: JsonObject = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "thief-"},
        "spec": {
            "serviceAccountName": "fedemb-train",
            "securityContext": AS_NOBODY,
            "containers": [main],
        },
    }
    answer = doctor.api.post(f"/api/v1/namespaces/{doctor.namespace}/pods?dryRun=All", pod)
    if answer.status == 201:
        yield "a pod without a step's label is let in on a step's account"
    elif "ValidatingAdmissionPolicy" not in answer.message:
        raise Unreadable(f"A dry run of a pod gave {answer.status}. Ask who may create pods.")


def pod_security(doctor: Doctor) -> Iterator[str]:
    """The namespace refuses open pods."""
    label = "pod-security.kubernetes.io/enforce"
    body = doctor.get(f"/api/v1/namespaces/{doctor.namespace}").body
    level = text_at(body, "metadata", "labels", label)
    if level != "restricted":
        yield f"the namespace enforces {level or 'nothing'}"


def network(doctor: Doctor) -> Iterator[str]:
    """Nothing comes in or goes out but what a policy opens."""
    place = f"/apis/networking.k8s.io/v1/namespaces/{doctor.namespace}/networkpolicies"
    if doctor.get(f"{place}/fedemb-nothing-else").status != 200:
        yield "the network policy is missing"


def public_root(doctor: Doctor) -> Iterator[str]:
    """Kubeflow's own artifacts go to the public root."""
    root = text_at(doctor.get("configmaps/kfp-launcher").body, "data", "defaultPipelineRoot")
    if root.startswith("minio://") or f"/{KUBEFLOW_ROOT}/{doctor.namespace}/" in f"{root}/":
        yield f"artifacts go to {root}, Kubeflow's own root"
    elif not root.startswith(("gs://", "s3://")) or "PROJECT" in root:
        yield f"artifacts go to {root or 'the default store of Kubeflow'}"


def multi_user(doctor: Doctor) -> Iterator[str]:
    """Kubeflow Pipelines is installed in multi-user mode; an absent field is not a yes."""
    answer = doctor.get(HEALTH)
    if answer.status != 200:
        raise Unreadable("healthz of the Kubeflow API did not answer. Ask who may read it.")
    if answer.body.get("multi_user") is not True:
        yield "Kubeflow Pipelines is installed in single-user mode"


_APPLY = "apply infra/kustomize again"
_RIGHTS = "set the rights of infra/rights.yaml again: `terraform apply`, or infra/s3/*.json"


@dataclass(frozen=True)
class Check:
    """A question to a cluster."""

    name: str
    harms: Callable[[Doctor], Iterator[str]]
    """Yields each harm as a sentence; the first line of its docstring says what is well."""
    remedy: str

    def finding(self, doctor: Doctor) -> Finding:
        """Asks, and returns the first harm; one that is found counts also if an error follows."""
        harms: list[str] = []
        try:
            for harm in self.harms(doctor):
                harms.append(harm)
        except Unreadable as error:
            if not harms:
                return Finding(self.name, "could not tell", str(error))
        if not harms:
            return Finding(self.name, "ok", str(self.harms.__doc__).partition("\n")[0])
        state = "accepted" if self.name in doctor.profile.accepts else "unsafe"
        more = f", and {len(harms) - 1} more of the kind" if harms[1:] else ""
        return Finding(self.name, state, harms[0] + more, self.remedy)


CHECKS = (
    Check("multi-user", multi_user, "install Kubeflow Pipelines in multi-user mode"),
    Check("rights", rights, "take the role binding away that allows it"),
    Check("editors", editors, "have no notebooks and no contributors, then accept it in a profile"),
    Check("admission", admission, _APPLY),
    Check("thief", thief, _APPLY),
    Check("pod-security", pod_security, _APPLY),
    Check("network", network, _APPLY),
    Check("public-root", public_root, "apply launcher.yaml again with --force-conflicts"),
    Check("stores", stores, _RIGHTS),
)


def check_cluster(doctor: Doctor) -> list[Finding]:
    """Returns one finding of each check.

    Raises:
      StorageError: the API server does not answer.
    """
    return [check.finding(doctor) for check in CHECKS]
