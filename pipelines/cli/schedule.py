"""Commands that speak to a cluster: `fedemb submit` and `fedemb schedule plan|apply|diff`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

schedule_app = typer.Typer(
    help="Recurring runs as reviewed data: price, compare, apply.", no_args_is_help=True
)

Folder = Annotated[Path, typer.Argument(help="Folder of the schedules' YAML files.")]
Host = Annotated[
    str | None, typer.Option(help="Address of the Kubeflow Pipelines API.", envvar="KFP_HOST")
]
Namespace = Annotated[
    str | None, typer.Option(help="Kubernetes namespace of a multi-user Kubeflow.")
]
FOLDER = Path("infra/schedules")


@schedule_app.command()
def plan(folder: Folder = FOLDER, host: Host = None, namespace: Namespace = None) -> None:
    """Print what each schedule costs, and with --host what `apply` would change."""
    from fedemb.pipelines.schedules.schedules import load_schedules

    schedules = load_schedules(folder)
    if host is None:
        for item in schedules:
            typer.echo(f"{item.schedule.name}: {item.cost}")
        return
    for change in _cluster(host, namespace).plan(schedules):
        typer.echo(str(change))


@schedule_app.command()
def apply(
    host: Host = None,
    folder: Folder = FOLDER,
    namespace: Namespace = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Create, replace or disable recurring runs until they are what the folder says."""
    from fedemb.pipelines.schedules.schedules import load_schedules

    cluster = _cluster(_required(host), namespace)
    changes = cluster.plan(load_schedules(folder))
    todo = [change for change in changes if change.action != "keep"]
    for change in changes:
        typer.echo(str(change))
    if not todo:
        typer.echo("nothing to do")
        return
    if not yes:
        typer.confirm(f"Carry out {len(todo)} change(s)?", abort=True)
    cluster.apply(todo)
    typer.echo(f"{len(todo)} change(s) carried out")


@schedule_app.command()
def diff(host: Host = None, folder: Folder = FOLDER, namespace: Namespace = None) -> None:
    """Say whether the cluster is what the folder says; exit code 1 if it is not."""
    from fedemb.pipelines.schedules.schedules import load_schedules

    changes = _cluster(_required(host), namespace).plan(load_schedules(folder))
    differing = [change for change in changes if change.action != "keep"]
    for change in differing:
        typer.echo(str(change))
    if differing:
        raise typer.Exit(1)
    typer.echo(f"{len(changes)} schedule(s) are as they should be")


@schedule_app.command(name="schema")
def schema() -> None:
    """Print the JSON schema of a schedule's file."""
    from fedemb.pipelines.schedules.schedules import json_schema

    typer.echo(json.dumps(json_schema(), indent=1, sort_keys=True))


def submit(
    package: Annotated[Path, typer.Argument(help="YAML of `fedemb compile`.")],
    config: Annotated[str, typer.Option("--config", "-c", help="YAML file or preset.")],
    host: Host = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a.b=c; may be given often.")
    ] = None,
    experiment: Annotated[str, typer.Option(help="Experiment of the run.")] = "dp-fedemb",
    namespace: Namespace = None,
    service_account: Annotated[
        str | None, typer.Option(help="Account that drives the run.")
    ] = "fedemb-run",
    pipeline_root: Annotated[str | None, typer.Option(help="Public root.")] = None,
    beam_option: Annotated[
        list[str] | None, typer.Option(help="Option of the Beam engine; may be given often.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Continue this crashed run: its id in the ledger.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, print, send nothing.")] = False,
) -> None:
    """Start one run of a compiled pipeline on a cluster."""
    from fedemb.pipelines.run.load_config import load_config
    from fedemb.pipelines.schedules.schedules import check_package, run_arguments
    from fedemb.steps.plan_privacy.plan import document

    if not dry_run:
        host = _required(host)
    loaded = load_config(config, set_ or [])
    check_package(package)
    beam_options = tuple(beam_option or ())
    run_arguments(loaded, beam_options)
    typer.echo(f"planned: {document(loaded)['guarantee']['sentence']}")
    if dry_run:
        return
    run_id = _cluster(_required(host), namespace).submit(
        package,
        loaded,
        experiment=experiment,
        service_account=service_account,
        pipeline_root=pipeline_root,
        beam_options=beam_options,
        resume=resume,
    )
    typer.echo(f"run {run_id}")


def _required(host: str | None) -> str:
    from fedemb.errors import ConfigError

    if not host:
        raise ConfigError("no Kubeflow API was named; say --host, or set KFP_HOST")
    return host


def _cluster(host: str, namespace: str | None) -> Any:
    from fedemb.pipelines.schedules.reconcile import Cluster

    return Cluster(host, namespace, os.environ.get("KFP_TOKEN"))
