"""The private rounds of DP-FedEmb or DP-SGD.

DP-FedEmb: virtual clients train locally, and their updates are summed. DP-SGD: one mean gradient
per unit (docs/explanation/dp_sgd.md).
"""

from kfp import dsl

from fedemb.documents.artifacts import Noised
from fedemb.foundation.canonical_json import JsonObject
from fedemb.runtime.step import Rights, step
from fedemb.runtime.step_context import StepContext


@step(
    image="trainer",
    once=True,
    resources="train",
    outputs={"model": Noised},
    rights=Rights(
        private={"users": "read", "train": "write", "diagnostics": "write"},
        ledger="append",
        signing=("ledger", "trainer"),
        keys={"ledger": "create", "policy": "read", "reservation": "destroy"},
    ),
)
def train_model(
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
    """Runs the private rounds; the output is the noised model and its public round log."""
    from fedemb.runtime.step import step_process

    with step_process("train_model", locals()) as context:
        from fedemb.steps.train_model import run

        card = run(context)
        model.metadata.update(weights_sha=card["weights_sha"], rounds_run=card["rounds_run"])


def run(context: StepContext, *, root_key: bytes | None = None) -> JsonObject:
    """Trains the attempt, see `trainer.run`; the late import drops TensorFlow's messages."""
    from fedemb.training.trainer import run

    return run(context, root_key=root_key)
