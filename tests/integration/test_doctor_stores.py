"""What the doctor learns of the stores: S3 (moto, which enforces policies) and Google Cloud.

`tests/cluster/test_stores.py` asks MinIO the same, set up by the lines of the cluster reference.
"""

import base64
import json
import sys
import urllib.request
from pathlib import Path

import botocore.session
import pytest

from fedemb.pipelines.cluster.compile import load_profile
from fedemb.pipelines.cluster.doctor import CHECKS, Doctor, condition_of
from fedemb.pipelines.cluster.kubernetes import Answer
from fedemb.pipelines.steps import rights_of_groups
from tests.integration.conftest import serving
from tests.kit.pipeline_runs.partition_run import make_config
from tests.kit.servers.free_port import free_port

INFRA = Path(__file__).parents[2] / "infra"
GROUPS = ("run", *rights_of_groups())
BUCKETS = ("public", "private", "ledger", "releases", "rollback-anchor", "photos")


class Namespace:
    """The two kinds of objects that are asked of a cluster."""

    def __init__(self, secrets: dict[str, tuple[str, str]]) -> None:
        self.secrets = secrets

    def get(self, path: str) -> Answer:
        """A secret's access key, or the Google account of a service account."""
        kind, name = path.split("/")[-2:]
        if kind == "serviceaccounts":
            account = {"iam.gke.io/gcp-service-account": _email(name.removeprefix("fedemb-"))}
            return Answer(200, {"metadata": {"annotations": account}})
        if name not in self.secrets:
            return Answer(404, {})
        pair = dict(zip(("access_key", "secret_key"), self.secrets[name], strict=True))
        data = {key: base64.b64encode(text.encode()).decode() for key, text in pair.items()}
        return Answer(200, {"data": data})


def _email(group: str) -> str:
    return f"fedemb-{group}@runs.iam.gserviceaccount.com"


def _look(scheme: str, secrets: dict[str, tuple[str, str]] | None = None) -> list[tuple[str, str]]:
    named = {
        name: f"{scheme}://fedemb-{name.replace('_', '-')}"
        for name in ("ledger", "releases", "rollback_anchor")
    }
    config = make_config(
        f"{scheme}://fedemb-photos/2026/*.parquet",
        storage__public_root=f"{scheme}://fedemb-public/runs",
        storage__private_root=f"{scheme}://fedemb-private",
        **{f"storage__{name}": address for name, address in named.items()},
    )
    profile = load_profile("cpu", INFRA / "profiles" / "s3.yaml")
    doctor = Doctor(Namespace(secrets or {}), "fedemb", profile, [config])
    found = [check.finding(doctor) for check in CHECKS if check.name == "stores"]
    return [(item.state, item.what) for item in found]


class Moto:
    """An S3 server whose users have the policies of infra/s3."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        session = botocore.session.get_session()
        owner = {"aws_access_key_id": "owner", "aws_secret_access_key": "owner"}
        self.s3, self.iam = (
            session.create_client(name, "us-east-1", endpoint_url=self.url, **owner)
            for name in ("s3", "iam")
        )

    def set_up(self) -> dict[str, tuple[str, str]]:
        """Buckets, users, policies: as in the cluster reference. Returns the secrets."""
        self.open()
        for name in BUCKETS:
            self.s3.create_bucket(Bucket=f"fedemb-{name}")
        secrets = {}
        for group in GROUPS:
            self.iam.create_user(UserName=group)
            self.grant(group, json.loads((INFRA / "s3" / f"{group}.json").read_text()))
            key = self.iam.create_access_key(UserName=group)["AccessKey"]
            secrets[f"fedemb-s3-{group}"] = (key["AccessKeyId"], key["SecretAccessKey"])
        return secrets

    def grant(self, group: str, policy: dict, name: str = "step") -> None:
        """Gives a user a policy, as the owner."""
        self.iam.put_user_policy(UserName=group, PolicyName=name, PolicyDocument=json.dumps(policy))

    def open(self) -> None:
        """Everybody may do everything: the owner sets up."""
        self._count(1_000_000)

    def close(self) -> None:
        """From now on policies are asked."""
        self._count(0)

    def _count(self, actions: int) -> None:
        address, plain = f"{self.url}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        request = urllib.request.Request(address, str(actions).encode(), plain)
        urllib.request.urlopen(request).close()


@pytest.fixture
def moto(tmp_path, monkeypatch):
    """A server of its own: enforcement is one switch for all."""
    port = free_port()
    program = Path(__file__).parents[1] / "kit" / "servers" / "s3_stand_in.py"
    command = [sys.executable, str(program), "-H", "127.0.0.1", "-p", str(port)]
    with serving(command, port, tmp_path / "log", INITIAL_NO_AUTH_ACTION_COUNT="1000000"):
        made = Moto(port)
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
        yield made


def _inputs(moto: Moto) -> None:
    """The rights on the private images: the bucket is the data owner's, and so are they."""
    for group, row in rights_of_groups().items():
        if {"private", "names"} & set(row.input):
            reading = {"GetObject": "fedemb-photos/*"} if "private" in row.input else {}
            moto.grant(group, _allow(ListBucket="fedemb-photos", **reading), "photos")


@pytest.mark.long
def test_rights_on_s3_are_read_from_the_store_and_nothing_is_written_to_it(moto):
    secrets = moto.set_up()
    _inputs(moto)
    moto.close()
    ((state, what),) = _look("s3", secrets)
    assert state == "ok", what
    moto.open()
    for name in BUCKETS:
        found = moto.s3.list_object_versions(Bucket=f"fedemb-{name}")
        assert not {"Versions", "DeleteMarkers"} & set(found)
        assert not moto.s3.list_multipart_uploads(Bucket=f"fedemb-{name}").get("Uploads")


def _allow(**resources: str) -> dict:
    """A policy: what may be done, and with what."""
    allow = [
        {"Effect": "Allow", "Action": f"s3:{action}", "Resource": f"arn:aws:s3:::{resource}"}
        for action, resource in resources.items()
    ]
    return {"Version": "2012-10-17", "Statement": allow}


TERRAFORM = {
    "append": "projects/runs/roles/fedembAppend",
    "create": "projects/runs/roles/fedembAppend",
    "read": "roles/storage.objectViewer",
}
"""Word of the table -> role on a bucket, as infra/terraform/gcs says."""
FOLDERS = {"read": "fedembGet", "write": "fedembWrite"}


def _google_policies() -> dict[str, list[dict]]:
    """Bucket -> bindings, as infra/terraform/gcs makes them of the table."""
    made: dict[str, list[dict]] = {name: [] for name in BUCKETS}

    def bind(bucket: str, group: str, role: str, folder: str = "") -> None:
        title = {"condition": {"title": folder, "expression": condition_of(folder)}}
        members = [f"serviceAccount:{_email(group)}"]
        made[bucket].append({"role": role, "members": members, **(title if folder else {})})

    bind("public", "run", "roles/storage.objectUser")
    for group, row in rights_of_groups().items():
        bind("public", group, "roles/storage.objectUser")
        for folder, right in row.private.items():
            bind("private", group, f"projects/runs/roles/{FOLDERS[right]}", folder)
        if row.private:
            bind("private", group, "projects/runs/roles/fedembList")
        for name in ("ledger", "releases"):
            if getattr(row, name) != "none":
                bind(name, group, TERRAFORM[getattr(row, name)])
        if row.rollback_anchor != "none":
            bind("rollback-anchor", group, "projects/other/roles/fedembRollbackAnchor")
        if "private" in row.input:
            bind("photos", group, "roles/storage.objectViewer")
        if "names" in row.input:
            bind("photos", group, "roles/storage.legacyBucketReader")
    return made


@pytest.fixture
def google(gcs_environment):
    """Sets the buckets' policies; the buckets are there."""
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    client = storage.Client(credentials=AnonymousCredentials(), project="stand-in")
    for name in BUCKETS:
        client.create_bucket(f"fedemb-{name}")

    def apply(policies: dict[str, list[dict]]) -> None:
        for name, bindings in policies.items():
            policy = client.bucket(f"fedemb-{name}").get_iam_policy(requested_policy_version=3)
            policy.version = 3
            policy.bindings = [{**item, "members": set(item["members"])} for item in bindings]
            client.bucket(f"fedemb-{name}").set_iam_policy(policy)

    yield apply
    for name in BUCKETS:
        client.bucket(f"fedemb-{name}").delete()


def test_rights_on_google_cloud_are_read_from_the_buckets_policies(google):
    google(_google_policies())
    ((state, what),) = _look("gs")
    assert state == "ok", what


EVIL = f"serviceAccount:{_email('gate')}"
GOOGLE_HARMS = {
    "may read users in storage.private_root": (
        "private",
        {
            "role": "projects/runs/roles/fedembGet",
            "members": [EVIL],
            "condition": {"title": "users", "expression": condition_of("users")},
        },
    ),
    "may list": ("private", {"role": "roles/storage.objectViewer", "members": ["allUsers"]}),
    "may write storage.ledger": ("ledger", {"role": "roles/storage.admin", "members": [EVIL]}),
    "may delete storage.rollback_anchor": (
        "rollback-anchor",
        {
            "role": "roles/storage.objectUser",
            "members": [EVIL],
            "condition": {"title": "any", "expression": "request.time < timestamp('2030-01-01')"},
        },
    ),
}


@pytest.mark.parametrize("found", GOOGLE_HARMS)
def test_each_wrong_right_on_google_cloud_is_found(google, found):
    bucket, binding = GOOGLE_HARMS[found]
    policies = _google_policies()
    policies[bucket].append(binding)
    google(policies)
    findings = _look("gs")
    assert [state for state, _ in findings] == ["unsafe"]
    assert found.partition(" ")[0] in findings[0][1]
    assert bucket.replace("-", "_") in findings[0][1]


@pytest.mark.parametrize("everybody", ["projectViewer:runs", "projectEditor:runs"])
@pytest.mark.parametrize("bucket", ["private", "ledger", "rollback-anchor", "releases"])
def test_project_wide_google_grants_are_found(google, everybody, bucket):
    """A new bucket is readable to anyone who views its project, until Terraform closes it."""
    policies = _google_policies()
    role = "roles/storage.legacyObjectReader"
    policies["public"].append({"role": role, "members": [everybody]})
    google(policies)
    assert [state for state, _ in _look("gs")] == ["ok"]
    policies[bucket].append({"role": role, "members": [everybody]})
    google(policies)
    ((state, what),) = _look("gs")
    assert state == "unsafe"
    assert f"{everybody} holds {role}" in what
    assert bucket in what


def test_missing_google_cloud_permission_is_found(google):
    policies = _google_policies()
    policies["releases"] = []
    google(policies)
    ((state, what),) = _look("gs")
    assert state == "unsafe"
    assert "may not list storage.releases" in what
