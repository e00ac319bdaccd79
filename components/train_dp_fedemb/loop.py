"""The loop over rounds: what is computed, in which order it becomes real, and how it resumes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedemb.config import RunConfig
from fedemb.data.client_data import UserStore
from fedemb.data.group_index import GroupIndex
from fedemb.embedding.backbones import trainable_variables, with_bfloat16
from fedemb.embedding.rounds import RoundFunction, RoundSums
from fedemb.embedding.server import initial_state, server_step
from fedemb.errors import ArtifactError, Interrupted, StorageError
from fedemb.steps.train_dp_fedemb import checkpoint
from fedemb.steps.train_dp_fedemb.checkpoint import Progress
from fedemb.steps.train_dp_fedemb.diagnostics import Diagnostics, describe
from fedemb.steps.train_dp_fedemb.feed import ClientLoader, Feed, all_classes
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
      users: local folder of the users.
      workers: virtual clients trained side by side.
      devices: they are dealt to, see `RoundFunction`.
    """

    def __init__(
        self,
        config: RunConfig,
        backbone: Any,
        mechanism: Any,
        users: Path,
        *,
        workers: int,
        devices: Sequence[str] | None = None,
    ) -> None:
        training = config.training
        self._config, self._mechanism = config, mechanism
        self._uncovered: list[RoundRecord] = []
        """Records whose mean no checkpoint covers yet; without the mean."""
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
        while (record := log.read(progress.state.rounds)) is not None:
            progress = self._advance(progress, record)
        return progress

    def _advance(self, progress: Progress, record: RoundRecord) -> Progress:
        if record.mean is None:
            raise ArtifactError(
                f"the checkpoint ends at round {progress.state.rounds}, before rounds whose output "
                "was cut off; restore the working state from a backup"
            )
        server, rounds = self._config.training.server, self._mechanism.plan.rounds
        state = server_step(server, progress.state, record.mean, rounds=rounds)
        self._uncovered.append(replace(record, mean=None))
        return Progress(state, record.mechanism_state)

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
        progress = self.restore(store, log)
        first, rounds = progress.state.rounds, self._mechanism.plan.rounds
        if progress.mechanism is not None:
            self._mechanism.restore(progress.mechanism)
        if first:
            _LOG.info("resuming after round %d of %d", first, rounds)
        figures = Diagnostics(diagnostics, first)
        feed = Feed(
            range(first, rounds),
            mechanism=self._mechanism,
            index=self._index,
            loader=self._loader,
            function=self._function,
        )
        started = time.monotonic()
        try:
            with StopRequest() as stop:
                for index in range(first, rounds):
                    progress = self._round(index, progress, feed, log, figures)
                    _LOG.info("%s", _line(index, first, rounds, time.monotonic() - started))
                    due = (index + 1) % self._config.training.checkpoint_every == 0
                    if due or stop.requested or index + 1 == rounds:
                        self._save(store, log, progress)
                        figures.flush()
                    if stop.requested and index + 1 < rounds:
                        raise Interrupted(
                            f"stopped as asked after round {index + 1} of {rounds}; run the same "
                            "command again to go on"
                        )
        finally:
            feed.close()
            figures.close()
        if self._uncovered:  # all rounds were on record already
            self._save(store, log, progress)
        return progress.state

    def _round(
        self, index: int, progress: Progress, feed: Feed, log: RoundLog, figures: Diagnostics
    ) -> Progress:
        start = time.perf_counter()
        clip = self._mechanism.l2_norm_clip
        sums = self._sums(progress, feed)
        trained = time.perf_counter()
        output = self._mechanism.aggregate(index, sums.sample_state)
        noised = time.perf_counter()
        record = log.commit(index, self._mechanism, output)
        progress = self._advance(progress, record)
        seconds = {
            "train": trained - start,
            "noise": noised - trained,
            "commit": time.perf_counter() - noised,
            "wait": self._function.seconds_waited,
        }
        plan = self._mechanism.plan
        figures.write(index, describe(sums, plan=plan, l2_norm_clip=clip, seconds=seconds))
        return progress

    def _sums(self, progress: Progress, feed: Feed) -> RoundSums:
        import tensorflow as tf

        try:
            return self._function.run(progress.state.weights, feed.next_round())
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            raise StorageError(
                f"a host of the training job was lost in round {progress.state.rounds + 1}, which "
                "was not committed; start the hosts again and resume the run"
            ) from error

    def _save(self, store: Store, log: RoundLog, progress: Progress) -> None:
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
