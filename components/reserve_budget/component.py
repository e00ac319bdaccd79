"""KFP face of reserve_budget."""

from kfp import dsl

from fedemb.documents.artifacts import Public
from fedemb.runtime.step import Rights, step


@step(
    image="light",
    private=False,
    outputs={"reservation": Public},
    rights=Rights(
        input=("names",),
        ledger="append",
        signing=("ledger",),
        keys={
            "ledger": "create",
            "policy": "create",
            "reservation": "create",
        },
        rollback_anchor="append",
    ),
)
def reserve_budget(
    config: str,
    run_id: str,
    ledger: str,
    keys: str,
    privacy_plan: dsl.Input[dsl.Artifact],
    pretrained: dsl.Input[dsl.Model],
    reservation: dsl.Output[dsl.Artifact],
):
    """Charges the ledger before the first private byte is read, or refuses."""
    from fedemb.runtime.step import step_process
    from fedemb.steps.reserve_budget.reserve import run

    with step_process("reserve_budget", locals()) as context:
        entry = run(context)
        reservation.metadata.update(sequence=entry["sequence"], policy=entry["policy_id"])
