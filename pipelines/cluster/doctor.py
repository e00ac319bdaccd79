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
from fedemb.foundation.canonical_json import Json, JsonObject
from fedemb.pipelines.cluster.compile import Profile
from fedemb.pipelines.cluster.kubernetes import Answer, KubernetesApi
from fedemb.pipelines.cluster.rules import list_at, text_at, value_at
from fedemb.pipelines.steps import rights_of_groups
from fedemb.runtime.step import Rights

State = Literal["ok", "unsafe", "could not tell"]


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    check: str
    """Its name; a profile accepts an unsafe one by it."""
    state: State
    what: str
    """Observed state."""
    remedy: str = ""
    """Remedy; empty if ok."""


def judged(check: str, safe: bool | None, what: str, remedy: str) -> Finding:
    """Something that was read: ok, or unsafe with its remedy; None: it could not be read."""
    if safe is None:
        return Finding(check, "could not tell", what, "ask who may read it")
    return Finding(check, "ok" if safe else "unsafe", what, "" if safe else remedy)


def table(findings: Sequence[Finding], accepted: Sequence[str] = ()) -> str:
    """One line for each finding, the unsafe ones first."""
    order = {"unsafe": 0, "could not tell": 1, "ok": 2}
    lines = []
    for finding in sorted(findings, key=lambda finding: order[finding.state]):
        state = "accepted" if _is_accepted(finding, accepted) else finding.state
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        lines.append(f"{state:<15} {finding.check:<14} {finding.what}{remedy}")
    return "\n".join(lines)


def require_safe(findings: Sequence[Finding], accepted: Sequence[str] = ()) -> None:
    """Raises unless every unsafe finding is named by the profile.

    Raises:
      Refused: one is not.
    """
    open_ones = [
        finding
        for finding in findings
        if finding.state == "unsafe" and not _is_accepted(finding, accepted)
    ]
    if open_ones:
        first = open_ones[0]
        raise Refused(
            f"{len(open_ones)} finding(s) on this cluster are unsafe, first {first.check}: "
            f"{first.what}; {first.remedy}, or name it in the profile's `accepts`"
        )


def _is_accepted(finding: Finding, accepted: Sequence[str]) -> bool:
    return finding.state == "unsafe" and finding.check in accepted


@dataclass(frozen=True)
class Doctor:
    """APIs that a check of a cluster reads, and the expected state."""

    api: KubernetesApi
    namespace: str
    """Namespace of the runs."""
    profile: Profile
    configs: Sequence[RunConfig] = ()
    """Configurations of the runs, which name the stores."""

    def mine(self, path: str) -> str:
        """Path of something of the namespace."""
        group, _, rest = path.rpartition("|")
        root = f"/apis/{group}" if group else "/api/v1"
        return f"{root}/namespaces/{self.namespace}/{rest}"

    def get(self, path: str) -> Answer:
        """Reads something of the namespace."""
        return self.api.get(self.mine(path))


Check = Callable[[Doctor], Iterator[Finding]]

VERBS = ("list", "read", "write", "delete")
_FOLDER = {
    "none": set[str](),
    "read": {"read"},
    "write": {"read", "write"},
}
_BUCKET = {
    "none": set[str](),
    "read": {"list", "read"},
    "append": {"list", "read", "write"},
    "create": {"list", "read", "write"},
}
_INPUT = {"private": {"list", "read"}, "names": {"list"}}
PARALLEL = 8
"""Questions asked at a time."""
REMEDY = "set the rights of infra/rights.yaml again: `terraform apply`, or infra/s3/*.json"


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
        name = {"input": "the private images"}.get(self.store, f"storage.{self.store}")
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
                return {"list", "read", "write"}
            case "private_root":
                names = {"list"} if rights.private else set[str]()
                return names | _FOLDER[rights.private.get(self.folder, "none")]
            case "input":
                return set[str]().union(*(_INPUT.get(kind, set()) for kind in rights.input))
            case store:
                return _BUCKET[getattr(rights, store)]


Held = Callable[[str, Place, str], bool]
"""Whether the account of a group may do something in a place."""


def places(configs: Iterable[RunConfig]) -> list[Place]:
    """Every place that configurations of runs name, keys left out."""
    found: list[Place] = []
    folders = sorted({folder for row in rights_of_groups().values() for folder in row.private})
    for config in configs:
        storage, uri = config.storage, config.data.source.uri
        if storage.private_root:
            root = storage.private_root
            found += [Place("private_root", root, folder) for folder in folders]
        if uri != "builtin":
            found.append(Place("input", uri.rpartition("/")[0] if urlsplit(uri).path else uri))
        for name in ("public_root", "ledger", "releases", "rollback_anchor"):
            if address := getattr(storage, name):
                found.append(Place(name, address))
    return list(dict.fromkeys(found))


def stores(doctor: Doctor) -> Iterator[Finding]:
    """Each account may do in each store what the table says, and no more."""
    named = places(doctor.configs)
    local = [place for place in named if urlsplit(place.address).scheme not in ("gs", "s3")]
    if not named:
        remedy = "name the run's configuration by --config"
        yield Finding("stores", "could not tell", "no configuration names a store", remedy)
    if local:
        remedy = "use gs:// or s3:// stores on a cluster (docs/cluster/quickstart.md, step 3)"
        yield Finding("stores", "could not tell", f"{local[0]} is a folder", remedy)
    for scheme, open_held in (("gs", _held_on_google), ("s3", _held_on_s3)):
        there = [place for place in named if place.address.startswith(f"{scheme}://")]
        if there:
            yield from _compared(there, open_held, doctor)


def _rows() -> dict[str, Rights]:
    """Group -> its row of the table; that of `run`, which drives runs, grants nothing."""
    return {"run": Rights(), **rights_of_groups()}


def _compared(
    there: list[Place], open_held: Callable[[Doctor, list[Place]], Held], doctor: Doctor
) -> Iterator[Finding]:
    rows = _rows()
    questions = [(group, place, verb) for group in rows for place in there for verb in place.verbs]
    try:
        held = open_held(doctor, there)
        with ThreadPoolExecutor(PARALLEL) as pool:
            answers = list(pool.map(lambda question: held(*question), questions))
        strangers = _everybody_of_a_project(there)
    except StorageError as error:
        yield Finding("stores", "could not tell", str(error), REMEDY)
        return
    excess, lacking = [], []
    for (group, place, verb), allowed in zip(questions, answers, strict=True):
        wanted = verb in place.allowed(rows[group])
        if allowed and not wanted:
            excess.append(f"fedemb-{group} may {verb} {place}")
        if wanted and not allowed:
            lacking.append(f"fedemb-{group} may not {verb} {place}")
    for wrong in filter(None, (excess, lacking, strangers)):
        more = f", and {len(wrong) - 1} more of the kind" if wrong[1:] else ""
        yield Finding("stores", "unsafe", wrong[0] + more, REMEDY)
    if not excess and not lacking and not strangers:
        what = f"{len(questions)} questions in {len(there)} places: each account as the table says"
        yield Finding("stores", "ok", what)


# S3: each account is asked for by its own key.


def _held_on_s3(doctor: Doctor, there: list[Place]) -> Held:
    secret = doctor.profile.group_secret
    if secret is None:
        raise StorageError("The profile has no access keys of the groups. Set `group_secret`.")
    default = next(iter(doctor.profile.steps.values())).environment
    clients = {group: _client(doctor, group, default) for group in _rows()}
    samples = {place: _sample(place, clients) for place in there}

    def held(group: str, place: Place, verb: str) -> bool:
        asked = clients[group]
        folder = f"doctor/{place.folder}/" if place.folder else ""
        made_up = f"{place.prefix}{folder}doctor-{secrets.token_hex(8)}"
        match verb:
            case "list":
                ask, more = asked.list_objects_v2, {"Prefix": made_up, "MaxKeys": 1}
            case "read":
                ask, more = asked.head_object, {"Key": samples[place] or made_up}
            case "write":
                upload = {"UploadId": secrets.token_hex(16), "PartNumber": 1, "Body": b""}
                ask, more = asked.upload_part, {"Key": made_up, **upload}
            case _:
                ask, more = asked.delete_object, {"Key": made_up}
        return _ask(ask, Bucket=place.bucket, **more) is not None

    return held


def _client(doctor: Doctor, group: str, environment: Mapping[str, str]) -> Any:
    from botocore.config import Config
    from botocore.session import Session

    secret = doctor.profile.group_secret
    assert secret is not None
    name = f"{secret.name}-{group}"
    answer = doctor.get(f"secrets/{name}")
    if answer.status != 200:
        raise StorageError(
            f"Secret {name} is not readable (HTTP {answer.status}). Grant the doctor read access."
        )
    named = {
        variable: base64.b64decode(text_at(answer.body, "data", key)).decode()
        for key, variable in secret.keys.items()
    }
    # Seen from here the store may have another address than seen from a pod.
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or environment.get("AWS_ENDPOINT_URL")
    config = Config(connect_timeout=5, read_timeout=20, retries={"max_attempts": 2})
    return Session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name=environment.get("AWS_DEFAULT_REGION"),
        aws_access_key_id=named.get("AWS_ACCESS_KEY_ID"),
        aws_secret_access_key=named.get("AWS_SECRET_ACCESS_KEY"),
        config=config,
    )


def _sample(place: Place, clients: Mapping[str, Any]) -> str | None:
    """An object that is there, if some account lists one.

    For a missing object S3 answers "forbidden" to accounts that may not list.
    """
    rows = _rows()
    for group, client in clients.items():
        if "list" in place.allowed(rows[group]):
            found = _ask(client.list_objects_v2, Bucket=place.bucket, Prefix=place.prefix)
            names = (item["Key"] for item in (found or {}).get("Contents", []))
            inside = f"/{place.folder}/" if place.folder else ""
            if found is not None:
                return next((name for name in names if inside in name), None)
    return None


def _ask(ask: Callable[..., Any], **what: Any) -> Mapping[str, Any] | None:
    """The answer; empty where what is asked about is not there; None: it is forbidden."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return ask(**what)
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = str(error.response.get("Error", {}).get("Code"))
        if code == "NoSuchBucket":
            raise StorageError(
                f"Bucket {what['Bucket']} does not exist. Create the bucket, or correct its name."
            ) from error
        if status in (401, 403):
            return None
        if code in ("404", "NoSuchKey", "NoSuchUpload"):
            return {}
        raise StorageError(
            f"Bucket {what['Bucket']} returned {code}. Check its address and permissions."
        ) from error
    except BotoCoreError as error:
        name = type(error).__name__
        raise StorageError(
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


def _everybody_of_a_project(there: list[Place]) -> list[str]:
    """Default grants of a new Google bucket to viewers and editors of its project."""
    closed = {
        place.bucket: place
        for place in there
        if place.address.startswith("gs://") and place.store not in ("public_root", "input")
    }
    return [
        f"{member} holds {binding['role']} on the bucket {bucket}"
        for bucket in closed
        for binding in _bindings(bucket)
        for member in sorted(binding["members"])
        if member.startswith(_OF_A_PROJECT)
    ]


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
    if not condition:
        return True
    for folder in {folder for row in rights_of_groups().values() for folder in row.private}:
        if condition.get("expression") == condition_of(folder):
            return folder == place.folder
    return True


def condition_of(folder: str) -> str:
    """The condition by which infra/terraform/gcs binds a role to one folder of each run."""
    return (
        f'resource.name.extract("/objects/{{run}}/{folder}/") != ""'
        f' || resource.name.endsWith("/{folder}.tree")'
    )


def _google_account(doctor: Doctor, group: str) -> str:
    name = f"fedemb-{group}"
    answer = doctor.get(f"serviceaccounts/{name}")
    annotation = "iam.gke.io/gcp-service-account"
    account = text_at(answer.body, "metadata", "annotations", annotation)
    if answer.status != 200 or not account:
        raise StorageError(
            f"Account {name} has no Google service account (HTTP {answer.status}). Add the "
            "annotation of Workload Identity."
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
        raise StorageError(
            f"the IAM policy of {bucket} could not be read ({type(error).__name__}); ask who has "
            "storage.buckets.getIamPolicy"
        ) from error
    return list(policy.bindings)


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
