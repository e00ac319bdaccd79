"""`fedemb doctor --cluster`: is this cluster fit to train on private data?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedemb.errors import ConfigError, StorageError
from fedemb.pipelines.cli.schedule import Namespace, Profiles, namespace_of


def doctor(
    cluster: Annotated[bool, typer.Option("--cluster", help="Look at the cluster.")] = False,
    namespace: Namespace = None,
    profile: Profiles = None,
    package: Annotated[
        Path | None, typer.Option(help="YAML of `fedemb compile` that is to run.")
    ] = None,
) -> None:
    """Look at a cluster before private data is trained on it; exit code 3 if it is unsafe."""
    from fedemb.pipelines.compile.cluster import load_profile
    from fedemb.pipelines.doctor.checks import Doctor
    from fedemb.pipelines.doctor.finding import require_safe, table
    from fedemb.pipelines.doctor.kubernetes_api import KubernetesApi

    if not cluster:
        raise ConfigError("nothing was named to look at; say `fedemb doctor --cluster`")
    loaded = load_profile(*(profile or ["cpu"]))
    findings = Doctor(KubernetesApi(), namespace_of(namespace, profile), loaded, package).findings()
    typer.echo(table(findings, loaded.accepts))
    require_safe(findings, loaded.accepts)


def look_first(namespace: str, profile: list[str] | None, package: Path | None = None) -> None:
    """Refuses to start anything on a cluster that is unsafe; says so where none can be asked.

    Raises:
      Refused: something is unsafe, and no profile accepts it.
    """
    from fedemb.pipelines.compile.cluster import load_profile
    from fedemb.pipelines.doctor.checks import Doctor
    from fedemb.pipelines.doctor.finding import require_safe
    from fedemb.pipelines.doctor.kubernetes_api import KubernetesApi

    loaded = load_profile(*(profile or ["cpu"]))
    try:
        findings = Doctor(KubernetesApi(), namespace, loaded, package).findings()
    except StorageError as error:
        typer.echo(f"the cluster was not looked at: {error}", err=True)
        return
    unknown = sum(finding.state == "could not tell" for finding in findings)
    typer.echo(f"looked at the cluster: {len(findings)} findings, {unknown} could not be told")
    require_safe(findings, loaded.accepts)
