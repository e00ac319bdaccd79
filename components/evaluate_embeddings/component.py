"""KFP face of evaluate_embeddings."""

from kfp import dsl

from fedemb.steps.step import step


@step("trainer")
def evaluate_embeddings(
    config: str,
    run_id: str,
    private_root: str,
    users: dsl.Input[dsl.Dataset],
    pretrained: dsl.Input[dsl.Model],
    model: dsl.Input[dsl.Model],
    utility_report: dsl.Output[dsl.Artifact],
    utility_page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    roc: dsl.Output[dsl.ClassificationMetrics],
):
    """Measures verification and retrieval on identities that never trained."""
    from pathlib import Path

    from fedemb.config import RunConfig
    from fedemb.steps.evaluate_embeddings.evaluate import run
    from fedemb.steps.step import step_process

    with step_process("evaluate_embeddings", private=True):
        report = run(
            RunConfig.model_validate_json(config),
            model_dir=Path(model.path),
            pretrained_dir=Path(pretrained.path),
            users_manifest_path=Path(users.path),
            private_root=private_root,
            run_id=run_id,
            report_path=Path(utility_report.path),
            html_path=Path(utility_page.path),
        )
        for rate, recall in report["recall_at_far"].items():
            metrics.log_metric(f"recall_at_far_{rate}", recall["value"])
        if report["measured"]:
            curve = report["roc"]
            roc.log_roc_curve(curve["far"], curve["recall"], curve["threshold"])
        utility_report.metadata["model_sha"] = report["model_sha"]
