"""KFP face of delete_expired."""

from kfp import dsl

from fedemb.documents.artifacts import Public
from fedemb.runtime.step import Rights, step


@step(
    image="light",
    private=False,
    outputs={"deleted": Public, "metrics": Public},
    rights=Rights(
        private={
            "audit": "delete",
            "diagnostics": "delete",
            "evaluation": "delete",
            "partition": "delete",
            "rejects": "delete",
            "train": "delete",
            "users": "delete",
        },
        ledger="read",
    ),
)
def delete_expired(
    private_root: str,
    public_root: str,
    ledger: str,
    retention: str,
    dry_run: bool,
    deleted: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
):
    """Deletes expired private data, working state and public outputs of runs, or lists them."""
    from fedemb.runtime.step import step_process
    from fedemb.steps.delete_expired.sweep import run

    with step_process("delete_expired", locals()) as context:
        for name, value in run(context).items():
            metrics.log_metric(name, value)
