"""Trains one attempt: from a reservation and users to a noised model and its round log.

    bind -> [ sample, load -> records of the units -> clip, exact sum -> noise -> record
              -> server step -> checkpoint ] x rounds -> model -> commit

The step defines the record of a unit in a round: local training (`train_dp_fedemb`) or a mean
gradient (`train_dp_sgd`). This module implements everything else.

The process may be killed at any time: a committed round is replayed from its record, and an
uncommitted round never left the process.
"""

# Keras is not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple

import numpy as np

from fedemb.config import RunConfig, TrainingConfig
from fedemb.documents.model import ModelCard
from fedemb.documents.run_artifacts import RunArtifacts
from fedemb.engine.hosts import connect, is_multi_host
from fedemb.engine.rounds import assign_weights
from fedemb.engine.server import ServerState, released_weights
from fedemb.engine.threads import accelerators, configure_threads
from fedemb.engine.training_round import TrainingRound
from fedemb.engine.vectorized_rounds import VectorizedRounds
from fedemb.errors import ConfigError, Refused
from fedemb.foundation.canonical_json import JsonObject, canonical_json, json_object
from fedemb.foundation.document import Written
from fedemb.foundation.files import remove_leftovers, write_bytes
from fedemb.models.arrays import Model
from fedemb.models.backbones import trainable_variables
from fedemb.models.keras_backend import load_keras, use_backend
from fedemb.models.loading import load_backbone, save_backbone
from fedemb.models.standardized import plain_form
from fedemb.privacy.queries import KeylessMechanism, Mechanism, build_mechanism
from fedemb.runtime.private_inputs import open_private
from fedemb.runtime.step_context import StepContext
from fedemb.storage import open_store
from fedemb.storage.fencing import FencedStore
from fedemb.training import checkpoint
from fedemb.training.attempt_inputs import AttemptInputs
from fedemb.training.bound_attempt import BoundAttempt
from fedemb.training.feature_caches import FeatureCaches
from fedemb.training.train_job import hosts_of_the_step
from fedemb.training.trainer import Attempt, Rounds, Trained, Unit

_EVIDENCE = "evidence.json"
"""Name of the mechanism evidence, written after training while the key exists."""
_NO_EVIDENCE: JsonObject = {"mechanism_audit": None}
"""Evidence of a training without noise."""


class Workers(NamedTuple):
    """Parallel workers of TensorFlow; JAX uses all devices."""

    number: int
    """Virtual clients or micro-batches computed in parallel."""
    devices: Sequence[str] | None
    """Devices for the workers, see `RoundFunction`."""


BuildRounds = Callable[[RunConfig, Model, Mechanism, int, Sequence[str] | None], Rounds[Unit]]
"""Builds the rounds from configuration, backbone, mechanism, workers and devices."""


def run_attempt(
    context: StepContext,
    step: str,
    build_rounds: BuildRounds[Unit] | None,
    train: Callable[[Attempt[Unit]], Trained],
    root_key: bytes | None = None,
) -> JsonObject:
    """Trains an attempt, or resumes it after its trainer was killed.

    Args:
      context: reads `privacy_plan`, `reservation`, `users`, `pretrained` and the private users;
          writes `model`, which is noised.
      step: name of the training step.
      build_rounds: builds the rounds, which are rehearsed before the attempt is bound. None if the
          rounds depend on private data; then `train` builds them.
      train: runs the rounds that are not committed yet, and recomputes two of them.
      root_key: 32 bytes that seed coins and noise, for a bit-exact repeatable experiment. Anyone
          with the key can remove the noise, so only a simulation accepts it, and `model.json`
          records it. None uses the secret key of the reservation.

    Returns: The content of `model.json`.

    Raises:
      ConfigError: a release run was given a root key, or the rounds cannot be built.
      PlanMismatch: plan, reservation, users, code or working state do not match.
      SignatureInvalid: plan, users, public backbone or working state are not signed by the steps
          that write them.
      Refused: the attempt trains with another private root, or a record would depend on other
          records.
      StorageError: a host of the job was lost; resume.
      Superseded: the step was started again meanwhile.
      Interrupted: a stop was requested; the current round is completed and saved.
    """
    _check_key(context.config, root_key)
    inputs = AttemptInputs.read(context)
    with _workers(inputs.config.training) as workers:
        finished = _Training(
            context=context,
            step=step,
            inputs=inputs,
            build_rounds=build_rounds,
            train=train,
            root_key=root_key,
            workers=workers,
        ).finished()
    return _publish(context.artifacts, finished)


class _Finished(NamedTuple):
    """A training whose rounds are all committed."""

    bound: BoundAttempt
    """The attempt."""
    backbone: Model
    """Backbone of the trained model."""
    state: ServerState
    """State after the last round."""


@dataclass(frozen=True, kw_only=True)
class _Training(Generic[Unit]):
    """Training of an attempt; fields as in `run_attempt`."""

    context: StepContext
    step: str
    inputs: AttemptInputs
    build_rounds: BuildRounds[Unit] | None
    train: Callable[[Attempt[Unit]], Trained]
    root_key: bytes | None
    workers: Workers

    def finished(self) -> _Finished:
        """Runs all rounds that are not committed yet."""
        started = self._rehearsed()
        bound = BoundAttempt.bind(self.context, self.step, self.inputs)
        features = FeatureCaches(bound.store, self.inputs.inputs_sha)
        state = self._state(bound, started, features)
        features.delete()
        return _Finished(bound, started[0], state)

    def _started(self) -> tuple[Model, Rounds[Unit] | None]:
        """Returns the public backbone and the rounds that train it."""
        config = self.inputs.config
        path = self.context.artifacts.pretrained / "backbone.keras"
        backbone = load_backbone(path, config.model)
        if self.build_rounds is None:
            return backbone, None
        mechanism = KeylessMechanism(self.inputs.plan)
        return backbone, self.build_rounds(config, backbone, mechanism, *self.workers)

    def _rehearsed(self) -> tuple[Model, Rounds[Unit] | None]:
        """Returns `_started`, with rounds that were rehearsed on generated records.

        The attempt is not bound yet, so the charge of a run whose rounds are refused can be
        refunded.
        """
        try:
            backbone, rounds = self._started()
            if rounds is not None:
                _rehearse(rounds[0], self.inputs.config.training)
        except (ConfigError, Refused) as error:
            raise type(error)(
                f"{error} No private image was read. If this was the first start of the run, "
                f"refund its charge: fedemb ledger void {self.inputs.run_id}"
            ) from error
        return backbone, rounds

    def _state(
        self,
        bound: BoundAttempt,
        started: tuple[Model, Rounds[Unit] | None],
        features: FeatureCaches,
    ) -> ServerState:
        """Returns the last state; trains with the attempt's keys if that was not done before."""
        state = _last_state(bound)
        if state is not None:
            return state
        inputs, keys = bound.inputs, bound.attempt_keys(self.root_key)
        backbone, rounds = started
        diagnostics = FencedStore(open_store(self.context.private("diagnostics")), bound.token)
        with open_private(self.context, "users", attempt=inputs.reservation.attempt) as folder:
            trained = self.train(
                Attempt(
                    config=inputs.config,
                    backbone=backbone,
                    mechanism=build_mechanism(inputs.plan, **vars(keys)),
                    rounds=rounds,
                    keys=keys,
                    users=folder,
                    store=bound.store,
                    log=bound.log,
                    features=features,
                    diagnostics=diagnostics,
                    workers=self.workers.number,
                    devices=self.workers.devices,
                )
            )
        released = _release(inputs.config, backbone, trained.state)
        evidence = trained.audit and trained.audit.evidence(released)
        bound.store.write(_EVIDENCE, canonical_json(evidence or _NO_EVIDENCE))
        return trained.state


def _publish(artifacts: RunArtifacts, finished: _Finished) -> JsonObject:
    """Writes the model and its public round log, and commits the attempt; returns the card."""
    bound, backbone, state = finished
    _release(bound.inputs.config, backbone, state)
    lines = bound.log.lines(state.rounds)
    write_bytes(artifacts.model / "rounds.jsonl", lines)
    card = _write_model(artifacts, finished)
    bound.token.check()
    remove_leftovers(artifacts.model)  # the folder must contain only the model's files
    bound.commit(state.rounds, lines, card.sha)
    return card.json


def _last_state(bound: BoundAttempt) -> ServerState | None:
    """Returns the last state if an earlier trainer was killed between last round and commit."""
    finished = checkpoint.load(bound.store, bound.inputs.inputs_sha)
    return finished.state if finished and bound.store.exists(_EVIDENCE) else None


def _write_model(artifacts: RunArtifacts, finished: _Finished) -> Written[ModelCard]:
    """Writes model and card; returns the card. See `_publish`."""
    bound, backbone, state = finished
    inputs, plain = bound.inputs, plain_form(backbone)
    config, reservation = inputs.config, inputs.reservation
    fields = {
        "run_id": inputs.run_id,
        "attempt": reservation.attempt,
        "config_sha": reservation.config_sha,
        "plan_sha": inputs.plan.digest,
        "code_sha": reservation.code_sha,
        "inputs_sha": inputs.inputs_sha,
        "initial_weights_sha": inputs.initial_weights_sha,
        "weights_sha": save_backbone(plain, artifacts.model / "backbone.keras"),
        "key_injected": bound.key_injected,
        "rounds_run": state.rounds,
        **json_object(bound.store.read(_EVIDENCE), _EVIDENCE),
        "backbone": config.model.backbone,
        "embedding_dim": config.model.embedding_dim,
        "tensors": [{"name": v.path, "shape": list(v.shape)} for v in plain.weights],
    }
    return bound.write_card(artifacts.model / "model.json", ModelCard.of_fields(fields))


def _rehearse(function: TrainingRound[Unit], training: TrainingConfig) -> None:
    """Checks that the noise can be drawn, and that a record does not depend on other records."""
    function.mechanism.require_drawable(function.dim)
    one_host = training.backend == "tensorflow" or not is_multi_host()
    if isinstance(function, VectorizedRounds) and one_host:
        function.rehearse()


@contextmanager
def _workers(training: TrainingConfig) -> Generator[Workers]:
    """Sets up the backend and connects the other hosts."""
    use_backend(training.backend)
    load_keras()
    if training.backend == "tensorflow":
        yield Workers(configure_threads(training.parallel_clients), accelerators())
        return
    with hosts_of_the_step() as host:
        if not connect(host):
            raise ConfigError(
                "This process is not the chief of its job, and only the chief trains. Run "
                "`python -m fedemb.training.hosts` here."
            )
        yield Workers(1, None)


def _release(config: RunConfig, backbone: Model, state: ServerState) -> np.ndarray:
    """Sets the released weights in the backbone and returns them as stored there."""
    variables = trainable_variables(backbone, config.model.trainable)
    assign_weights(variables, released_weights(config.training.server, state))
    return np.concatenate([variable.numpy().ravel() for variable in variables])


def _check_key(config: RunConfig, root_key: bytes | None) -> None:
    if root_key is not None and config.purpose != "simulation":
        raise ConfigError(
            "A root key was passed to a run that is not a simulation, and anyone with the key can "
            "remove the noise. Set purpose: simulation, or leave root_key out to use the secret "
            "key of the reservation."
        )
