"""`fedemb doctor`: is this cluster fit to train on private data?"""

from __future__ import annotations

from typing import Annotated

import typer

from fedemb.pipelines.cli.schedule import Namespace, Profiles, namespace_of
from fedemb.pipelines.output import say_block


def doctor(
    namespace: Namespace = None,
    profile: Profiles = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config", "-c", help="Configuration of the stores: YAML file or preset; repeatable."
        ),
    ] = None,
) -> None:
    """Check whether a cluster is safe for private data; exit code 3 if not.

    Example: fedemb doctor --profile gpu --config run.yaml
    """
    from fedemb.pipelines.compile.cluster import load_profile
    from fedemb.pipelines.doctor.checks import check_cluster
    from fedemb.pipelines.doctor.doctor import Doctor, require_safe, table
    from fedemb.pipelines.run.load_config import load_config
    from fedemb.pipelines.schedules.kubernetes_api import KubernetesApi

    loaded = load_profile(*(profile or ["cpu"]))
    configs = [load_config(source, []) for source in config or []]
    where = namespace_of(namespace, profile)
    findings = check_cluster(Doctor(KubernetesApi(), where, loaded, configs))
    say_block(table(findings, loaded.accepts))
    require_safe(findings, loaded.accepts)
