"""Approval of a run on a cluster: one command that shows, signs and releases."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import ConfigError
from fedemb.pipelines.cli.ledger_commands.approval import Candidate, Judged, judge_verdict
from fedemb.pipelines.cli.schedule import ClusterOptions, check_cluster_first, connect, objects
from fedemb.pipelines.output import say

if TYPE_CHECKING:
    from fedemb.ledger import Ledger
    from fedemb.pipelines.schedules.kubeflow import Kubeflow
    from fedemb.pipelines.schedules.waiting import WaitingRun


@dataclass(frozen=True, kw_only=True)
class Release:
    """Options of the run that releases a run on a cluster."""

    pipeline_root: Annotated[
        str | None, typer.Option(help="Public root; default: that of the run on the cluster.")
    ] = None
    package: Annotated[
        Path | None,
        typer.Option(help="YAML of `fedemb compile`; default: the one that the run started with."),
    ] = None


@dataclass(frozen=True)
class OnCluster:
    """A run in Kubeflow that waits for approval."""

    kubeflow: Kubeflow
    waiting: WaitingRun
    profile: list[str] | None
    package: Path | None

    @classmethod
    def connect(cls, run_id: str, cluster: ClusterOptions, release: Release) -> OnCluster:
        """Reads a run, before anything is signed.

        Raises:
          ConfigError: the profile pins packages, and none was passed.
          InputError: the run has no privacy report.
          StorageError: Kubeflow or the public root cannot be read.
        """
        from fedemb.pipelines.compile.cluster import load_profile
        from fedemb.pipelines.schedules.package import check_package, checked_digest
        from fedemb.pipelines.schedules.waiting import read_waiting

        kubeflow = connect(cluster)
        found = objects(kubeflow.namespace)
        waiting = read_waiting(kubeflow, found, run_id, release.pipeline_root)
        if release.package is not None:
            check_package(release.package, config=waiting.config)
            checked_digest(release.package, cluster.profile or ())
        elif cluster.profile and load_profile(*cluster.profile).packages:
            raise ConfigError(
                "The profile pins packages, and Kubeflow returns a package with other bytes. Pass "
                "the file with --package."
            )
        return cls(kubeflow, waiting, cluster.profile, release.package)

    def candidate(self) -> Candidate:
        """Returns what is approved."""
        waiting = self.waiting

        def judge(opened: Ledger) -> Judged | None:
            if waiting.verdict is None:
                return None
            return judge_verdict(waiting.verdict, waiting.report, opened)

        anchor = waiting.config.storage.rollback_anchor
        return Candidate(waiting.report, waiting.utility, waiting.ledger, anchor, judge)

    def release(self) -> None:
        """Starts the run that decides again at the gate, and releases.

        Raises:
          Refused: the cluster is unsafe.
          StorageError: Kubeflow does not answer or refuses; the approval is recorded.
        """
        with tempfile.TemporaryDirectory() as folder:
            path, config = Path(folder), self.waiting.config
            package = self.package or self.waiting.stored.write_package(path)
            check_cluster_first(self.kubeflow.namespace, self.profile, [config], package)
            cluster = objects(self.kubeflow.namespace)
            run = self.waiting.release(self.kubeflow, cluster, package)
        if run.started:
            say(f"release: run {run.run_id} decides again from gate_release, without training")
        else:
            say(f"release: run {run.run_id} is already {run.state}")
