"""KFP face of gate_release."""

from kfp import dsl

from fedemb.documents.artifacts import Public
from fedemb.runtime.step import Rights, step


@step(
    image="light",
    private=False,
    outputs={"verdict": Public, "verdict_page": Public, "lineage": Public},
    rights=Rights(ledger="read", signing=("gate",)),
)
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
    verdict_page: dsl.Output[dsl.Markdown],
    lineage: dsl.Output[dsl.Artifact],
):
    """Recomputes, compares, and allows the release or raises."""
    from fedemb.runtime.step import step_process
    from fedemb.steps.gate_release.gate import run

    with step_process("gate_release", locals()) as context:
        decision = run(context)
        verdict.metadata["allow"] = decision["allow"]
