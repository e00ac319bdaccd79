"""KFP face of evaluate_embeddings."""

from kfp import dsl

from fedemb.documents.artifacts import Public
from fedemb.runtime.step import Rights, step


@step(
    image="trainer",
    task="embedding",
    resources="embed",
    outputs={
        "utility_report": Public,
        "utility_page": Public,
        "metrics": Public,
        "roc": Public,
    },
    rights=Rights(
        private={"evaluation": "read", "users": "read"},  # users: the baseline of a simulation
        ledger="append",  # each evaluation is a record
        signing=("evaluate",),
        keys={"policy": "read"},  # checks evaluation people against their commitment
        releases="read",
    ),
)
def evaluate_embeddings(
    config: str,
    run_id: str,
    private_root: str,
    ledger: str,
    keys: str,
    users: dsl.Input[dsl.Dataset],
    pretrained: dsl.Input[dsl.Model],
    model: dsl.Input[dsl.Model],
    utility_report: dsl.Output[dsl.Artifact],
    utility_page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    roc: dsl.Output[dsl.ClassificationMetrics],
):
    """Measures verification and retrieval on identities that never trained."""
    from fedemb.reports.headline import utility_figures
    from fedemb.runtime.step import step_process
    from fedemb.steps.evaluate_embeddings.evaluate import run

    with step_process("evaluate_embeddings", locals()) as context:
        report = run(context).body
        for rate, recall in report.recall_at_far.items():
            metrics.log_metric(f"recall_at_far_{rate}", recall.value)
        for name, value in utility_figures(report).items():
            metrics.log_metric(name, value)
        if report.measured:
            roc.log_roc_curve(report.roc.far, report.roc.recall, report.roc.threshold)
        utility_report.metadata["model_sha"] = report.model_sha
