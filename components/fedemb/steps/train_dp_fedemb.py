"""The private rounds of DP-FedEmb: virtual clients train locally, their updates are summed."""

from kfp import dsl

from fedemb.documents.artifacts import Noised
from fedemb.foundation.canonical_json import JsonObject
from fedemb.runtime.step import Rights, step
from fedemb.runtime.step_context import StepContext


@step(
    image="trainer",
    task="embedding",
    once=True,
    resources="train",
    outputs={"model": Noised},
    rights=Rights(
        private={"users": "read", "train": "write", "diagnostics": "write"},
        ledger="append",
        signing=("ledger", "trainer"),
        keys={"policy": "read", "reservation": "destroy"},
    ),
)
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
    from fedemb.runtime.step import step_process

    with step_process("train_dp_fedemb", locals()) as context:
        from fedemb.steps.train_dp_fedemb import run

        card = run(context)
        model.metadata.update(weights_sha=card["weights_sha"], rounds_run=card["rounds_run"])


def run(context: StepContext, *, root_key: bytes | None = None) -> JsonObject:
    """Trains the attempt, see `algorithms.run`; the late import drops TensorFlow's messages."""
    from fedemb.training.trainer import run

    return run(context, "train_dp_fedemb", root_key=root_key)
