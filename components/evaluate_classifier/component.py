"""KFP face of evaluate_classifier."""

from kfp import dsl

from fedemb.documents.artifacts import Public
from fedemb.runtime.step import Rights, step


@step(
    image="trainer",
    task="classification",
    resources="embed",
    outputs={"utility_report": Public, "utility_page": Public, "metrics": Public},
    rights=Rights(
        private={"evaluation": "read", "users": "read"},  # users: the baseline of a simulation
        ledger="append",
        signing=("evaluate",),
        keys={"policy": "read"},  # checks evaluation people against their commitment
        releases="read",
    ),
)
def evaluate_classifier(
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
):
    """Measures how often the classifier is right on people who never trained."""
    from fedemb.reports.headline import utility_figures
    from fedemb.runtime.step import step_process

    with step_process("evaluate_classifier", locals()) as context:
        # Inside: what TensorFlow writes when it is loaded goes nowhere.
        from fedemb.steps.evaluate_classifier.evaluate import run

        report = run(context).body
        for name, value in utility_figures(report).items():
            metrics.log_metric(name, value)
        utility_report.metadata["model_sha"] = report.model_sha
