"""KFP face of show_outcome."""

from kfp import dsl

from fedemb.documents.artifacts import Public
from fedemb.runtime.step import step


@step(
    image="light",
    private=False,
    outputs={"outcome": Public, "summary": Public, "metrics": Public, "verdict": Public},
)
def show_outcome(
    status: dsl.PipelineTaskFinalStatus,
    run_id: str,
    reused: str,
    mlflow: str,
    purpose: str,
    task: str,
    policy: str,
    mechanism: str,
    data: str,
    partition: str,
    model: str,
    pretraining: str,
    training: str,
    seed: int,
    tuning: str,
    evaluation: str,
    audit: str,
    release: str,
    outcome: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
    verdict: dsl.Output[dsl.Artifact],
):
    """Shows how the run ended: verdict, figures and every reason. It decides nothing."""
    from fedemb.runtime.step import step_process
    from fedemb.steps.show_outcome.outcome import Started, run

    # Parameters that are not a valid configuration end a run; this step shows that too.
    started = Started.of(locals())
    outputs = {"outcome": outcome, "summary": summary, "metrics": metrics, "verdict": verdict}
    with step_process("show_outcome", outputs) as context:
        for name, value in run(context, started, uri=outcome.uri, state=status.state).items():
            metrics.log_metric(name, value)
