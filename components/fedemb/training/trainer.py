"""The training loop: computes rounds, commits them in order, and resumes."""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, cast

from fedemb.data.client_data import GroupIndex, VerifiedFolder
from fedemb.engine.audit.round_audit import RoundAudit
from fedemb.engine.feature_cache import FeatureCache, FeatureProgress, UnitFeatures, unit_key
from fedemb.engine.feed import Feed
from fedemb.engine.round_loop import run_rounds
from fedemb.engine.rounds import ClientExamples
from fedemb.engine.server import ServerState, initial_state
from fedemb.engine.training_round import TrainingRound
from fedemb.errors import ArtifactError, Interrupted
from fedemb.foundation import step_logging as events
from fedemb.privacy.queries import MechanismState, RoundOutput
from fedemb.privacy.queries.running import with_tags
from fedemb.privacy.randomness.keyed_noise import TagChain
from fedemb.privacy.randomness.sampling import Index, VirtualClient
from fedemb.training import checkpoint
from fedemb.training.attempt import Attempt, Trained, Unit
from fedemb.training.checkpoint import Progress
from fedemb.training.diagnostics import Diagnostics, describe
from fedemb.training.hosts import led
from fedemb.training.interrupt import StopRequest
from fedemb.training.round_log import RoundRecord

_LOG = logging.getLogger(__name__)


def train_on_features(
    attempt: Attempt[UnitFeatures],
    users: VerifiedFolder,
    function: TrainingRound[UnitFeatures],
    cache: FeatureCache,
    load: Callable[[VirtualClient], ClientExamples],
) -> Trained:
    """Trains on the features of units that are sampled alone, see `Trainer.train`.

    Args:
      attempt: inputs and working state of the attempt.
      users: folder of the users.
      function: computes the records of units in a round.
      cache: features of the frozen trunk.
      load: reads the images of a unit.
    """
    progress = FeatureProgress.of(attempt.mechanism.plan)

    def features(client: VirtualClient) -> UnitFeatures:
        return cache.of(unit_key(client), partial(load, client))

    def fill(clients: Sequence[VirtualClient]) -> None:
        cache.fill(((unit_key(client), partial(load, client)) for client in clients), progress)

    return Trainer(attempt, users, function, features, fill).train()


class Trainer(Generic[Unit]):
    """Runs the rounds of one attempt.

    Args:
      attempt: inputs and working state of the attempt.
      users: folder of the users.
      function: computes the records of units in a round.
      load: reads the examples of a `sampling.VirtualClient`.
      prepare: called with all virtual clients of a round before they are loaded.
    """

    def __init__(
        self,
        attempt: Attempt[Unit],
        users: VerifiedFolder,
        function: TrainingRound[Unit],
        load: Callable[[VirtualClient], Unit],
        prepare: Callable[[Sequence[VirtualClient]], None] | None = None,
    ) -> None:
        self._attempt, self._users, self._function = attempt, users, function
        self._load, self._prepare = load, prepare
        self._server = attempt.config.training.server
        self._uncovered: list[RoundRecord] = []
        """Records whose mean no checkpoint covers yet, stored without the mean."""
        self._audit: RoundAudit | None = None

    def restore(self) -> Progress:
        """Restores the state of the attempt from its checkpoint and the records committed after it.

        Raises:
          ArtifactError: a record lost its mean before a checkpoint covered it, or does not follow
              the rounds before it.
        """
        log = self._attempt.log
        start = Progress(initial_state(self._function.initial_weights()), None)
        progress = checkpoint.load(self._attempt.store) or start
        plan = self._attempt.mechanism.plan
        if plan.private:
            self._audit = RoundAudit(
                plan, self._attempt.keys, self._server, self._function.advance, start.state
            )
            self._audit.restore(self._attempt.store, log.read)
        state, last = progress.state, None
        tags = progress.mechanism["tags"] if progress.mechanism else []
        chain = TagChain(map(bytes.fromhex, tags))
        if state.rounds and (covered := log.read(state.rounds - 1)) is not None:
            chain.check(covered.tags_sha)
        while (record := log.read(state.rounds)) is not None:
            state, last = self._advance(state, record, chain), record
        return progress if last is None else Progress(state, _resumed(last, chain))

    def _advance(self, state: ServerState, record: RoundRecord, chain: TagChain) -> ServerState:
        if record.mean is None:
            raise ArtifactError(
                f"the checkpoint ends at round {state.rounds}, before rounds whose output "
                "was cut off; restore the working state from a backup"
            )
        chain.append(bytes.fromhex(record.mechanism_state["tag"]))
        chain.check(record.tags_sha)
        self._audit_round(record)
        self._uncovered.append(replace(record, mean=None))
        return self._function.advance(self._server, state, record.mean)

    def _audit_round(self, record: RoundRecord) -> dict[str, float]:
        """Audits a round once; a round without audit is missing from the evidence."""
        if self._audit is None or record.index != self._audit.rounds:
            return {}
        return {"noise_slope": self._audit.add(record)}

    def train(self) -> Trained:
        """Runs all rounds that are not committed yet, and recomputes two of them.

        Raises:
          Interrupted: a stop was requested; the checkpoint is written.
          StorageError: a host of the job was lost.
        """
        with led(self._attempt.config, self._attempt.backbone, self._function):
            return self._train()

    def _train(self) -> Trained:
        attempt, mechanism = self._attempt, self._attempt.mechanism

        def commit(index: int, output: RoundOutput) -> RoundRecord:
            return attempt.log.commit(index, mechanism, output)

        progress = self.restore()
        first, rounds = progress.state.rounds, mechanism.plan.rounds
        if progress.mechanism is not None:
            mechanism.restore(progress.mechanism)
        if first:
            _LOG.info(events.RESUMING, first, rounds)
        figures = Diagnostics(attempt.diagnostics, first)
        index = cast("Index", GroupIndex.load(self._users))
        feed = Feed(
            self._function,
            mechanism,
            first=first,
            index=index,
            load=self._load,
            prepare=self._prepare,
        )
        try:
            with feed, StopRequest() as stop:
                for done in run_rounds(
                    self._function, mechanism, self._server, progress.state, feed, commit=commit
                ):
                    assert done.record is not None, "`commit` returns the record"
                    self._uncovered.append(replace(done.record, mean=None))
                    slope = self._audit_round(done.record)
                    figures.write(done.index, describe(done, mechanism.plan) | slope)
                    ended = done.index + 1
                    _LOG.info(events.ROUND, ended, rounds)
                    due = ended % attempt.config.training.checkpoint_every == 0
                    if due or stop.requested or ended == rounds:
                        progress = Progress(done.state, mechanism.state_to_json())
                        self._save(progress)
                        figures.flush()
                    if stop.requested and ended < rounds:
                        raise Interrupted(
                            f"Stopped on request after round {ended} of {rounds}. Resume the run "
                            "to continue from there."
                        )
        finally:
            figures.close()
        if self._uncovered:  # all rounds were committed already
            self._save(progress)
        if self._audit is not None:
            self._audit.replay(self._function, mechanism, index, self._load, attempt.log.read)
        return Trained(state=progress.state, audit=self._audit)

    def _save(self, progress: Progress) -> None:
        if self._audit is not None:
            self._audit.save(self._attempt.store)
        checkpoint.save(self._attempt.store, progress)
        for record in self._uncovered:
            self._attempt.log.cut(record)
        self._uncovered = []


def _resumed(record: RoundRecord, chain: TagChain) -> MechanismState:
    """Returns the mechanism's state after a record; independent rounds need no tags."""
    return with_tags(record.mechanism_state, () if record.tags_sha is None else chain.tags)
