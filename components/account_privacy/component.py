"""KFP face of account_privacy."""

from kfp import dsl

from fedemb.steps.step import step


@step("light")
def account_privacy(
    config: str,
    ledger: str,
    keys: str,
    privacy_plan: dsl.Input[dsl.Artifact],
    reservation: dsl.Input[dsl.Artifact],
    users: dsl.Input[dsl.Dataset],
    model: dsl.Input[dsl.Model],
    pretrained: dsl.Input[dsl.Model],
    audit_report: dsl.Input[dsl.Artifact],
    utility_report: dsl.Input[dsl.Artifact],
    privacy_report: dsl.Output[dsl.Artifact],
    privacy_page: dsl.Output[dsl.HTML],
    lineage: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
):
    """Prices what ran from plan, ledger and round records, and signs the report."""
    from pathlib import Path

    from fedemb.config import RunConfig
    from fedemb.steps.account_privacy.account import run
    from fedemb.steps.step import step_process

    with step_process("account_privacy"):
        report = run(
            RunConfig.model_validate_json(config),
            plan_path=Path(privacy_plan.path),
            reservation_path=Path(reservation.path),
            model_dir=Path(model.path),
            pretrained_dir=Path(pretrained.path),
            users_manifest_path=Path(users.path),
            audit_path=Path(audit_report.path),
            utility_path=Path(utility_report.path),
            ledger_uri=ledger,
            keys_uri=keys,
            report_path=Path(privacy_report.path),
            html_path=Path(privacy_page.path),
            lineage_path=Path(lineage.path),
        )
        accounting = report["accounting"]
        metrics.log_metric("epsilon", accounting["epsilon"])
        metrics.log_metric("delta", accounting["delta"])
        privacy_report.metadata.update(epsilon=accounting["epsilon"], delta=accounting["delta"])
