"""KFP face of gate_release."""

from kfp import dsl

from fedemb.steps.step import step


@step("light")
def gate_release(
    config: str,
    ledger: str,
    keys: str,
    privacy_plan: dsl.Input[dsl.Artifact],
    reservation: dsl.Input[dsl.Artifact],
    users: dsl.Input[dsl.Dataset],
    model: dsl.Input[dsl.Model],
    privacy_report: dsl.Input[dsl.Artifact],
    audit_report: dsl.Input[dsl.Artifact],
    utility_report: dsl.Input[dsl.Artifact],
    verdict: dsl.Output[dsl.Artifact],
    lineage: dsl.Output[dsl.Artifact],
):
    """Recomputes, compares, and allows the release or raises."""
    from pathlib import Path

    from fedemb.config import RunConfig
    from fedemb.steps.gate_release.gate import run
    from fedemb.steps.step import step_process

    with step_process("gate_release"):
        decision = run(
            RunConfig.model_validate_json(config),
            plan_path=Path(privacy_plan.path),
            reservation_path=Path(reservation.path),
            users_manifest_path=Path(users.path),
            model_dir=Path(model.path),
            report_path=Path(privacy_report.path),
            audit_path=Path(audit_report.path),
            utility_path=Path(utility_report.path),
            ledger_uri=ledger,
            keys_uri=keys,
            verdict_path=Path(verdict.path),
            lineage_path=Path(lineage.path),
        )
        verdict.metadata["allow"] = decision["allow"]
