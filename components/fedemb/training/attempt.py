"""Trains one attempt: from a reservation and users to a noised model and its round log.

    bind -> [ sample, load -> records of the units -> clip, exact sum -> noise -> record
              -> server step -> checkpoint ] x rounds -> model -> commit

The algorithm defines the record of a unit in a round: local training (DP-FedEmb) or a mean
gradient (DP-SGD). This module implements everything else.

The process may be killed at any time: a committed round is replayed from its record, and an
uncommitted round never left the process.
"""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedemb.config import RunConfig, TrainingConfig
from fedemb.data.client_data import VerifiedFolder
from fedemb.documents.artifacts import RunArtifacts
from fedemb.documents.model import ModelCard
from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import JsonObject, canonical_json, json_object, sha256_hex
from fedemb.foundation.document import Written, parse
from fedemb.foundation.files import remove_leftovers, write_bytes
from fedemb.keys import KeyStore, commit_to, commitment_key, reservation_key_name
from fedemb.keys.trust import Signer, write_signed
from fedemb.ledger import Ledger, mark_high_water
from fedemb.models.backbone_files import load_backbone, save_backbone
from fedemb.models.backbones import trainable_variables
from fedemb.models.keras_backend import (
    Model,
    accelerators,
    configure_threads,
    load_keras,
    use_backend,
)
from fedemb.models.layers import plain_form
from fedemb.privacy.running import Mechanism, build_mechanism
from fedemb.runtime.private_inputs import open_private
from fedemb.runtime.step_context import StepContext
from fedemb.storage import Store, open_store
from fedemb.storage.fencing import FencedStore, FencingToken
from fedemb.training import working_state
from fedemb.training.audit import AttemptKeys, RoundAudit
from fedemb.training.host_messages import connect, hosts_of_the_step
from fedemb.training.rounds import assign_weights
from fedemb.training.server import ServerState, released_weights
from fedemb.training.working_state import AttemptInputs, RoundLog, SignedState

_EVIDENCE = "evidence.json"
"""Name of the mechanism evidence, written after training while the key exists."""
_NO_EVIDENCE: JsonObject = {"mechanism_audit": None}
"""Evidence of a training without noise."""
_INJECTED = "key_injected"
"""Marker in the working state: a round may have been drawn from an injected key."""
_CARD = "model.json"
"""Name of the model card as first signed."""
_CLAIM = "claim"


class Workers(NamedTuple):
    """Parallel workers of TensorFlow; JAX uses all devices."""

    number: int
    """Virtual clients or micro-batches computed in parallel."""
    devices: Sequence[str] | None
    """Devices for the workers, see `RoundFunction`."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The result of a training."""

    state: ServerState
    """State after the last round. Noised."""
    audit: RoundAudit | None
    """Audit that the accounted mechanism ran; None without noise."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt that the ledger has bound to its inputs and to one working state.

    The working state is `<private_root>/<run_id>/train/attempt-<n>/`.
    """

    inputs: AttemptInputs
    """Verified inputs."""
    backbone: Model
    """Initial backbone of the rounds."""
    workers: Workers
    ledger: Ledger
    key_store: KeyStore
    token: FencingToken
    signer: Signer
    store: SignedState
    """Working state; rejects writes after the step was started again."""
    log: RoundLog
    """Round records in the working state."""
    diagnostics: Store
    """Store for un-noised diagnostics."""
    injected: bytes | None
    """Root key that the caller passed; None selects the secret key of the reservation."""

    @property
    def config(self) -> RunConfig:
        """Configuration of the run."""
        return self.inputs.config

    @cached_property
    def keys(self) -> AttemptKeys:
        """Keys of coins and noise. An injected one is recorded before the first round."""
        run_id, attempt, root_key = self.inputs.run_id, self.inputs.number, self.injected
        if root_key is None:
            root_key = self.key_store.fetch(reservation_key_name(run_id, attempt))
        else:
            self.store.write(_INJECTED, b"")  # never deleted
        return AttemptKeys(root_key, run_id, attempt, self.inputs.inputs_sha)

    @cached_property
    def mechanism(self) -> Mechanism:
        """Mechanism of the attempt: samples, clips, sums, adds noise and accounts for it."""
        return build_mechanism(self.inputs.plan, **vars(self.keys))

    def finished(self) -> ServerState | None:
        """Returns the last state if a trainer was killed between last round and commit."""
        last = working_state.load_checkpoint(self.store)
        return last.state if last and self.store.exists(_EVIDENCE) else None

    def released(self, state: ServerState) -> np.ndarray:
        """Sets the released weights in the backbone and returns them as stored there."""
        variables = trainable_variables(self.backbone, self.config.model.trainable)
        assign_weights(variables, released_weights(self.config.training.server, state))
        return np.concatenate([variable.numpy().ravel() for variable in variables])

    def publish(self, artifacts: RunArtifacts, state: ServerState) -> JsonObject:
        """Writes the model and its public round log, and commits the attempt; returns the card.

        No computation is allowed under its reservation afterwards.
        """
        self.released(state)
        lines = self.log.lines(state.rounds)
        write_bytes(artifacts.model / "rounds.jsonl", lines)
        card = self._write_model(artifacts.model, state)
        self.token.check()
        remove_leftovers(artifacts.model)  # the folder must contain only the model's files
        self.ledger.commit(
            self.inputs.reservation,
            rounds_started=state.rounds,
            round_log_sha=sha256_hex(lines),
            card_sha=card.sha,
            signer=self.signer,
            keys=self.key_store,
        )
        return card.json

    def _write_model(self, folder: Path, state: ServerState) -> Written[ModelCard]:
        """Writes model and card, the card exactly as a trainer of the attempt first signed it.

        The commit names these bytes, and the trainer's key may have been rotated since.
        """
        inputs, plain = self.inputs, plain_form(self.backbone)
        model = self.config.model
        fields = {
            "run_id": inputs.run_id,
            "attempt": inputs.number,
            "config_sha": inputs.reservation.config_sha,
            "plan_sha": inputs.plan.digest,
            "code_sha": inputs.reservation.code_sha,
            "inputs_sha": inputs.inputs_sha,
            "initial_weights_sha": inputs.initial_weights_sha,
            "weights_sha": save_backbone(plain, folder / "backbone.keras"),
            "key_injected": self.store.exists(_INJECTED),
            "rounds_run": state.rounds,
            **json_object(self.store.read(_EVIDENCE), _EVIDENCE),
            "backbone": model.backbone,
            "embedding_dim": model.embedding_dim,
            "tensors": [{"name": v.path, "shape": list(v.shape)} for v in plain.weights],
        }
        card = ModelCard.of_fields(fields)
        if self.store.exists(_CARD):
            kept = parse(self.store.read(_CARD), ModelCard, _CARD)
            if kept.body == card:
                write_bytes(folder / "model.json", kept.data)
                return kept
        signed = write_signed(folder / "model.json", card, self.signer)
        self.store.write(_CARD, signed.data)
        return signed


def run_attempt(
    context: StepContext,
    train: Callable[[Attempt, VerifiedFolder], Trained],
    root_key: bytes | None = None,
) -> JsonObject:
    """Trains an attempt, or resumes it after its trainer was killed.

    Args:
      context: reads `privacy_plan`, `reservation`, `users`, `pretrained` and the private users;
          writes `model`, which is noised.
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
        start = context.artifacts.pretrained / "backbone.keras"
        backbone = load_backbone(start, inputs.config.model)
        attempt = _bound(context, inputs, backbone, workers, root_key)
        state = attempt.finished()
        if state is None:
            with open_private(context, "users", attempt=inputs.number) as users:
                trained = train(attempt, users)
            state = trained.state
            evidence = trained.audit and trained.audit.evidence(attempt.released(state))
            attempt.store.write(_EVIDENCE, canonical_json(evidence or _NO_EVIDENCE))
    return attempt.publish(context.artifacts, state)


def _bound(
    context: StepContext,
    inputs: AttemptInputs,
    backbone: Model,
    workers: Workers,
    root_key: bytes | None,
) -> Attempt:
    """Binds an attempt in the ledger and opens its working state.

    Raises:
      Refused: the attempt trains with another private root.
      PlanMismatch: the attempt is bound to other inputs.
    """
    keys, ledger = context.keys, context.writable_ledger
    state = open_store(context.private("train", f"attempt-{inputs.number}"))
    ledger.bind(
        inputs.reservation,
        inputs_sha=inputs.inputs_sha,
        commitments=inputs.users.commitments.model_dump(),
        private_root=claim(state, commitment_key(keys, inputs.config.policy.policy_id)),
        keys=keys,
    )
    mark_high_water(ledger, keys)  # before round 0: the charge cannot be returned from now on
    token, trust = FencingToken(state.uri, "train_model"), ledger.chain.trust
    signer = Signer.current(keys, "trainer", trust)
    store = SignedState(state, token, inputs, signer, trust)
    return Attempt(
        inputs=inputs,
        backbone=backbone,
        workers=workers,
        ledger=ledger,
        key_store=keys,
        token=token,
        signer=signer,
        store=store,
        log=RoundLog(store),
        diagnostics=FencedStore(open_store(context.private("diagnostics")), token),
        injected=root_key,
    )


def claim(store: Store, key: bytes) -> str:
    """Claims the working state of an attempt and returns a keyed commitment to it.

    Round records are exclusive only within one private root. Two trainers of one reservation with
    two private roots would draw noise for the same rounds twice, so the ledger accepts one claim.
    It covers the address and a random marker stored there: a copy of the folder, and the same path
    on another machine, give different commitments.

    Args:
      store: working state of the attempt.
      key: the policy's commitment key.
    """
    with suppress(FileExistsError):
        store.create(_CLAIM, secrets.token_bytes(32))
    root = store.local_root
    address = store.uri if root is None else root.resolve().as_posix()
    return commit_to(key, canonical_json(["private_root/1", address, store.read(_CLAIM).hex()]))


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


def _check_key(config: RunConfig, root_key: bytes | None) -> None:
    if root_key is not None and config.purpose != "simulation":
        raise ConfigError(
            "A root key was passed to a run that is not a simulation, and anyone with the key can "
            "remove the noise. Set purpose: simulation, or leave root_key out to use the secret "
            "key of the reservation."
        )
