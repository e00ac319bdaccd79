"""Inputs of the checks of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedemb.config import RunConfig
from fedemb.pipelines.compile.cluster import Profile
from fedemb.pipelines.schedules.kubernetes_api import Answer, KubernetesApi


class Doctor:
    """APIs that a check of a cluster reads, and the expected state.

    Args:
      api: the cluster.
      namespace: where the runs are.
      profile: what the runs ask for.
      package: compiled pipeline to run; None: not checked.
      configs: of the runs; they name the stores.
    """

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        profile: Profile,
        package: Path | None = None,
        configs: Sequence[RunConfig] = (),
    ) -> None:
        self.api, self.namespace, self.profile = api, namespace, profile
        self.package, self.configs = package, configs

    def mine(self, path: str) -> str:
        """Path of something of the namespace."""
        group, _, rest = path.rpartition("|")
        root = f"/apis/{group}" if group else "/api/v1"
        return f"{root}/namespaces/{self.namespace}/{rest}"

    def get(self, path: str) -> Answer:
        """Reads something of the namespace."""
        return self.api.get(self.mine(path))
