"""`fedemb schedule budget`: budgets and their alerts on a cluster, on a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedemb.pipelines.cli.ledger_commands.ledger_write import LedgerOption
from fedemb.pipelines.cli.operate.retention import say_applied
from fedemb.pipelines.cli.option_groups import grouped
from fedemb.pipelines.cli.schedule import ClusterOptions, connect


@grouped
def watch(
    *,
    package: Annotated[Path, typer.Argument(help="YAML of `fedemb compile --pipeline budget`.")],
    ledger: LedgerOption,
    schedules: Annotated[
        Path | None, typer.Option(help="Folder of schedules for the forecast.")
    ] = None,
    alert_below: Annotated[
        float, typer.Option(help="Remaining epsilon below which a block is alerted.", min=0)
    ] = 0.0,
    cron: Annotated[str, typer.Option(help="Six fields, seconds first, UTC.")] = "0 0 6 * * *",
    service_account: Annotated[
        str, typer.Option(help="Service account that drives the run.")
    ] = "fedemb-run",
    cluster: ClusterOptions,
) -> None:
    """Schedule the budget page and its alerts on a cluster (idempotent).

    Run it again after a change of the schedules. Example: fedemb schedule budget budget.yaml
    --ledger gs://RUNS-fedemb-ledger --schedules schedules --alert-below 1 --host URL
    """
    from fedemb.pipelines.budget import BUDGET
    from fedemb.pipelines.schedules.maintenance import apply_maintenance, budget_arguments
    from fedemb.pipelines.schedules.planned import planned_runs

    planned = planned_runs(schedules) if schedules else []
    arguments = budget_arguments(ledger, planned, alert_below)
    kubeflow = connect(cluster.host, cluster.namespace, cluster.profile)
    applied = apply_maintenance(
        kubeflow,
        BUDGET,
        package,
        cron=cron,
        arguments=arguments,
        service_account=service_account,
    )
    say_applied(applied, cron)
