"""Commands for a cluster: submit and schedule runs, and check that it is fit for private data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import ConfigError, StorageError
from fedemb.foundation.canonical_json import json_digest
from fedemb.pipelines.cli.options import BeamOption, JsonOption, SetOption, grouped
from fedemb.pipelines.output import say, say_block, say_json

if TYPE_CHECKING:
    from fedemb.config import RunConfig
    from fedemb.pipelines.cluster.kubeflow import Kubeflow
    from fedemb.pipelines.cluster.kubernetes import ClusterObjects

Folder = Annotated[Path, typer.Argument(help="Folder of the schedules' YAML files.")]
Host = Annotated[
    str | None, typer.Option(help="Address of the Kubeflow Pipelines API.", envvar="KFP_HOST")
]
Namespace = Annotated[
    str | None,
    typer.Option(
        help="Namespace of the runs; default: that of --profile, of this pod, or `fedemb`.",
        envvar="KFP_NAMESPACE",
    ),
]
Profiles = Annotated[
    list[str] | None,
    typer.Option("--profile", metavar="PROFILE", help="Profile of the namespace; repeatable."),
]
POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options of the connection to Kubeflow."""

    host: Host = None
    namespace: Namespace = None
    profile: Profiles = None


@grouped
def schedule(
    *,
    folder: Folder,
    cluster: ClusterOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print costs, and with --host what would change.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Dry run; exit with code 1 if anything would change.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Skip the confirmation.")] = False,
) -> None:
    """Create, replace or disable recurring runs to match the folder.

    Example: fedemb schedule schedules/ --host https://kubeflow.example/pipeline
    """
    from fedemb.pipelines.cluster.kubeflow import apply, plan
    from fedemb.pipelines.cluster.package import checked_digest
    from fedemb.pipelines.cluster.schedule import load_schedules

    if dry_run and cluster.host is None:
        say(*(f"{item.schedule.name}: {item.cost}" for item in load_schedules(folder)))
        return
    kubeflow = connect(cluster)
    schedules = load_schedules(folder)
    for item in schedules:
        checked_digest(item.package, cluster.profile or ())
    there = objects(kubeflow.namespace)
    changes = plan(kubeflow, schedules, _now(), there)
    todo = [change for change in changes if change.action != "keep"]
    say(*changes)
    if dry_run or check:
        raise typer.Exit(1 if check and todo else 0)
    if not todo:
        say("nothing to do")
        return
    check_cluster_first(kubeflow.namespace, cluster.profile, [item.config for item in schedules])
    if not yes:
        typer.confirm(f"Carry out {len(todo)} change(s)?", abort=True)
    apply(kubeflow, todo, _now(), there)
    say(f"{len(todo)} change(s) carried out")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of the run that Kubeflow creates."""

    experiment: Annotated[
        str | None, typer.Option(help="Experiment of the run; default: name of the pipeline.")
    ] = None
    service_account: Annotated[
        str | None, typer.Option(help="Service account that drives the run.")
    ] = "fedemb-run"
    beam: BeamOption = None
    mlflow: Annotated[
        str | None,
        typer.Option(help="Tracking server of MLflow that receives the ended run, http(s)://."),
    ] = None
    resume: Annotated[str | None, typer.Option(help="Ledger id of a crashed run to resume.")] = None
    start: Annotated[
        str | None, typer.Option("--from", help="First step to run again. Needs --resume.")
    ] = None


@grouped
def submit(
    *,
    package: Annotated[Path, typer.Argument(help="YAML of `fedemb compile`.")],
    config: Annotated[str, typer.Option("--config", "-c", help="YAML file or preset.")],
    cluster: ClusterOptions,
    set_: SetOption = None,
    options: RunOptions,
    again: Annotated[
        bool, typer.Option("--again", help="Start a run although an earlier one may be alive.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, print, send nothing.")] = False,
) -> None:
    """Start one run of a compiled pipeline on a cluster.

    Idempotent: while a run of the same configuration is alive, its id is printed instead.

    Example: fedemb submit fedemb.yaml --config run.yaml --host https://kubeflow.example/pipeline
    """
    from fedemb.pipelines.cluster import submission
    from fedemb.pipelines.cluster.package import check_package, checked_digest, run_arguments
    from fedemb.pipelines.run.load_config import load_config
    from fedemb.release.plan import document
    from fedemb.reports.privacy_text import guarantee_sentence

    kubeflow = None if dry_run else connect(cluster)
    loaded = load_config(config, set_ or [])
    check_package(package, config=loaded)
    say(f"package: sha256 {checked_digest(package, cluster.profile or ())}")
    beam_options = tuple(options.beam or ())
    run_arguments(loaded, beam_options, options.mlflow)
    plan = document(loaded)
    promised = guarantee_sentence(plan.guarantee)
    say(f"planned: {promised}")
    if kubeflow is None:
        return
    check_cluster_first(kubeflow.namespace, cluster.profile, [loaded])
    request = submission.Request(
        package=package,
        config=loaded,
        experiment=options.experiment,
        description=f"Configuration {plan.config_sha[:16]}, plan {json_digest(plan.plan)[:16]}: "
        f"{promised}",
        service_account=options.service_account,
        beam_options=beam_options,
        mlflow=options.mlflow,
        resume=options.resume,
        start=options.start,
    )
    run = submission.submit(kubeflow, request, objects(kubeflow.namespace), again=again)
    for earlier in run.ended_before:
        say(f"earlier run {earlier.run_id} of this configuration: {earlier.state}", err=True)
    if not run.started:
        say(f"already submitted ({run.state or 'no state yet'}), nothing started", err=True)
    say(f"run {run.run_id}")


def objects(namespace: str) -> ClusterObjects:
    """Workflows and ScheduledWorkflows of a namespace, if a cluster can be asked from here."""
    from fedemb.pipelines.cluster.kubernetes import ClusterObjects, KubernetesApi

    try:
        return ClusterObjects(KubernetesApi(), namespace)
    except StorageError:
        return ClusterObjects(None, namespace)


def check_cluster_first(
    namespace: str, profile: list[str] | None, configs: Sequence[RunConfig]
) -> None:
    """Refuses to start anything on a cluster that is unsafe; says so where none can be asked.

    Raises:
      Refused: something is unsafe, and no profile accepts it.
    """
    from fedemb.pipelines.cluster.compile import load_profile
    from fedemb.pipelines.cluster.doctor import Doctor, check_cluster, require_safe
    from fedemb.pipelines.cluster.kubernetes import KubernetesApi

    loaded = load_profile(*(profile or ["cpu"]))
    try:
        findings = check_cluster(Doctor(KubernetesApi(), namespace, loaded, configs))
    except StorageError as error:
        say(f"the cluster was not checked: {error}", err=True)
        return
    unknown = ", ".join(item.check for item in findings if item.state == "could not tell")
    say(f"checked the cluster: {len(findings)} findings, not possible: {unknown or 'none'}")
    require_safe(findings)


def connect(cluster: ClusterOptions) -> Kubeflow:
    """Returns the connection to Kubeflow.

    Raises:
      ConfigError: no host.
      StorageError: Kubeflow does not answer.
    """
    from fedemb.pipelines.cluster.kubeflow import Kubeflow

    if not cluster.host:
        raise ConfigError("No Kubeflow API host. Pass --host, or set KFP_HOST.")
    namespace = namespace_of(cluster.namespace, cluster.profile)
    return Kubeflow(cluster.host, namespace, os.environ.get("KFP_TOKEN"))


def namespace_of(named: str | None, profiles: list[str] | None) -> str:
    """The namespace that was named, else the profile's, this pod's own, or that of `infra`."""
    from fedemb.pipelines.cluster.compile import load_profile

    if named:
        return named
    if profiles and (of_profile := load_profile(*profiles).namespace):
        return of_profile
    return POD_NAMESPACE.read_text().strip() if POD_NAMESPACE.is_file() else "fedemb"


def _now() -> datetime:
    return datetime.now(UTC)


def doctor(
    namespace: Namespace = None,
    profile: Profiles = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            "-c",
            metavar="CONFIG",
            help="Configuration of the stores: YAML file or preset; repeatable.",
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Check whether a cluster is safe for private data; exit code 3 if not.

    Example: fedemb doctor --profile gpu --config run.yaml
    """
    from fedemb.pipelines.cluster.compile import load_profile
    from fedemb.pipelines.cluster.doctor import Doctor, check_cluster, require_safe, table
    from fedemb.pipelines.cluster.kubernetes import KubernetesApi
    from fedemb.pipelines.run.load_config import load_config

    loaded = load_profile(*(profile or ["cpu"]))
    configs = [load_config(source, []) for source in config or []]
    where = namespace_of(namespace, profile)
    findings = check_cluster(Doctor(KubernetesApi(), where, loaded, configs))
    if json_:
        say_json([asdict(finding) for finding in findings])
    else:
        say_block(table(findings))
    require_safe(findings)
