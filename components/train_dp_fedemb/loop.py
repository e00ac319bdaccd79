"""The loop over rounds: what is computed, in which order it becomes real, and how it resumes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedemb.config import RunConfig
from fedemb.data.client_data import UserStore
from fedemb.data.group_index import GroupIndex
from fedemb.documents.mechanism_audit import MechanismAudit
from fedemb.embedding.backbones import trainable_variables, with_bfloat16
from fedemb.embedding.feed import Feed
from fedemb.embedding.round_audit import AttemptKeys, RoundAudit
from fedemb.embedding.round_loop import run_rounds
from fedemb.embedding.rounds import RoundFunction
from fedemb.embedding.server import initial_state
from fedemb.errors import ArtifactError, Interrupted, StorageError
from fedemb.steps.train_dp_fedemb import checkpoint
from fedemb.steps.train_dp_fedemb.checkpoint import Progress
from fedemb.steps.train_dp_fedemb.client_loader import ClientLoader, all_classes
from fedemb.steps.train_dp_fedemb.diagnostics import Diagnostics, describe
from fedemb.steps.train_dp_fedemb.interrupt import StopRequest
from fedemb.steps.train_dp_fedemb.rounds import RoundLog, RoundRecord
from fedemb.storage import Store

_LOG = logging.getLogger(__name__)


class Trainer:
    """Runs the rounds of one attempt.

    Args:
      config: configuration of the run.
      backbone: where the rounds start from; not changed.
      mechanism: `privacy.queries.Mechanism` of the attempt.
      keys: what it draws from.
      users: local folder of the users.
      workers: virtual clients trained side by side.
      devices: they are dealt to, see `RoundFunction`.
    """

    def __init__(
        self,
        config: RunConfig,
        backbone: Any,
        mechanism: Any,
        keys: AttemptKeys,
        users: Path,
        *,
        workers: int,
        devices: Sequence[str] | None = None,
    ) -> None:
        training = config.training
        self._config, self._mechanism = config, mechanism
        self._uncovered: list[RoundRecord] = []
        """Records whose mean no checkpoint covers yet; without the mean."""
        self._audit: RoundAudit | None = None
        """Of the rounds; there is none where there is no noise."""
        self._keys = keys
        store = UserStore(users)
        classes = all_classes(store) if training.algorithm == "dp_fedavg" else None
        self._index = GroupIndex.load(users)
        self._loader = ClientLoader(store, config, classes=classes)
        trained = with_bfloat16(backbone) if training.mixed_precision else backbone
        self._function = RoundFunction(
            trained,
            mechanism,
            training.local,
            variables=trainable_variables(trained, config.model.trainable),
            seed=training.seed,
            workers=workers,
            devices=devices,
            shared_head_rows=0 if classes is None else max(1, len(classes)),
        )

    def restore(self, store: Store, log: RoundLog) -> Progress:
        """Where the attempt stands: its checkpoint, and the records committed after it.

        Raises:
          ArtifactError: a record lost its mean before a checkpoint covered it.
        """
        server = self._config.training.server
        start = Progress(initial_state(server, self._function.initial_weights()), None)
        progress = checkpoint.load(store, log.inputs_sha) or start
        plan = self._mechanism.plan
        if plan.private:
            sizes = self._function.sizes
            self._audit = RoundAudit(plan, self._keys, server, start.state, sizes)
            tags = (progress.mechanism or {}).get("tags", ())
            self._audit.restore(store, [bytes.fromhex(tag) for tag in tags])
        while (record := log.read(progress.state.rounds)) is not None:
            progress = self._advance(progress, record)
        return progress

    def _advance(self, progress: Progress, record: RoundRecord) -> Progress:
        if record.mean is None:
            raise ArtifactError(
                f"the checkpoint ends at round {progress.state.rounds}, before rounds whose output "
                "was cut off; restore the working state from a backup"
            )
        self._look(record)
        server = self._config.training.server
        state = self._function.advance(server, progress.state, record.mean)
        self._uncovered.append(replace(record, mean=None))
        return Progress(state, record.mechanism_state)

    def _look(self, record: RoundRecord) -> dict[str, float]:
        """Audits a round, once; rounds it missed are missing from the evidence."""
        if self._audit is None or record.index != self._audit.rounds:
            return {}
        return {"noise_slope": self._audit.add(record)}

    def evidence(self, log: RoundLog, released: np.ndarray) -> MechanismAudit | None:
        """Runs two rounds again and says whether the priced mechanism ran; after `train`.

        Args:
          log: the round records.
          released: weights that leave, float32 `[dim]`.
        """
        audit = self._audit
        if audit is None:
            return None
        replay = audit.replay(self._function, self._index, self._loader.load, log.read)
        return audit.found(released, replay, self._config.policy.delta)

    def train(self, store: Store, log: RoundLog, diagnostics: Store) -> Any:
        """Runs all rounds that are not committed yet.

        Args:
          store: working state of the attempt.
          log: its round records.
          diagnostics: where un-noised figures go.

        Returns:
          The `ServerState` after the last round.

        Raises:
          Interrupted: asked to stop; checkpoint written.
          StorageError: a host of the job was lost.
        """
        import tensorflow as tf

        def commit(index: int, output: Any) -> RoundRecord:
            return log.commit(index, self._mechanism, output)

        progress = self.restore(store, log)
        first, rounds = progress.state.rounds, self._mechanism.plan.rounds
        if progress.mechanism is not None:
            self._mechanism.restore(progress.mechanism)
        if first:
            _LOG.info("resuming after round %d of %d", first, rounds)
        figures = Diagnostics(diagnostics, first)
        started = time.monotonic()
        feed = Feed(self._function, first=first, index=self._index, load=self._loader.load)
        try:
            with feed, StopRequest() as stop:
                for done in run_rounds(
                    self._function, self._config.training.server, progress.state, feed, commit
                ):
                    self._uncovered.append(replace(done.record, mean=None))
                    progress = Progress(done.state, done.record.mechanism_state)
                    slope = self._look(done.record)
                    figures.write(done.index, describe(done, self._mechanism.plan) | slope)
                    ended, elapsed = done.index + 1, time.monotonic() - started
                    _LOG.info("%s", _line(done.index, first, rounds, elapsed))
                    due = ended % self._config.training.checkpoint_every == 0
                    if due or stop.requested or ended == rounds:
                        self._save(store, log, progress)
                        figures.flush()
                    if stop.requested and ended < rounds:
                        raise Interrupted(
                            f"stopped as asked after round {ended} of {rounds}; run the same "
                            "command again to go on"
                        )
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            raise StorageError(
                f"a host of the training job was lost in round {progress.state.rounds + 1}, which "
                "was not committed; start the hosts again and resume the run"
            ) from error
        finally:
            figures.close()
        if self._uncovered:  # all rounds were on record already
            self._save(store, log, progress)
        return progress.state

    def _save(self, store: Store, log: RoundLog, progress: Progress) -> None:
        if self._audit is not None:
            self._audit.save(store)
        checkpoint.save(store, log.inputs_sha, progress)
        for record in self._uncovered:
            log.cut(record)
        self._uncovered = []


def _line(index: int, first: int, rounds: int, seconds: float) -> str:
    """Progress in public words. The time left is coarse: exact times tell how many took part."""
    left = seconds / (index + 1 - first) * (rounds - index - 1)
    unit = 60 if left >= 90 else 10
    about = f"{round(left / unit)} min" if unit == 60 else f"{max(1, round(left / 10)) * 10} s"
    rest = "done" if index + 1 == rounds else f"about {about} left"
    return f"round {index + 1}/{rounds}, {rest}"
