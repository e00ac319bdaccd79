"""KFP face of train_dp_fedemb."""

from kfp import dsl

from fedemb.steps.step import step


@step("trainer")
def train_dp_fedemb(
    config: str,
    run_id: str,
    private_root: str,
    ledger: str,
    keys: str,
    privacy_plan: dsl.Input[dsl.Artifact],
    reservation: dsl.Input[dsl.Artifact],
    users: dsl.Input[dsl.Dataset],
    pretrained: dsl.Input[dsl.Model],
    model: dsl.Output[dsl.Model],
):
    """Runs the private rounds; the output is the noised backbone and its public round log."""
    from pathlib import Path

    from fedemb.config import RunConfig
    from fedemb.steps.step import step_process
    from fedemb.steps.train_dp_fedemb.train import run

    with step_process("train_dp_fedemb", private=True):
        card = run(
            RunConfig.model_validate_json(config),
            plan_path=Path(privacy_plan.path),
            reservation_path=Path(reservation.path),
            users_manifest_path=Path(users.path),
            pretrained_dir=Path(pretrained.path),
            private_root=private_root,
            run_id=run_id,
            ledger_uri=ledger,
            keys_uri=keys,
            model_dir=Path(model.path),
        )
        model.metadata.update(weights_sha=card["weights_sha"], rounds_run=card["rounds_run"])
