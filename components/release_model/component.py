"""KFP face of release_model."""

from kfp import dsl

from fedemb.steps.step import step


@step("cpu")
def release_model(
    config: str,
    ledger: str,
    keys: str,
    releases: str,
    privacy_plan: dsl.Input[dsl.Artifact],
    reservation: dsl.Input[dsl.Artifact],
    users: dsl.Input[dsl.Dataset],
    pretrained: dsl.Input[dsl.Model],
    model: dsl.Input[dsl.Model],
    privacy_report: dsl.Input[dsl.Artifact],
    audit_report: dsl.Input[dsl.Artifact],
    utility_report: dsl.Input[dsl.Artifact],
    verdict: dsl.Input[dsl.Artifact],
    release: dsl.Output[dsl.Artifact],
):
    """Verifies again, then publishes the signed bundle by exclusive create."""
    from pathlib import Path

    from fedemb.config import RunConfig
    from fedemb.steps.release_model.release import run
    from fedemb.steps.step import step_process

    with step_process("release_model"):
        published = run(
            RunConfig.model_validate_json(config),
            verdict_path=Path(verdict.path),
            model_dir=Path(model.path),
            pretrained_dir=Path(pretrained.path),
            users_manifest_path=Path(users.path),
            report_path=Path(privacy_report.path),
            audit_path=Path(audit_report.path),
            utility_path=Path(utility_report.path),
            plan_path=Path(privacy_plan.path),
            reservation_path=Path(reservation.path),
            ledger_uri=ledger,
            keys_uri=keys,
            releases_uri=releases,
            release_path=Path(release.path),
        )
        release.metadata.update(
            published_at=published["uri"] or "", bundle_sha=published["bundle_sha"] or ""
        )
