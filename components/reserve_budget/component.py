"""KFP face of reserve_budget."""

from kfp import dsl

from fedemb.steps.step import step


@step("light")
def reserve_budget(
    config: str,
    run_id: str,
    ledger: str,
    keys: str,
    privacy_plan: dsl.Input[dsl.Artifact],
    reservation: dsl.Output[dsl.Artifact],
):
    """Charges the ledger before the first private byte is read, or refuses."""
    from pathlib import Path

    from fedemb.config import RunConfig
    from fedemb.steps.reserve_budget.reserve import run
    from fedemb.steps.step import step_process

    with step_process("reserve_budget"):
        entry = run(
            RunConfig.model_validate_json(config),
            plan_path=Path(privacy_plan.path),
            run_id=run_id,
            ledger_uri=ledger,
            keys_uri=keys,
            reservation_path=Path(reservation.path),
        )
        reservation.metadata.update(sequence=entry["sequence"], policy=entry["policy_id"])
