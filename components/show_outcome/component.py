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
    outcome: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
    verdict: dsl.Output[dsl.Artifact],
):
    """Shows how the run ended: verdict, figures and every reason. It decides nothing."""
    from fedemb.runtime.step import step_process
    from fedemb.steps.show_outcome.outcome import run

    with step_process("show_outcome", locals()) as context:
        for name, value in run(context, uri=outcome.uri, state=status.state).items():
            metrics.log_metric(name, value)
