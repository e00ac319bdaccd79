"""KFP face of partition_users."""

# pyright: reportMissingTypeArgument=false

from kfp import dsl

from fedemb.documents.artifacts import Public
from fedemb.runtime.step import Rights, step


@step(
    image="cpu",
    once=True,
    resources="data",
    outputs={"users": Public},  # the manifest; the users are in the private root
    rights=Rights(
        private={
            "users": "write",
            "evaluation": "write",
            "rejects": "write",
            "partition": "write",  # its scratch, of which only the record of its starts stays
        },
        input=("private", "public"),
        ledger="read",
        signing=("partition",),
        keys={"policy": "read"},
    ),
)
def partition_users(
    config: str,
    run_id: str,
    private_root: str,
    ledger: str,
    keys: str,
    beam_options: list,
    reservation: dsl.Input[dsl.Artifact],
    users: dsl.Output[dsl.Dataset],
):
    """Validates images, splits users, hashes them into virtual clients; the output is a manifest.

    The users themselves stay below the private root.
    """
    from fedemb.runtime.step import step_process
    from fedemb.steps.partition_users.partition import run

    with step_process("partition_users", locals()) as context:
        manifest = run(context)
        users.metadata.update(virtual_clients=manifest["virtual_clients"])
