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


def waiting_run(
    run_id: str, cluster: ClusterOptions, release: Release
) -> tuple[Kubeflow, WaitingRun]:
    """Reads a run in Kubeflow that waits for approval, before anything is signed.

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
    return kubeflow, waiting


def candidate_of(waiting: WaitingRun) -> Candidate:
    """Returns what is approved."""

    def judge(opened: Ledger) -> Judged | None:
        if waiting.verdict is None:
            return None
        return judge_verdict(waiting.verdict, waiting.report, opened)

    anchor = waiting.config.storage.rollback_anchor
    return Candidate(waiting.report, waiting.utility, waiting.ledger, anchor, judge)


def start_release(
    kubeflow: Kubeflow, waiting: WaitingRun, cluster: ClusterOptions, release: Release
) -> None:
    """Starts the run that decides again at the gate, and releases.

    Raises:
      Refused: the cluster is unsafe.
      StorageError: Kubeflow does not answer or refuses; the approval is recorded.
    """
    with tempfile.TemporaryDirectory() as folder:
        package = release.package or waiting.stored.write_package(Path(folder))
        check_cluster_first(kubeflow.namespace, cluster.profile, [waiting.config])
        run = waiting.release(kubeflow, objects(kubeflow.namespace), package)
    if run.started:
        say(f"release: run {run.run_id} decides again from gate_release, without training")
    else:
        say(f"release: run {run.run_id} is already {run.state}")
