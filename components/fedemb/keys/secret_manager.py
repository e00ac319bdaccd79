"""Key store over Google Secret Manager."""

# The client of Secret Manager has partial types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from typing_extensions import override

from fedemb.errors import LedgerError, StorageError
from fedemb.foundation.environment import missing_extra
from fedemb.keys.stores import KEY_BYTES, KeyStore, checked_name

if TYPE_CHECKING:
    from google.cloud.secretmanager import SecretManagerServiceClient


class SecretManagerKeyStore(KeyStore):
    """Key store in Google Secret Manager, `gsm://project[/prefix]`; no key is written to a disk.

    A key is version 1 of its secret. The next generation of a signing key is the next version, so
    that an account that may read the key may also read its successor. The name of a destroyed
    version stays taken.
    """

    def __init__(
        self, project: str, prefix: str = "fedemb", client: SecretManagerServiceClient | None = None
    ):
        self.uri = f"gsm://{project}/{prefix}"
        self._parent = f"projects/{project}"
        self._prefix = prefix
        self._client = client or _secret_manager_client()

    @override
    def create(self, name: str, key: bytes | None = None) -> bytes:
        from google.api_core.exceptions import AlreadyExists
        from google.cloud.secretmanager import Secret

        if self.used(name):  # a creator may lack the right to destroy a surplus version
            raise FileExistsError(f"key {name} is in use or was destroyed")
        # A killed process may have added no version: version 1 decides.
        with suppress(AlreadyExists), self._reached(name, AlreadyExists):
            self._client.create_secret(
                parent=self._parent,
                secret_id=self._secret_id(name),
                secret=Secret(replication={"automatic": {}}),
            )
        key, version = self._add(name, key)
        if _number(version) != 1:
            with suppress(StorageError):  # a creator may lack the right to destroy
                self._destroy(name, version)
            raise FileExistsError(f"key {name} is in use or was destroyed")
        return key

    @override
    def fetch(self, name: str) -> bytes:
        from google.api_core.exceptions import FailedPrecondition, NotFound

        try:
            with self._reached(name, NotFound, FailedPrecondition):
                answer = self._client.access_secret_version(name=self._version(name))
        except (NotFound, FailedPrecondition) as error:
            raise LedgerError(
                f"key {name} is not in {self.uri} or was destroyed when its run was committed; "
                "start a new run"
            ) from error
        return self._whole(name, bytes(answer.payload.data))

    @override
    def destroy(self, name: str) -> None:
        self._destroy(name, self._version(name))

    @override
    def exists(self, name: str) -> bool:
        try:
            self.fetch(name)
        except LedgerError:
            return False
        return True

    @override
    def used(self, name: str) -> bool:
        from google.api_core.exceptions import FailedPrecondition, NotFound

        try:
            with self._reached(name, NotFound, FailedPrecondition):
                self._client.access_secret_version(name=self._version(name))
        except NotFound:
            return False
        except FailedPrecondition:  # destroyed
            return True
        return True

    @override
    def newest(self, name: str) -> int:
        from google.api_core.exceptions import NotFound

        parent = f"{self._parent}/secrets/{self._secret_id(name)}"
        try:
            with self._reached(name, NotFound):
                versions = list(self._client.list_secret_versions(parent=parent))
        except NotFound:
            return 0
        # Versions that lost a race for a name are destroyed and not counted.
        enabled = [version.name for version in versions if version.state.name == "ENABLED"]
        return max(map(_number, enabled), default=0)

    @override
    def renew(self, name: str) -> int:
        return _number(self._add(name)[1])

    def _add(self, name: str, key: bytes | None = None) -> tuple[bytes, str]:
        """Adds a version, from entropy unless `key` is set; returns key and version name."""
        from google.cloud.secretmanager import SecretPayload

        key = key or os.urandom(KEY_BYTES)
        with self._reached(name):
            version = self._client.add_secret_version(
                parent=f"{self._parent}/secrets/{self._secret_id(name)}",
                payload=SecretPayload(data=key),
            )
        return key, version.name

    def _destroy(self, name: str, version: str) -> None:
        from google.api_core.exceptions import FailedPrecondition, NotFound

        expected = (NotFound, FailedPrecondition)
        with suppress(*expected), self._reached(name, *expected):
            self._client.destroy_secret_version(name=version)

    def _secret_id(self, name: str) -> str:
        """Returns the secret name of all generations of a key; it shows the kind, for IAM rules."""
        key = checked_name(name).partition("@")[0]
        kind = key.partition("/")[0]
        return f"{self._prefix}-{kind}-{hashlib.sha256(key.encode()).hexdigest()}"

    def _version(self, name: str) -> str:
        generation = name.partition("@")[2] or "1"
        return f"{self._parent}/secrets/{self._secret_id(name)}/versions/{generation}"

    @contextmanager
    def _reached(self, name: str, *expected: type[Exception]) -> Generator[None]:
        """Converts errors of the service to StorageError, except those that the caller expects."""
        from google.api_core.exceptions import GoogleAPICallError

        try:
            yield
        except expected:
            raise
        except GoogleAPICallError as error:
            raise StorageError(
                f"key {name} in {self.uri} cannot be reached ({type(error).__name__}); check the "
                "service account's role on Secret Manager, then run again"
            ) from error


def _number(version: str) -> int:
    return int(version.rsplit("/", 1)[-1])


def _secret_manager_client() -> SecretManagerServiceClient:
    try:
        from google.cloud import secretmanager
    except ImportError as error:
        raise (missing_extra(error) or error) from error
    from google.auth.exceptions import GoogleAuthError

    try:
        return secretmanager.SecretManagerServiceClient()
    except GoogleAuthError as error:
        raise StorageError(
            "no Google credentials were found for the keys; run `gcloud auth application-default "
            "login`, or set up Workload Identity for this service account"
        ) from error
