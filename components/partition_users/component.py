"""KFP face of partition_users."""

from kfp import dsl

from fedemb.steps.step import step


@step("cpu")
def partition_users(
    config: str,
    run_id: str,
    private_root: str,
    keys: str,
    beam_options: list,
    reservation: dsl.Input[dsl.Artifact],
    users: dsl.Output[dsl.Dataset],
):
    """Validates images, splits users, hashes them into virtual clients; the output is a manifest.

    The users themselves stay below the private root.
    """
    from pathlib import Path

    from fedemb.config import RunConfig
    from fedemb.steps.partition_users.partition import run
    from fedemb.steps.step import step_process

    with step_process("partition_users", private=True):
        manifest = run(
            RunConfig.model_validate_json(config),
            reservation_path=Path(reservation.path),
            private_root=private_root,
            run_id=run_id,
            keys_uri=keys,
            manifest_path=Path(users.path),
            pipeline_options=beam_options,
        )
        users.metadata.update(virtual_clients=manifest["virtual_clients"])
