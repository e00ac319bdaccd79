"""The private rounds: from a reservation and users to a noised backbone and its round log.

    bind -> [ sample, load -> local training -> clip, exact sum -> noise -> record -> server step
              -> checkpoint ] x rounds -> model -> commit

Kill it at any moment: a committed round is replayed from its record, an uncommitted one never left
the process. The working state is `<private_root>/<run_id>/train/attempt-<n>/`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedemb.config import RunConfig
from fedemb.documents.artifacts import (
    canonical_json,
    config_digest,
    json_digest,
    sha256_hex,
    strict_json,
    tree_digest,
    write_bytes,
)
from fedemb.documents.model import ModelCard
from fedemb.documents.users import UsersManifest
from fedemb.embedding.backbones import trainable_variables
from fedemb.embedding.cluster import training_devices
from fedemb.embedding.loading import load_backbone, save_backbone
from fedemb.embedding.round_audit import AttemptKeys
from fedemb.embedding.rounds import assign_weights
from fedemb.embedding.server import ServerState, released_weights
from fedemb.embedding.standardized import plain_form
from fedemb.errors import ConfigError, PlanMismatch
from fedemb.keys import commit_to, commitment_key, reservation_key_name
from fedemb.keys.signatures import Signer, write_signed
from fedemb.ledger import Reservation
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.planning.plan_document import read_plan
from fedemb.provenance import code_digest
from fedemb.signed_inputs import read_reserved, read_start, read_users
from fedemb.step_context import StepContext
from fedemb.steps.train_dp_fedemb import centralized, checkpoint
from fedemb.steps.train_dp_fedemb.claim import claim
from fedemb.steps.train_dp_fedemb.loop import Trainer
from fedemb.steps.train_dp_fedemb.rounds import RoundLog
from fedemb.storage import Store, local_tree, open_store

_INJECTED = "key_injected"
"""Lies in the working state once a round may have been drawn from a key that was handed in."""
_EVIDENCE = "evidence.json"
"""What the audit of the mechanism found, once training is over and while its key exists."""
_LOG = logging.getLogger(__name__)


def run(context: StepContext, *, root_key: bytes | None = None) -> dict[str, Any]:
    """Trains, or goes on where a killed trainer of the same attempt stopped.

    Args:
      context: reads `privacy_plan`, `reservation`, `users`, `pretrained` and the users in the
        private root; writes `model`: `backbone.keras`, `rounds.jsonl` and `model.json`. Noised.
      root_key: 32 bytes that coins and noise are drawn from, for an experiment that is to be
        repeated to the bit. Whoever knows them can take the noise off, so only a simulation takes
        them, and `model.json` tells. None takes the secret key of the reservation.

    Returns:
      The content of `model.json`.

    Raises:
      ConfigError: a release run was given a root key, or an algorithm no guarantee covers.
      PlanMismatch: plan, reservation, users, code or working state do not belong together.
      SignatureInvalid: plan, users or public start are not signed by the steps that write them.
      Refused: the attempt trains with another private root.
      StorageError: a host of the job was lost; resume.
      Interrupted: asked to stop; the round at hand is finished and kept.
    """
    config, run_id, artifacts = context.config, context.run_id, context.artifacts
    _check_algorithm(config)
    _check_key(config, root_key)
    plan, plan_document = read_plan(artifacts.privacy_plan, config)
    reservation = Reservation.of_document(read_reserved(context).body)
    keys, ledger = context.keys, context.writable_ledger
    ledger.chain.trust.check(plan_document, at=reservation.sequence)
    users, initial_sha = read_users(context), read_start(context).weights_sha
    _check_inputs(config, plan, reservation, users, run_id)
    inputs_sha = json_digest(
        {
            "plan_sha": plan.digest,
            "config_sha": reservation.config_sha,
            "initial_weights_sha": initial_sha,
            "data_commitment": users.commitments.users,
            "code_sha": reservation.code_sha,
        }
    )
    commitments = commitment_key(keys, config.policy.policy_id)
    store = open_store(context.private("train", f"attempt-{reservation.attempt}"))
    ledger.bind(
        reservation,
        inputs_sha=inputs_sha,
        commitments=users.commitments.model_dump(),
        private_root=claim(store, commitments),
    )

    workers, devices = training_devices(config.training.parallel_clients)
    log = RoundLog(store, inputs_sha)
    backbone = load_backbone(artifacts.pretrained / "backbone.keras", config.model)
    finished = checkpoint.load(store, inputs_sha)
    if finished is not None and store.exists(_EVIDENCE):
        state = finished.state  # killed between the last round and the last act
        _released(config, backbone, state)
    else:
        if root_key is None:
            root_key = keys.fetch(reservation_key_name(run_id, reservation.attempt))
        else:
            store.write(_INJECTED, b"")  # before its first round, and for good
        attempt = AttemptKeys(root_key, run_id, reservation.attempt, inputs_sha)
        with local_tree(context.private("users")) as folder:
            _check_data(folder, commitments, users)
            state, evidence = _train(
                context,
                backbone,
                plan,
                attempt,
                users=folder,
                store=store,
                log=log,
                workers=workers,
                devices=devices,
            )
        store.write(_EVIDENCE, canonical_json(evidence))
    backbone = plain_form(backbone)
    fields = {
        "run_id": run_id,
        "attempt": reservation.attempt,
        "config_sha": reservation.config_sha,
        "plan_sha": plan.digest,
        "code_sha": reservation.code_sha,
        "inputs_sha": inputs_sha,
        "initial_weights_sha": initial_sha,
        "weights_sha": save_backbone(backbone, artifacts.model / "backbone.keras"),
        "key_injected": store.exists(_INJECTED),
        "rounds_run": state.rounds,
        "mechanism_audit": strict_json(store.read(_EVIDENCE), _EVIDENCE),
        "backbone": config.model.backbone,
        "embedding_dim": config.model.embedding_dim,
        "tensors": [{"name": v.path, "shape": list(v.shape)} for v in backbone.weights],
    }
    lines = log.lines(state.rounds)
    write_bytes(artifacts.model / "rounds.jsonl", lines)
    signer = Signer.current(keys, "trainer", ledger.chain.trust)
    card = write_signed(artifacts.model / "model.json", ModelCard.of_fields(fields), signer)
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


def _train(
    context: StepContext,
    backbone: Any,
    plan: MechanismPlan,
    attempt: AttemptKeys,
    *,
    users: Path,
    store: Store,
    log: RoundLog,
    workers: int,
    devices: Sequence[str] | None,
) -> tuple[ServerState, dict[str, Any] | None]:
    """Runs the rounds and puts the result into the backbone.

    Returns:
      The state after the last round, and what the audit of the mechanism found; None where there is
      no noise.
    """
    from fedemb.privacy.queries import build_mechanism  # TensorFlow, once there is work for it

    config = context.config
    mechanism = build_mechanism(plan, **vars(attempt))
    if config.training.algorithm == "centralized":
        state = centralized.train(config, backbone, mechanism, users=users, store=store, log=log)
        _released(config, backbone, state)
        return state, None
    trainer = Trainer(config, backbone, mechanism, attempt, users, workers=workers, devices=devices)
    state = trainer.train(store, log, open_store(context.private("diagnostics")))
    evidence = trainer.evidence(log, _released(config, backbone, state))
    return state, None if evidence is None else evidence.model_dump(mode="json")


def _released(config: RunConfig, backbone: Any, state: ServerState) -> np.ndarray:
    """Puts the weights that are released into the backbone; returns them as they lie there."""
    variables = trainable_variables(backbone, config.model.trainable)
    assign_weights(variables, released_weights(config.training.server, state))
    return np.concatenate([variable.numpy().ravel() for variable in variables])


def _check_algorithm(config: RunConfig) -> None:
    algorithm = config.training.algorithm
    if algorithm == "centralized":
        centralized.require_no_privacy(config)
    if algorithm == "dp_fedavg" and config.purpose != "simulation":
        raise ConfigError(
            "training.algorithm=dp_fedavg takes the list of all classes from private data, which "
            "no guarantee covers; set purpose: simulation, or algorithm: dp_fedemb"
        )


def _check_key(config: RunConfig, root_key: bytes | None) -> None:
    if root_key is not None and config.purpose != "simulation":
        raise ConfigError(
            "a root key was handed in, and who knows it can take the noise off again; set purpose: "
            "simulation, or leave root_key out and let the run take the key of its reservation"
        )


def _check_data(folder: Path, key: bytes, users: UsersManifest) -> None:
    """Reads all of the users once: what trains is what the ledger was told."""
    if commit_to(key, tree_digest(folder).encode()) != users.commitments.users:
        raise PlanMismatch(
            "the users are not those partition_users committed to; run partition_users again, or "
            "start a run with a new id"
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
