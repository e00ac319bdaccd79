"""A run on a cluster that waits for approval: its documents, and the run that releases it.

The waiting run has ended, so no pod and no key waits with it. After the last approval a second run
starts at the gate and imports every output before it: nothing is trained or charged again. The gate
decides as it would have in the first run, and refuses approvals after the deadline.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fedemb.config import RunConfig
from fedemb.config.parameters import run_config
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.utility import AnyUtility, utility_kind
from fedemb.documents.verdict import VerdictDocument
from fedemb.errors import ConfigError, InputError
from fedemb.foundation.document import Written, parse
from fedemb.pipelines.cluster.kubeflow import Kubeflow, StoredRun
from fedemb.pipelines.cluster.kubernetes import ClusterObjects
from fedemb.pipelines.cluster.submission import LAST, Request, Submitted, earlier_outputs, submit
from fedemb.steps.show_outcome import documents_at, newest_verdict
from fedemb.storage import join, open_store

_RESUMES = re.compile(r"\(resumes ([^()\s]+)\)$")
_STORES = ("private_root", "ledger", "keys", "releases")


@dataclass(frozen=True)
class WaitingRun:
    """A run on a cluster, with the documents that an approver signs for."""

    stored: StoredRun
    config: RunConfig
    report: Written[PrivacyReport]
    utility: Written[AnyUtility]
    verdict: Written[VerdictDocument] | None
    """Newest verdict about the report; None: the gate has not decided about it."""
    released: str | None
    """Id of the run that released it; None: none did."""

    @property
    def ledger(self) -> str:
        """Root of the ledgers."""
        return str(self.stored.arguments["ledger"])

    def release(self, kubeflow: Kubeflow, cluster: ClusterObjects, package: Path) -> Submitted:
        """Starts the run that decides again and releases. Idempotent, as `submit` is.

        Raises:
          ConfigError: the package breaks a rule.
          StorageError: Kubeflow does not answer or refuses.
        """
        request = Request(
            package=package,
            config=self.config,
            description=f"Releases run {self.stored.run_id} after its approvals",
            service_account=self.stored.service_account,
            beam_options=_words(self.stored.arguments.get("beam_options")),
            mlflow=str(self.stored.arguments.get("mlflow") or "") or None,
            resume=self.stored.run_id,
            start=LAST,
        )
        return submit(kubeflow, request, cluster)


def read_waiting(kubeflow: Kubeflow, cluster: ClusterObjects, run_id: str) -> WaitingRun:
    """Reads a run from Kubeflow and its documents from the public root.

    Args:
      kubeflow: namespace of the Kubeflow Pipelines API.
      cluster: Kubernetes objects of the namespace.
      run_id: id of the run in Kubeflow, or of a run that resumed it.

    Raises:
      InputError: the run has no privacy report, or its outputs are gone.
      ConfigError: the public root is not known, or the run is not of this version.
      StorageError: Kubeflow or the public root cannot be read.
    """
    stored = kubeflow.run(run_id)
    if first := _RESUMES.search(stored.name):
        stored = kubeflow.run(first[1])
    config = _config(stored)
    resumed = kubeflow.runs_named(f"(resumes {stored.run_id})")
    earlier = earlier_outputs(kubeflow, cluster, config, stored.run_id, LAST)
    signed = parse(_read(earlier.artifacts["privacy_report"]), PrivacyReport, "privacy_report")
    utility = _read(earlier.artifacts["utility_report"])
    judged = [
        join(folder, name)
        for folder, names in earlier.listed.items()
        for name in names
        if name.startswith("gate-release/")
    ]
    verdicts = documents_at(judged, "verdict", VerdictDocument)
    return WaitingRun(
        stored=stored,
        config=config,
        report=signed,
        utility=parse(utility, utility_kind(config.task), "utility_report"),
        verdict=newest_verdict(item for item in verdicts if item.body.report_sha == signed.sha),
        released=next((run.run_id for run in resumed if run.state == "SUCCEEDED"), None),
    )


def _words(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _config(stored: StoredRun) -> RunConfig:
    """Returns the configuration of a run with its stores."""
    try:
        stores = {f"storage.{name}": stored.arguments[name] for name in _STORES}
        stores["storage.public_root"] = stored.pipeline_root
        return run_config(stored.arguments).updated(stores)
    except KeyError as error:
        raise ConfigError(
            f"The run has no argument {error}. Submit it again with this version, `fedemb submit "
            "--resume RUN --from account_privacy`, and approve that run."
        ) from error


def _read(uri: str) -> bytes:
    place, _, name = uri.rpartition("/")
    try:
        return open_store(place).read(name)
    except FileNotFoundError as error:
        raise InputError(f"{uri} does not exist. Resume the run from account_privacy.") from error
