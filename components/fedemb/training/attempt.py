"""One attempt at a training: from a reservation and users to a noised model and its round log.

    bind -> [ sample, load -> records of the units -> clip, exact sum -> noise -> record
              -> server step -> checkpoint ] x rounds -> model -> commit

What a unit brings to a round is the step's: local training (`train_dp_fedemb`) or a mean gradient
(`train_dp_sgd`). All else is here, once.

Kill it at any moment: a committed round is replayed from its record, an uncommitted one never left
the process. The working state is `<private_root>/<run_id>/train/attempt-<n>/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedemb.config import RunConfig, TrainingConfig
from fedemb.config.digest import config_digest
from fedemb.documents.model import ModelCard
from fedemb.documents.plan_document import read_plan
from fedemb.documents.users import UsersManifest
from fedemb.engine.audit.round_audit import AttemptKeys
from fedemb.engine.hosts import connect, several
from fedemb.engine.rounds import assign_weights
from fedemb.engine.server import ServerState, released_weights
from fedemb.engine.threads import accelerators, configure_threads
from fedemb.engine.training_round import TrainingRound
from fedemb.engine.vectorized_rounds import VectorizedRounds
from fedemb.errors import ConfigError, PlanMismatch, Refused
from fedemb.foundation.canonical_json import canonical_json, json_digest, sha256_hex, strict_json
from fedemb.foundation.document import Written, parse
from fedemb.foundation.files import remove_leftovers, write_bytes
from fedemb.keys import commitment_key, reservation_key_name
from fedemb.keys.signatures import Signer, write_signed
from fedemb.ledger import Reservation
from fedemb.models.backbones import trainable_variables
from fedemb.models.keras_backend import use_backend
from fedemb.models.loading import load_backbone, save_backbone
from fedemb.models.standardized import plain_form
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.queries import KeylessMechanism, build_mechanism
from fedemb.runtime.private_inputs import open_private
from fedemb.runtime.provenance import code_digest
from fedemb.runtime.signed_inputs import read_reserved, read_start, read_users
from fedemb.runtime.step_context import StepContext
from fedemb.storage import Store, open_store
from fedemb.storage.fencing import FencedStore, FencingToken
from fedemb.training import checkpoint
from fedemb.training.averages import write_averages
from fedemb.training.claim import claim
from fedemb.training.round_log import RoundLog
from fedemb.training.signed_state import Origin, SignedState
from fedemb.training.train_job import hosts_of_the_step
from fedemb.training.trainer import Attempt, Trained

_INJECTED = "key_injected"
"""Lies in the working state once a round may have been drawn from a key that was handed in."""
_CARD = "model.json"
"""The model card as it was first signed."""
_EVIDENCE = "evidence.json"
"""Whether the priced mechanism ran, written once training is over and while its key exists."""
_NO_EVIDENCE = {"mechanism_audit": None, "independence": None}
"""Of a training without noise."""

Rounds = Callable[[RunConfig, Any, Any, int, Sequence[str] | None], tuple[TrainingRound, Any]]
"""From configuration, backbone, mechanism, workers and devices: the rounds, and the frozen trunk
whose features they take in place of images, or None."""


def run_attempt(
    context: StepContext,
    step: str,
    rounds: Rounds | None,
    train: Callable[[Attempt], Trained],
    root_key: bytes | None = None,
) -> dict[str, Any]:
    """Trains, or goes on where a killed trainer of the same attempt stopped.

    Args:
      context: reads `privacy_plan`, `reservation`, `users`, `pretrained` and the users in the
        private root; writes `model`: `backbone.keras`, `rounds.jsonl` and `model.json`. Noised.
        Of a classifier also `averages`, see `write_averages`. Noised.
      step: name of the step that trains.
      rounds: builds the rounds, which are rehearsed before the attempt is bound. None: they depend
        on private data, and `train` builds them.
      train: runs the rounds that are not committed yet, and two of them again.
      root_key: 32 bytes that coins and noise are drawn from, for an experiment that is to be
        repeated to the bit. Whoever knows them can take the noise off, so only a simulation takes
        them, and `model.json` tells. None takes the secret key of the reservation.

    Returns:
      The content of `model.json`.

    Raises:
      ConfigError: a release run was given a root key, or the rounds cannot be built.
      PlanMismatch: plan, reservation, users, code or working state do not belong together.
      SignatureInvalid: plan, users, public start or working state are not signed by the steps that
        write them.
      Refused: the attempt trains with another private root, or a record would depend on its
        neighbours.
      StorageError: a host of the job was lost; resume.
      Superseded: the step was started again meanwhile.
      Interrupted: asked to stop; the current round is finished and kept.
    """
    config, run_id, artifacts = context.config, context.run_id, context.artifacts
    _check_key(config, root_key)
    plan, plan_document = read_plan(artifacts.privacy_plan, config)
    reservation = Reservation.of_document(read_reserved(context).body)
    keys, ledger = context.keys, context.writable_ledger
    ledger.chain.trust.check(plan_document, at=reservation.sequence)
    users, initial_sha = read_users(context), read_start(context).weights_sha
    _check_inputs(config, plan, reservation, users, run_id)
    inputs_sha = _inputs_sha(plan, reservation, users, initial_sha)
    commitments = commitment_key(keys, config.policy.policy_id)
    with _on_backend(config.training) as (workers, devices):
        backbone = load_backbone(artifacts.pretrained / "backbone.keras", config.model)
        parts = (config, backbone, KeylessMechanism(plan), workers, devices)
        rehearsed = rounds and _rehearsed(run_id, config, lambda: rounds(*parts))
        store = open_store(context.private("train", f"attempt-{reservation.attempt}"))
        ledger.bind(
            reservation,
            inputs_sha=inputs_sha,
            commitments=users.commitments.model_dump(),
            private_root=claim(store, commitments),
            keys=keys,
        )
        turn, trust = FencingToken(store.uri, step), ledger.chain.trust
        signer = Signer.current(keys, "trainer", trust)
        store = SignedState(
            store,
            turn,
            Origin(run_id, reservation.attempt, inputs_sha),
            signer,
            trust,
            reservation.sequence,
        )
        log = RoundLog(store, inputs_sha)
        finished = checkpoint.load(store, inputs_sha)
        if finished is not None and store.exists(_EVIDENCE):
            state = finished.state  # killed between the last round and the last act
            _release(config, backbone, state)
        else:
            if root_key is None:
                root_key = keys.fetch(reservation_key_name(run_id, reservation.attempt))
            else:
                store.write(_INJECTED, b"")  # before its first round, and for good
            attempt_keys = AttemptKeys(root_key, run_id, reservation.attempt, inputs_sha)
            with open_private(context, "users", attempt=reservation.attempt) as folder:
                mechanism = build_mechanism(plan, **vars(attempt_keys))
                attempt = Attempt(
                    config=config,
                    backbone=backbone,
                    mechanism=mechanism,
                    rounds=rehearsed and _with(mechanism, *rehearsed),
                    keys=attempt_keys,
                    users=folder,
                    store=store,
                    log=log,
                    diagnostics=FencedStore(open_store(context.private("diagnostics")), turn),
                    workers=workers,
                    devices=devices,
                )
                trained = train(attempt)
            state, audit = trained.state, trained.audit
            released = _release(config, backbone, state)
            evidence = audit and audit.evidence(released, config.policy.delta)
            store.write(_EVIDENCE, canonical_json(evidence or _NO_EVIDENCE))

    plain = plain_form(backbone)
    fields = {
        "run_id": run_id,
        "attempt": reservation.attempt,
        "config_sha": reservation.config_sha,
        "plan_sha": plan.digest,
        "code_sha": reservation.code_sha,
        "inputs_sha": inputs_sha,
        "initial_weights_sha": initial_sha,
        "weights_sha": save_backbone(plain, artifacts.model / "backbone.keras"),
        "key_injected": store.exists(_INJECTED),
        "rounds_run": state.rounds,
        **strict_json(store.read(_EVIDENCE), _EVIDENCE),
        "backbone": config.model.backbone,
        "embedding_dim": config.model.embedding_dim,
        "tensors": [{"name": v.path, "shape": list(v.shape)} for v in plain.weights],
    }
    lines = log.lines(state.rounds)
    write_bytes(artifacts.model / "rounds.jsonl", lines)
    card = _signed_card(store, ModelCard.of_fields(fields), artifacts.model / "model.json", signer)
    write_averages(artifacts, config, backbone, state=state, card=card.body, signer=signer)
    turn.check()
    remove_leftovers(artifacts.model)  # nothing but the model's files may lie there
    # The last act: from here on nothing may be computed under this reservation.
    ledger.commit(
        reservation,
        rounds_started=state.rounds,
        round_log_sha=sha256_hex(lines),
        card_sha=card.sha,
        signer=signer,
        keys=keys,
    )
    return card.json


def _inputs_sha(
    plan: MechanismPlan, reservation: Reservation, users: UsersManifest, initial_sha: str
) -> str:
    """Digest of all that goes in: with anything else the coins and the noise are others."""
    return json_digest(
        {
            "plan_sha": plan.digest,
            "config_sha": reservation.config_sha,
            "initial_weights_sha": initial_sha,
            "data_commitment": users.commitments.users,
            "code_sha": reservation.code_sha,
        }
    )


def _rehearsed(
    run_id: str, config: RunConfig, build: Callable[[], tuple[TrainingRound, Any]]
) -> tuple[TrainingRound, Any]:
    """The rounds, shown on generated records to be able to train.

    Nothing is bound yet, so the charge of a run whose rounds are refused can be given back.
    """
    try:
        function, trunk = build()
        function.mechanism.require_drawable(function.dim)
        alone = config.training.backend == "tensorflow" or not several()
        if isinstance(function, VectorizedRounds) and alone:
            function.rehearse()
    except (ConfigError, Refused) as error:
        raise type(error)(
            f"{error}. No private image was read: `fedemb ledger void` gives the charge of "
            f"{run_id} back, if this was its first start"
        ) from error
    return function, trunk


def _with(mechanism: Any, function: TrainingRound, trunk: Any) -> tuple[TrainingRound, Any]:
    """Rehearsed rounds under the mechanism that has the keys; what they compute stays the same."""
    function.mechanism = mechanism
    return function, trunk


@contextmanager
def _on_backend(training: TrainingConfig) -> Iterator[tuple[int, list[str] | None]]:
    """Settles the backend and calls the other hosts; gives workers and devices of TensorFlow."""
    use_backend(training.backend)
    if training.backend == "tensorflow":
        yield configure_threads(training.parallel_clients), accelerators()
        return
    with hosts_of_the_step() as place:
        if not connect(place):
            raise ConfigError(
                "this process is not the chief of its job, and only the chief trains; run python "
                "-m fedemb.training.hosts here"
            )
        yield 1, None


def _release(config: RunConfig, backbone: Any, state: ServerState) -> np.ndarray:
    """Puts the weights that are released into the backbone; returns them as they lie there."""
    variables = trainable_variables(backbone, config.model.trainable)
    assign_weights(variables, released_weights(config.training.server, state))
    return np.concatenate([variable.numpy().ravel() for variable in variables])


def _signed_card(store: Store, card: ModelCard, path: Path, signer: Signer) -> Written[ModelCard]:
    """Writes the card as a trainer of the attempt first signed it.

    The commit names these very bytes, and the trainer's key may have been rotated since.
    """
    if store.exists(_CARD):
        kept = parse(store.read(_CARD), ModelCard, _CARD)
        if kept.body == card:
            write_bytes(path, kept.data)
            return kept
    signed = write_signed(path, card, signer)
    store.write(_CARD, signed.data)
    return signed


def _check_key(config: RunConfig, root_key: bytes | None) -> None:
    if root_key is not None and config.purpose != "simulation":
        raise ConfigError(
            "a root key was handed in, and who knows it can take the noise off again; set purpose: "
            "simulation, or leave root_key out and let the run take the key of its reservation"
        )


def _check_inputs(
    config: RunConfig,
    plan: MechanismPlan,
    reservation: Reservation,
    users: UsersManifest,
    run_id: str,
) -> None:
    wanted = {
        "reservation.run_id": (reservation.run_id, run_id),
        "reservation.plan_sha": (reservation.plan_sha, plan.digest),
        "reservation.config_sha": (reservation.config_sha, config_digest(config)),
        "reservation.code_sha": (reservation.code_sha, code_digest(config)),
        "users.run_id": (users.run_id, run_id),
        "users.config_sha": (users.config_sha, config_digest(config)),
        "users.blocks": (sorted(users.blocks), sorted(reservation.blocks)),
    }
    for name, (found, expected) in wanted.items():
        if found != expected:
            raise PlanMismatch(
                f"{name} is {found}, expected {expected}: this is not what was planned and "
                "reserved; start a run with a new id"
            )
