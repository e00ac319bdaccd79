"""The stores of the overlay s3: MinIO, set up by infra/s3/create_stores.sh."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from conftest import INFRA, page_block
from typer.testing import CliRunner

from tests.conftest import REPOSITORY
from tests.kit.pipeline_runs.partition_run import make_config

PORT = 9123
URL = f"http://127.0.0.1:{PORT}"
OWNER = "owner-of-the-stores"


class Stores:
    """A MinIO server and its client `mc`, whose alias `store` is the reference's."""

    def __init__(self, binaries: Path, folder: Path, kubeconfig: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "HOME": str(folder),
            "KUBECONFIG": str(kubeconfig),
            "MC_HOST_store": f"http://{OWNER}:{OWNER}@127.0.0.1:{PORT}",
            "MINIO_ROOT_USER": OWNER,
            "MINIO_ROOT_PASSWORD": OWNER,
            "MINIO_BROWSER": "off",
        }
        log = (folder / "log").open("wb")
        command = [str(binaries / "minio"), "server", "--address", f"127.0.0.1:{PORT}", "data"]
        self.process = subprocess.Popen(
            command, cwd=folder, env=self.environment, stdout=log, stderr=log
        )
        until = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", PORT)) != 0:
            assert self.process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.2)

    def sh(self, lines: str) -> str:
        """Runs lines of a shell in the repository, as an administrator of stores and cluster."""
        ended = subprocess.run(
            ["bash", "-euc", lines],
            cwd=REPOSITORY,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ended.returncode == 0, f"{lines}\n{ended.stdout}{ended.stderr}"
        return ended.stdout

    def grant(self, group: str, name: str, actions: dict[str, str]) -> None:
        """Gives the user of a group a further policy: action -> bucket or what is in it."""
        allow = [
            {"Effect": "Allow", "Action": [action], "Resource": [f"arn:aws:s3:::{resource}"]}
            for action, resource in actions.items()
        ]
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps({"Version": "2012-10-17", "Statement": allow}))
        self.sh(f"mc admin policy create store {name} {file}")
        self.sh(f"mc admin policy attach store {name} --user {self.user(group)}")

    def take_back(self, group: str, name: str) -> None:
        """Takes a policy from the user of a group."""
        self.sh(f"mc admin policy detach store {name} --user {self.user(group)}")

    def user(self, group: str) -> str:
        """The access key that the reference's lines made."""
        found = "kubectl -n fedemb get secret fedemb-s3-{} -o jsonpath='{{.data.access_key}}'"
        return self.sh(f"{found.format(group)} | base64 -d").strip()


@pytest.fixture(scope="module")
def stores(plane, applied, tmp_path_factory):
    """The stores, accounts and secrets of the cluster reference, and a bucket of images."""
    from fedemb.pipelines.steps import rights_of_groups

    folder = tmp_path_factory.mktemp("stores")
    binaries = Path(os.environ["FEDEMB_CONTROL_PLANE"])
    with applied("s3"):
        made = Stores(binaries, folder, plane.kubeconfig)
        try:
            made.sh("infra/s3/create_stores.sh mc store")
            made.sh(page_block("mc mb --with-lock store/fedemb-rollback-anchor"))
            made.sh("mc mb store/photos")
            for group, row in rights_of_groups().items():
                names = {"s3:ListBucket": "photos"} if {"private", "names"} & {*row.input} else {}
                read = {"s3:GetObject": "photos/*"} if "private" in row.input else {}
                if names:
                    made.grant(group, f"photos-{group}", {**names, **read})
            yield made
        finally:
            made.process.terminate()
            made.process.wait(30)
            shutil.rmtree(folder / "data")
            plane.kubectl("delete", "secret", "--all", "-n", "fedemb")


@pytest.fixture
def check(plane, stores, monkeypatch, tmp_path):
    """What `fedemb doctor --config` says of the stores: state and sentence."""
    from fedemb.pipelines.cli.main import app

    config = make_config(
        "s3://photos/2026/*.parquet",
        storage__public_root="s3://fedemb-public/runs",
        storage__private_root="s3://fedemb-private",
        storage__ledger="s3://fedemb-ledger",
        storage__releases="s3://fedemb-releases",
        storage__rollback_anchor="s3://fedemb-rollback-anchor",
    )
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig))
    monkeypatch.setenv("AWS_ENDPOINT_URL", URL)
    arguments = ["doctor", "--profile", "cpu"]
    arguments += ["--profile", str(INFRA / "profiles" / "s3.yaml"), "--config", str(file)]

    def run() -> tuple[str, str]:
        result = CliRunner().invoke(app, arguments)
        (line,) = [line for line in result.output.splitlines() if line[16:30].strip() == "stores"]
        return line[:15].strip(), line[31:]

    return run


def test_stores_as_the_reference_makes_them_are_safe(check):
    state, what = check()
    assert state == "ok", what


HARMS = {
    "names": (
        "gate",
        "may list audit in storage.private_root",
        {"s3:ListBucket": "fedemb-private"},
    ),
    "forges": (
        "audit",
        "may write diagnostics in storage.private_root",
        {"s3:PutObject": "fedemb-private/*"},
    ),
    "deletes": ("account", "may delete storage.ledger", {"s3:DeleteObject": "fedemb-ledger/*"}),
    "looks": (
        "train",
        "may list the private images",
        {"s3:ListBucket": "photos", "s3:GetObject": "photos/*"},
    ),
}


@pytest.mark.parametrize("harm", HARMS)
def test_each_excess_permission_is_found(check, stores, harm):
    group, found, actions = HARMS[harm]
    stores.grant(group, harm, actions)
    try:
        state, what = check()
        assert state == "unsafe"
        assert what.startswith(f"fedemb-{group} {found}")
    finally:
        stores.take_back(group, harm)


def test_missing_permission_is_found(check, stores):
    stores.take_back("release", "fedemb-release")
    try:
        state, what = check()
        assert state == "unsafe"
        assert what.startswith("fedemb-release may not list storage.public_root")
    finally:
        stores.sh(f"mc admin policy attach store fedemb-release --user {stores.user('release')}")


def test_read_permission_without_list_is_found(check, stores):
    """Also by an object that is there: of a made-up name AWS says to them that it is forbidden."""
    stores.grant("gate", "reads", {"s3:GetObject": "fedemb-private/*/users/*"})
    photo = "store/fedemb-private/monday/users/1.arrayrecord"
    try:
        before = check()
        stores.sh(f"echo photo | mc pipe {photo}")
        for state, what in (before, check()):
            assert state == "unsafe"
            assert what.startswith("fedemb-gate may read users in storage.private_root")
    finally:
        stores.sh(f"mc rm {photo}")
        stores.take_back("gate", "reads")


def test_doctor_writes_nothing_to_the_stores(check, stores):
    check()
    for name in ("public", "private", "ledger", "releases", "rollback-anchor"):
        assert not stores.sh(f"mc ls --recursive --versions store/fedemb-{name}").strip()
        assert not stores.sh(f"mc ls --recursive --incomplete store/fedemb-{name}").strip()
