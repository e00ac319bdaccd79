"""The non-private baseline: pooled training on all users' images, as one round without noise.

Allowed only in a simulation, under a mechanism without noise, so that plan, ledger and report state
it: no noise, no bound, epsilon infinite. Users, images, loss, augmentation and public backbone
equal those of the private run that it is compared with.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from fedemb.config import RunConfig
from fedemb.data.client_data import UserStore, load_examples
from fedemb.data.verified_folder import VerifiedFolder
from fedemb.engine.central import train_centralized
from fedemb.engine.rounds import ClientExamples
from fedemb.engine.server import ServerState, initial_state
from fedemb.errors import ConfigError
from fedemb.models.arrays import Model
from fedemb.models.public_features import without_public_features
from fedemb.privacy.queries.running import with_tags
from fedemb.training import checkpoint
from fedemb.training.attempt import Attempt
from fedemb.training.checkpoint import Progress


def require_no_privacy(config: RunConfig) -> None:
    """Rejects pooled training under a plan that claims a guarantee.

    Raises:
      ConfigError: not a simulation, a private mechanism, several rounds, or a frozen backbone.
    """
    wanted = {
        "purpose": (config.purpose, "simulation"),
        "mechanism.kind": (
            config.mechanism.kind,
            "one without noise" if config.mechanism.private else config.mechanism.kind,
        ),
        "mechanism.rounds": (config.mechanism.rounds, 1),
        "model.trainable": (config.model.trainable, "all"),
    }
    for name, (found, needed) in wanted.items():
        if found != needed:
            raise ConfigError(
                f"training.algorithm=centralized needs {name}={needed}, got {found}. Set it. "
                "To compare with a private run, set evaluation.centralized_baseline in a "
                "simulation instead."
            )


def train(attempt: Attempt[ClientExamples], users: VerifiedFolder) -> ServerState:
    """Trains, or reads the result of an earlier trainer of this attempt from its record."""
    from fedemb.privacy.queries import RoundOutput

    config, backbone, log = attempt.config, attempt.backbone, attempt.log
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
        train_centralized(
            without_public_features(backbone), images, labels, config.training, epochs=epochs
        )
        moved = _flat(backbone) - start
        digest = hashlib.sha256(moved.tobytes()).hexdigest()
        output = RoundOutput(moved, attempt.mechanism.plan.round_event, digest)
        record = log.commit(0, attempt.mechanism, output)
    server = config.training.server
    state = replace(initial_state(start), weights=start + record.mean, rounds=1)
    share = np.float32(1.0) - np.float32(server.ema_decay)  # average of one round
    state = replace(state, average=share * state.weights)
    checkpoint.save(attempt.store, Progress(state, with_tags(record.mechanism_state, ())))
    return state


def _flat(backbone: Model) -> np.ndarray:
    return np.concatenate([v.numpy().ravel() for v in backbone.trainable_variables])
