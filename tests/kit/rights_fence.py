"""A cloud in memory and on disk that refuses what infra/rights.yaml does not grant, as Google does.

`gs://` and `gsm://` lead to stand-ins that ask the table before every request, in the name of the
group that acts. Who may not read an object or key is not told whether it is there: that too is
forbidden. `Fence.used` keeps what was asked and granted, so that a right no one needs shows.

    gs://private/<run>/<folder>/   gs://ledger/  gs://releases/   the private root, ledger, releases
    gs://rollback_anchor/                                                  marks of the ledger
    gs://private-input/  gs://public-input/                        images
    gsm://keys/fedemb                                              keys
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from google.api_core import exceptions
from typing_extensions import override

from fedemb.errors import StorageError
from fedemb.keys.trust import ROLES
from fedemb.storage import Entry, Store
from fedemb.storage.local import LocalStore
from tests.kit.servers.fake_secret_manager import FakeSecretManager

TABLE = Path(__file__).parents[2] / "infra" / "rights.yaml"
GROUPS: dict[str, dict[str, Any]] = yaml.safe_load(TABLE.read_text())["groups"]

# What each word of the table lets ask for; the custom roles of terraform/gcs.
FOLDER = {"none": set(), "read": {"get"}, "write": {"get", "create", "delete"}}
BUCKET = {
    "none": set(),
    "read": {"get", "list"},
    "append": {"get", "list", "create"},
    "create": {"get", "list", "create"},
}
SECRETS = {
    "none": set(),
    "read": {"get"},
    "create": {"get", "create"},
    "destroy": {"get", "destroy"},
}
SIGNING = {
    f"fedemb-signing-{hashlib.sha256(f'signing/{role}'.encode()).hexdigest()}": role
    for role in ROLES
}
"""Names of secrets as `SecretManagerKeyStore` makes them."""


class Forbidden(StorageError):
    """A request without the right to it."""


class Fence:
    """Whose turn it is, and what was asked for."""

    def __init__(self, root: Path):
        self.root = root
        self.group: str | None = None
        """Who acts; None: the data owner, who may do everything."""
        self.used: dict[str, set[tuple[str, str, str]]] = {group: set() for group in GROUPS}
        """Group -> kind, thing and verb of each request that passed."""
        self.refused: list[str] = []
        """Those that did not, whatever the step made of it."""

    @contextmanager
    def acting(self, step: str) -> Iterator[None]:
        """A step, in the name of its group."""
        (self.group,) = [name for name, rights in GROUPS.items() if step == rights["step"]]
        try:
            yield
        finally:
            self.group = None

    def ask(self, kind: str, thing: str, verb: str, granted: bool) -> None:
        """Lets a request pass, or refuses it."""
        if self.group is None:
            return
        if not granted:
            self.refused.append(f"{self.group} may not {verb} {kind} {thing}")
            raise Forbidden(self.refused[-1])
        self.used[self.group].add((kind, thing, verb))

    def granted(self, bucket: str, verb: str, folder: str) -> bool:
        """Whether the table lets the acting group do this in a bucket."""
        rights = GROUPS.get(self.group or "", {})
        match bucket:
            case "private" if verb == "list":  # names of a whole bucket: it cannot be distinguished
                return bool(rights["private"])
            case "private":
                return verb in FOLDER[rights["private"].get(folder, "none")]
            case "ledger" | "releases" | "rollback_anchor":
                return verb in BUCKET[rights[bucket]]
            case "private-input" if verb == "list":
                return bool({"names", "private"} & set(rights["input"]))
            case _:
                return verb in {"get", "list"} and bucket.removesuffix("-input") in rights["input"]


class FencedBucket(Store):
    """Takes the place of GcsStore."""

    fence: Fence

    def __init__(self, bucket: str, prefix: str) -> None:
        self.uri = f"gs://{bucket}/{prefix}".rstrip("/")
        self._bucket, self._prefix = bucket, prefix
        self._inner = LocalStore(self.fence.root / bucket / prefix)

    def _ask(self, verb: str, name: str = "") -> None:
        parts = f"{self._prefix}/{name}".strip("/").split("/")
        folder = parts[1].removesuffix(".tree") if len(parts) > 1 else ""
        folder = folder if self._bucket == "private" and verb != "list" else ""
        granted = self.fence.group is None or self.fence.granted(self._bucket, verb, folder)
        self.fence.ask(self._bucket, folder, verb, granted)

    def _ask_put(self, name: str) -> None:
        self._ask("create", name)
        # To replace is to delete. On S3 a write to these does not pass where nothing is there, too:
        # infra/s3/buckets demands a write that creates.
        if self._bucket in ("ledger", "rollback_anchor") or self._inner.exists(name):
            self._ask("delete", name)

    @override
    def read_up_to(self, name: str, limit: int) -> bytes | None:
        self._ask("get", name)
        return self._inner.read_up_to(name, limit)

    @override
    def write(self, name: str, data: bytes) -> None:
        self._ask_put(name)
        self._inner.write(name, data)

    @override
    def create(self, name: str, data: bytes) -> None:
        self._ask("create", name)
        self._inner.create(name, data)

    @override
    def exists(self, name: str) -> bool:
        self._ask("get", name)
        return self._inner.exists(name)

    @override
    def list(self, prefix: str = "") -> list[str]:
        self._ask("list")
        return self._inner.list(prefix)

    @override
    def entries(self, prefix: str = "") -> Iterator[Entry]:
        self._ask("list")
        return self._inner.entries(prefix)

    @override
    def delete(self, name: str) -> None:
        self._ask("delete", name)
        self._inner.delete(name)

    @override
    def digest(self, name: str) -> str | None:
        self._ask("get", name)
        return self._inner.digest(name)

    @override
    def _upload(self, local: Path, name: str, digest: str) -> None:
        self._ask_put(name)
        self._inner._upload(local, name, digest)

    @override
    def _download(self, name: str, local: Path) -> None:
        self._ask("get", name)
        self._inner._download(name, local)


class FencedKeys(FakeSecretManager):
    """Takes the place of Secret Manager's client; the custom roles of terraform/gcs/keys.tf."""

    def __init__(self, fence: Fence) -> None:
        super().__init__()
        self.fence = fence

    def _ask(self, verb: str, secret_id: str) -> None:
        rights = GROUPS.get(self.fence.group or "")
        if rights is None:
            return
        role, kind = SIGNING.get(secret_id), secret_id.split("-")[1]
        granted = verb in SECRETS[rights["keys"].get(kind, "none")]
        if role is not None:
            granted = verb == "get" and role in rights["signing"]
        try:
            self.fence.ask("signing" if role else "keys", role or kind, verb, granted)
        except Forbidden as error:
            raise exceptions.PermissionDenied(str(error)) from error

    @override
    def create_secret(self, parent, secret_id, secret):
        self._ask("create", secret_id)
        super().create_secret(parent, secret_id, secret)

    @override
    def add_secret_version(self, parent, payload):
        self._ask("create", parent.rsplit("/", 1)[1])
        return super().add_secret_version(parent, payload)

    @override
    def access_secret_version(self, name):
        self._ask("get", name.rsplit("/", 3)[1])
        return super().access_secret_version(name)

    @override
    def destroy_secret_version(self, name):
        self._ask("destroy", name.rsplit("/", 3)[1])
        super().destroy_secret_version(name)

    @override
    def list_secret_versions(self, parent):
        self._ask("list", parent.rsplit("/", 1)[1])
        return super().list_secret_versions(parent)
