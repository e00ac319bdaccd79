"""Writes the weight averages that are evaluated in addition to the released average.

Each average is computed from noised weights only, so it costs no privacy budget. The averages are
stored separately from the model: the gate evaluates, and the bundle contains, only the released
average.
"""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from fedemb.config import RunConfig
from fedemb.documents.model import Averages, ModelCard, average_file
from fedemb.documents.run_artifacts import RunArtifacts
from fedemb.engine.rounds import assign_weights
from fedemb.engine.server import ServerState, released_weights
from fedemb.foundation.files import remove_leftovers
from fedemb.keys.signatures import Signer, write_signed
from fedemb.models.arrays import Model
from fedemb.models.backbones import trainable_variables
from fedemb.models.loading import save_backbone
from fedemb.models.standardized import plain_form


def write_averages(
    artifacts: RunArtifacts,
    config: RunConfig,
    backbone: Model,
    *,
    state: ServerState,
    card: ModelCard,
    signer: Signer,
) -> None:
    """Writes the averages of `training.server.other_ema_decays`, signed, as a list.

    Args:
      artifacts: artifacts of a classifier's training, with `averages`; embeddings have no averages.
      config: configuration of the run.
      backbone: the trained backbone; holds the weights of the last average afterwards.
      state: server state after the last round.
      card: card of the released model.
      signer: signer of the trainer.

    Raises:
      StorageError: the averages cannot be written.
    """
    if config.task != "classification":
        return
    folder, server = artifacts.averages, config.training.server
    variables = trainable_variables(backbone, config.model.trainable)
    others = []
    for number, decay in enumerate(server.other_ema_decays, start=1):
        assign_weights(variables, released_weights(server, state, number))
        sha = save_backbone(plain_form(backbone), folder / average_file(number))
        others.append({"decay": decay, "weights_sha": sha})
    fields = {"run_id": card.run_id, "model_sha": card.weights_sha, "others": others}
    write_signed(folder / "averages.json", Averages.of_fields(fields), signer)
    remove_leftovers(folder)
