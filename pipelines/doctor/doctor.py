"""Inputs of the checks of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps

from fedemb.config import RunConfig
from fedemb.pipelines.compile.cluster import Profile
from fedemb.pipelines.doctor.finding import Finding
from fedemb.pipelines.schedules.kubernetes_api import Answer, KubernetesApi


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


class Unreadable(Exception):
    """Part of the cluster that cannot be read; the text names it."""


def reads(*checks: str, remedy: str) -> Callable[[Check], Check]:
    """Turns what a check cannot read into a finding of each name, with this remedy."""

    def wrap(check: Check) -> Check:
        @wraps(check)
        def told(doctor: Doctor) -> Iterator[Finding]:
            try:
                yield from check(doctor)
            except Unreadable as error:
                shown = remedy.format(namespace=doctor.namespace)
                yield from (Finding(name, "could not tell", str(error), shown) for name in checks)

        return told

    return wrap
