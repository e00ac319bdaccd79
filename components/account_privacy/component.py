"""KFP face of account_privacy."""

from kfp import dsl

from fedemb.documents.artifacts import Public
from fedemb.runtime.step import Rights, step


@step(
    image="light",
    private=False,
    outputs={
        "privacy_report": Public,
        "privacy_page": Public,
        "lineage": Public,
        "metrics": Public,
    },
    rights=Rights(ledger="read", signing=("report",)),
)
def account_privacy(
    config: str,
    ledger: str,
    keys: str,
    privacy_plan: dsl.Input[dsl.Artifact],
    reservation: dsl.Input[dsl.Artifact],
    users: dsl.Input[dsl.Dataset],
    model: dsl.Input[dsl.Model],
    audit_report: dsl.Input[dsl.Artifact],
    utility_report: dsl.Input[dsl.Artifact],
    privacy_report: dsl.Output[dsl.Artifact],
    privacy_page: dsl.Output[dsl.HTML],
    lineage: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
):
    """Prices what ran from plan, ledger and round records, and signs the report."""
    from fedemb.reports.headline import privacy_figures
    from fedemb.runtime.step import step_process
    from fedemb.steps.account_privacy.account import run

    with step_process("account_privacy", locals()) as context:
        report = run(context).body
        for name, value in privacy_figures(report).items():
            metrics.log_metric(name, value)
        accounting = report.accounting
        privacy_report.metadata.update(epsilon=accounting.epsilon, delta=accounting.delta)
