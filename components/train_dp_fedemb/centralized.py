"""The baseline without privacy: all users' images on one pile, as one round that costs infinity.

Allowed in a simulation alone, under `mechanism.kind: not_private`, so that plan, ledger and report
say what it is: no noise, no bound, epsilon infinite. Same users, images, loss, augmentation and
public start as the private run it stands beside.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from fedemb.config import RunConfig
from fedemb.data.client_data import UserStore, load_examples
from fedemb.embedding.central import train_centralized
from fedemb.embedding.server import ServerState
from fedemb.errors import ConfigError
from fedemb.steps.train_dp_fedemb import checkpoint
from fedemb.steps.train_dp_fedemb.checkpoint import Progress
from fedemb.steps.train_dp_fedemb.rounds import RoundLog
from fedemb.storage import Store


def require_no_privacy(config: RunConfig) -> None:
    """Refuses to train centrally under a plan that promises something.

    Raises:
      ConfigError: not a simulation, a private mechanism, several rounds, or a frozen backbone.
    """
    wanted = {
        "purpose": (config.purpose, "simulation"),
        "mechanism.kind": (config.mechanism.kind, "not_private"),
        "mechanism.rounds": (config.mechanism.rounds, 1),
        "model.trainable": (config.model.trainable, "all"),
    }
    for name, (found, needed) in wanted.items():
        if found != needed:
            raise ConfigError(
                f"training.algorithm=centralized trains all weights in one round without privacy, "
                f"so {name} must be {needed}, got {found}; set it, or set "
                "evaluation.centralized_baseline in a private simulation to compare with it"
            )


def train(
    config: RunConfig, backbone: Any, mechanism: Any, *, users: Path, store: Store, log: RoundLog
) -> ServerState:
    """Trains, or takes the result of an earlier trainer of this attempt from its record.

    Args:
      config: of the run.
      backbone: where training starts; changed.
      mechanism: `privacy.queries.Mechanism` of the attempt, which has no noise.
      users: local folder of the users.
      store: working state of the attempt.
      log: its round records.

    Returns:
      The state after the only round.
    """
    from fedemb.privacy.queries import RoundOutput

    start = _flat(backbone)
    record = log.read(0)
    if record is None:
        pile = UserStore(users)
        images, labels = load_examples(
            pile,
            np.arange(len(pile)),
            max_examples=int(pile.image_counts.sum()),
            image_size=config.model.image_size,
            channels=config.model.channels,
        )
        epochs = config.evaluation.centralized_epochs
        train_centralized(backbone, images, labels, config.training, epochs=epochs)
        moved = _flat(backbone) - start
        digest = hashlib.sha256(moved.tobytes()).hexdigest()
        record = log.commit(0, mechanism, RoundOutput(moved, mechanism.plan.round_event, digest))
    weights, none = start + record.mean, np.zeros(0, np.float32)
    share = np.float32(1.0 - config.training.server.ema_decay)  # the average is of one round
    state = ServerState(weights, np.zeros_like(weights), none, share * weights, float(share), 1)
    checkpoint.save(store, log.inputs_sha, Progress(state, record.mechanism_state))
    return state


def _flat(backbone: Any) -> np.ndarray:
    return np.concatenate([v.numpy().ravel() for v in backbone.trainable_variables])
