"""Trains one attempt: from a reservation and users to a noised model and its round log.

    bind -> [ sample, load -> records of the units -> clip, exact sum -> noise -> record
              -> server step -> checkpoint ] x rounds -> model -> commit

The step defines the record of a unit in a round: local training (`train_dp_fedemb`) or a mean
gradient (`train_dp_sgd`). This module implements everything else.

The process may be killed at any time: a committed round is replayed from its record, and an
uncommitted round never left the process. The working state is
`<private_root>/<run_id>/train/attempt-<n>/`.
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
"""Marker in the working state: a round may have been drawn from an injected key."""
_CARD = "model.json"
"""Name of the model card as first signed."""
_EVIDENCE = "evidence.json"
"""Name of the mechanism evidence, written after training while the key exists."""
_NO_EVIDENCE = {"mechanism_audit": None, "independence": None}
"""Evidence of a training without noise."""

Rounds = Callable[[RunConfig, Any, Any, int, Sequence[str] | None], tuple[TrainingRound, Any]]
"""Builds the rounds from configuration, backbone, mechanism, workers and devices. Also returns the
frozen trunk whose features replace images, or None."""


def run_attempt(
    context: StepContext,
    step: str,
    rounds: Rounds | None,
    train: Callable[[Attempt], Trained],
    root_key: bytes | None = None,
) -> dict[str, Any]:
    """Trains an attempt, or resumes it after its trainer was killed.

    Args:
      context: reads `privacy_plan`, `reservation`, `users`, `pretrained` and the users in the
          private root; writes `model`: `backbone.keras`, `rounds.jsonl` and `model.json`. Noised.
          For classifiers, also writes `averages`, see `write_averages`. Noised.
      step: name of the training step.
      rounds: builds the rounds, which are rehearsed before the attempt is bound. None if the rounds
          depend on private data; then `train` builds them.
      train: runs the rounds that are not committed yet, and recomputes two of them.
      root_key: 32 bytes that seed coins and noise, for a bit-exact repeatable experiment. Anyone
          with the key can remove the noise, so only a simulation accepts it, and `model.json`
          records it. None uses the secret key of the reservation.

    Returns: The content of `model.json`.
      The content of `model.json`.

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
            state = finished.state  # killed between the last round and the commit
            _release(config, backbone, state)
        else:
            if root_key is None:
                root_key = keys.fetch(reservation_key_name(run_id, reservation.attempt))
            else:
                store.write(_INJECTED, b"")  # before the first round, never deleted
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
    remove_leftovers(artifacts.model)  # the folder must hold only the model's files
    # Last operation: after it, no computation is allowed under this reservation.
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
    """Returns the digest of all inputs; other inputs draw other coins and noise."""
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
    """Builds the rounds and rehearses them on generated records.

    The attempt is not bound yet, so the charge of a run whose rounds are refused can be refunded.
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
    """Returns the rehearsed rounds with the mechanism that has the keys."""
    function.mechanism = mechanism
    return function, trunk


@contextmanager
def _on_backend(training: TrainingConfig) -> Iterator[tuple[int, list[str] | None]]:
    """Sets up the backend and connects the other hosts; yields TensorFlow workers and devices."""
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
    """Sets the released weights in the backbone and returns them as stored there."""
    variables = trainable_variables(backbone, config.model.trainable)
    assign_weights(variables, released_weights(config.training.server, state))
    return np.concatenate([variable.numpy().ravel() for variable in variables])


def _signed_card(store: Store, card: ModelCard, path: Path, signer: Signer) -> Written[ModelCard]:
    """Writes the card exactly as a trainer of the attempt first signed it.

    The commit names these bytes, and the trainer's key may have been rotated since.
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
