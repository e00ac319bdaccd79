"""KFP face of audit_privacy."""

from kfp import dsl

from fedemb.steps.step import step


@step("trainer")
def audit_privacy(
    config: str,
    run_id: str,
    private_root: str,
    users: dsl.Input[dsl.Dataset],
    pretrained: dsl.Input[dsl.Model],
    model: dsl.Input[dsl.Model],
    audit_report: dsl.Output[dsl.Artifact],
    audit_page: dsl.Output[dsl.HTML],
):
    """Attacks the model: can it tell training users from held-out ones?"""
    from pathlib import Path

    from fedemb.config import RunConfig
    from fedemb.steps.audit_privacy.audit import run
    from fedemb.steps.step import step_process

    with step_process("audit_privacy", private=True):
        report = run(
            RunConfig.model_validate_json(config),
            model_dir=Path(model.path),
            pretrained_dir=Path(pretrained.path),
            users_manifest_path=Path(users.path),
            private_root=private_root,
            run_id=run_id,
            report_path=Path(audit_report.path),
            html_path=Path(audit_page.path),
        )
        audit_report.metadata.update(level=report["level"], model_sha=report["model_sha"])
