"""KFP face of audit_privacy."""

from kfp import dsl

from fedemb.documents.artifacts import Public
from fedemb.runtime.step import Rights, step


@step(
    image="trainer",
    resources="embed",
    outputs={"audit_report": Public, "audit_page": Public},
    rights=Rights(
        private={"users": "read", "evaluation": "read", "audit": "write"},
        ledger="read",
        signing=("audit",),
        keys={"policy": "read"},  # checks users against their commitment
    ),
)
def audit_privacy(
    config: str,
    run_id: str,
    private_root: str,
    ledger: str,
    keys: str,
    users: dsl.Input[dsl.Dataset],
    pretrained: dsl.Input[dsl.Model],
    model: dsl.Input[dsl.Model],
    audit_report: dsl.Output[dsl.Artifact],
    audit_page: dsl.Output[dsl.HTML],
):
    """Attacks the model: can it tell training users from held-out ones?"""
    from fedemb.runtime.step import step_process
    from fedemb.steps.audit_privacy.audit import run

    with step_process("audit_privacy", locals()) as context:
        report = run(context)
        audit_report.metadata.update(level=report["level"], model_sha=report["model_sha"])
