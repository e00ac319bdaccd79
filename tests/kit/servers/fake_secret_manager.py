"""Google Secret Manager in memory, with its error types."""

from types import SimpleNamespace

from google.api_core import exceptions


class FakeSecretManager:
    """Secret Manager in memory, with its error types."""

    def __init__(self):
        self.secrets = {}

    def create_secret(self, parent, secret_id, secret):
        if secret_id in self.secrets:
            raise exceptions.AlreadyExists("there")
        self.secrets[secret_id] = []

    def add_secret_version(self, parent, payload):
        versions = self.secrets[parent.rsplit("/", 1)[1]]
        versions.append(payload.data)
        return SimpleNamespace(name=f"{parent}/versions/{len(versions)}")

    def _versions(self, name):
        _, secret_id, _, number = name.rsplit("/", 3)
        versions = self.secrets.get(secret_id, [])
        if len(versions) < int(number):
            raise exceptions.NotFound("no version")
        return versions, int(number) - 1

    def access_secret_version(self, name):
        versions, index = self._versions(name)
        if versions[index] is None:
            raise exceptions.FailedPrecondition("destroyed")
        return SimpleNamespace(payload=SimpleNamespace(data=versions[index]))

    def destroy_secret_version(self, name):
        versions, index = self._versions(name)
        versions[index] = None

    def list_secret_versions(self, parent):
        secret_id = parent.rsplit("/", 1)[1]
        if secret_id not in self.secrets:
            raise exceptions.NotFound("no secret")
        for number, data in enumerate(self.secrets[secret_id], start=1):
            state = SimpleNamespace(name="DESTROYED" if data is None else "ENABLED")
            yield SimpleNamespace(name=f"{parent}/versions/{number}", state=state)
