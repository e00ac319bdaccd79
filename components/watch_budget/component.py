"""KFP face of watch_budget."""

from kfp import dsl

from fedemb.documents.artifacts import Public
from fedemb.runtime.step import Rights, step


@step(
    image="light",
    private=False,
    outputs={"budget": Public, "budget_page": Public, "metrics": Public},
    rights=Rights(ledger="read"),
)
def watch_budget(
    ledger: str,
    schedules: str,
    alert_below: float,
    budget: dsl.Output[dsl.Artifact],
    budget_page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
):
    """Shows the budget of every policy, and alerts on low budgets and schedules above the cap."""
    from fedemb.runtime.step import step_process
    from fedemb.steps.watch_budget.watch import run

    with step_process("watch_budget", locals()) as context:
        for name, value in run(context).items():
            metrics.log_metric(name, value)
