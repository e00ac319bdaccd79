"""`fedemb schedule retention` and `budget`: recurring runs that train nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.foundation.canonical_json import JsonFields
from fedemb.pipelines.cli.ledger_commands.ledger_write import LedgerOption
from fedemb.pipelines.cli.operate.gc import DeleteOption, Periods
from fedemb.pipelines.cli.option_groups import grouped
from fedemb.pipelines.cli.options import SetOption
from fedemb.pipelines.cli.schedule import ClusterOptions, connect
from fedemb.pipelines.output import say

if TYPE_CHECKING:
    from fedemb.pipelines.graph import Pipeline

CronOption = Annotated[str, typer.Option(help="Six fields, seconds first, UTC.")]
AccountOption = Annotated[str, typer.Option(help="Service account that drives the run.")]


@grouped
def retention(
    *,
    package: Annotated[Path, typer.Argument(help="YAML of `fedemb compile --pipeline retention`.")],
    config: Annotated[
        str, typer.Option("--config", "-c", help="Configuration that names the stores.")
    ],
    set_: SetOption = None,
    cron: CronOption = "0 0 4 * * 0",
    periods: Periods,
    delete: DeleteOption = False,
    service_account: AccountOption = "fedemb-run",
    cluster: ClusterOptions,
) -> None:
    """Schedule the deletion of expired data on a cluster (idempotent).

    Example: fedemb schedule retention retention.yaml --config run.yaml --delete --host URL
    """
    from fedemb.pipelines.retention import RETENTION
    from fedemb.pipelines.run.load_config import load_config
    from fedemb.pipelines.schedules.maintenance import retention_arguments

    loaded = load_config(config, set_ or [])
    arguments = retention_arguments(loaded, periods.retention(), dry_run=not delete)
    _apply(RETENTION, package, arguments, cron, service_account, cluster)
    if not delete:
        say("its runs only list expired data; pass --delete to delete it")


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
    cron: CronOption = "0 0 6 * * *",
    service_account: AccountOption = "fedemb-run",
    cluster: ClusterOptions,
) -> None:
    """Schedule the budget page and its alerts on a cluster (idempotent).

    Run it again after a change of the schedules. Example: fedemb schedule budget budget.yaml
    --ledger gs://RUNS-fedemb-ledger --schedules schedules --alert-below 1 --host URL
    """
    from fedemb.pipelines.budget import BUDGET
    from fedemb.pipelines.schedules.load import planned_runs
    from fedemb.pipelines.schedules.maintenance import budget_arguments

    planned = planned_runs(schedules) if schedules else []
    arguments = budget_arguments(ledger, planned, alert_below)
    _apply(BUDGET, package, arguments, cron, service_account, cluster)


def _apply(
    pipeline: Pipeline,
    package: Path,
    arguments: JsonFields,
    cron: str,
    service_account: str,
    cluster: ClusterOptions,
) -> None:
    from fedemb.pipelines.schedules.maintenance import apply_maintenance

    applied = apply_maintenance(
        connect(cluster),
        pipeline,
        package,
        cron=cron,
        arguments=arguments,
        service_account=service_account,
    )
    done = "created" if applied.created else "already scheduled:"
    say(f"{done} recurring run {applied.run_id}, cron {cron!r}")
    say(*(f"replaced recurring run {run_id}" for run_id in applied.deleted))
