"""Key store over Google Secret Manager."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from typing_extensions import override

from components.fedemb.errors import LedgerError, StorageError
from components.fedemb.privacy.keys import KEY_BYTES, KeyStore, checked_name


class SecretManagerKeyStore(KeyStore):
    """Google Secret Manager, `gsm://project[/prefix]`: wrapped by the service, never on a disk.

    A key is version 1 of its secret and nothing else; a destroyed version is the tombstone.
    """

    def __init__(self, project: str, prefix: str = "fedemb", client: Any = None):
        self.uri = f"gsm://{project}/{prefix}"
        self._parent = f"projects/{project}"
        self._prefix = prefix
        self._client = client or _secret_manager_client()

    @override
    def create(self, name: str) -> bytes:
        from google.api_core import exceptions

        secret_id = self._secret_id(name)
        try:
            self._client.create_secret(
                parent=self._parent,
                secret_id=secret_id,
                secret={"replication": {"automatic": {}}},
            )
        except exceptions.AlreadyExists:
            pass  # perhaps left without a version by a killed process: version 1 decides
        except exceptions.GoogleAPICallError as error:
            raise self._failed(name, error) from error
        key = os.urandom(KEY_BYTES)
        try:
            version = self._client.add_secret_version(
                parent=f"{self._parent}/secrets/{secret_id}", payload={"data": key}
            )
            if version.name.rsplit("/", 1)[-1] != "1":
                self._client.destroy_secret_version(name=version.name)
                raise FileExistsError(f"key {name} is in use or was destroyed")
        except exceptions.GoogleAPICallError as error:
            raise self._failed(name, error) from error
        return key

    @override
    def fetch(self, name: str) -> bytes:
        from google.api_core import exceptions

        try:
            answer = self._client.access_secret_version(name=self._version(name))
        except (exceptions.NotFound, exceptions.FailedPrecondition) as error:
            raise LedgerError(
                f"key {name} is not in {self.uri} or was destroyed when its run was committed; "
                "start a new run"
            ) from error
        except exceptions.GoogleAPICallError as error:
            raise self._failed(name, error) from error
        key = bytes(answer.payload.data)
        if len(key) != KEY_BYTES:
            raise LedgerError(f"key {name} in {self.uri} has {len(key)} bytes, expected 32")
        return key

    @override
    def destroy(self, name: str) -> None:
        from google.api_core import exceptions

        try:
            self._client.destroy_secret_version(name=self._version(name))
        except (exceptions.NotFound, exceptions.FailedPrecondition):
            return
        except exceptions.GoogleAPICallError as error:
            raise self._failed(name, error) from error

    @override
    def exists(self, name: str) -> bool:
        try:
            self.fetch(name)
        except LedgerError:
            return False
        return True

    def _secret_id(self, name: str) -> str:
        return f"{self._prefix}-{hashlib.sha256(checked_name(name).encode()).hexdigest()}"

    def _version(self, name: str) -> str:
        return f"{self._parent}/secrets/{self._secret_id(name)}/versions/1"

    def _failed(self, name: str, error: Exception) -> StorageError:
        return StorageError(
            f"key {name} in {self.uri} cannot be reached ({type(error).__name__}); check the "
            "service account's role on Secret Manager, then run again"
        )


def _secret_manager_client() -> Any:
    try:
        from google.cloud import secretmanager
    except ImportError as error:
        raise StorageError(
            "key stores at gsm:// need google-cloud-secret-manager; install the locked packages"
        ) from error
    from google.auth.exceptions import GoogleAuthError

    try:
        return secretmanager.SecretManagerServiceClient()
    except GoogleAuthError as error:
        raise StorageError(
            "no Google credentials were found for the keys; run `gcloud auth application-default "
            "login`, or set up Workload Identity for this service account"
        ) from error
