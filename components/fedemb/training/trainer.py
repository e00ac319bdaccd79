"""The training loop: computes rounds, commits them in order, and resumes."""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import logging
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import cast

import numpy as np

from fedemb.config import ModelConfig
from fedemb.data.client_data import GroupIndex, UserStore, VerifiedFolder, load_examples
from fedemb.errors import ArtifactError, ConfigError, Interrupted
from fedemb.foundation import step_logging as events
from fedemb.foundation.canonical_json import JsonObject
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.noise import TagChain
from fedemb.privacy.running import RoundOutput, with_tags
from fedemb.privacy.sampling import Index, VirtualClient
from fedemb.runtime.step_context import StepContext
from fedemb.storage import Store
from fedemb.training import working_state
from fedemb.training.attempt import Attempt, Trained, run_attempt
from fedemb.training.audit import RoundAudit, RoundRecord
from fedemb.training.backend_rounds import build_rounds, most_examples, unit_readers
from fedemb.training.hosts import connected_hosts
from fedemb.training.rounds import (
    STATISTICS,
    ClientExamples,
    Feed,
    Round,
    TrainingRound,
    Unit,
    run_rounds,
)
from fedemb.training.server import ServerState, initial_state
from fedemb.training.working_state import Progress

CACHE_BYTES = 256 << 20
"""Maximum bytes of decoded images cached for later rounds."""


class ClientLoader:
    """Loads the examples of virtual clients and caches the most recently used ones decoded.

    Args:
      store: the users.
      model: model configuration, which defines the image format.
      max_examples: maximum number of examples of one client, in keyed order.
      one_image: True if clients are images sampled separately; each client then loads the image at
          its index among its owner's images.
      classes: DP-FedAvg only: all labels, ascending; a label's index is its row of the shared head.
      cache_bytes: maximum bytes of decoded images cached.
    """

    def __init__(
        self,
        store: UserStore,
        model: ModelConfig,
        *,
        max_examples: int,
        one_image: bool = False,
        classes: np.ndarray | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._store, self._classes, self._one_image = store, classes, one_image
        self._how = {
            "max_examples": max_examples,
            "image_size": model.image_size,
            "channels": model.channels,
        }
        self._cache: OrderedDict[bytes, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._room = cache_bytes

    def load(self, client: VirtualClient) -> ClientExamples:
        """Loads a `sampling.VirtualClient`; a client without users returns no examples."""
        key = client.users.tobytes()
        found = self._cache.pop(key, None)
        if found is None:
            found = self._read(client.users)
            self._room -= found[0].nbytes
        self._cache[key] = found
        while self._room < 0:
            _, (images, _) = self._cache.popitem(last=False)
            self._room += images.nbytes
        images, labels = found
        if self._one_image:
            place = slice(client.grouping, client.grouping + 1)
            images, labels = images[place], labels[place]
        return ClientExamples(client.grouping, client.group, images, labels)

    def _read(self, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        images, labels = load_examples(self._store, users, **self._how)
        if self._classes is not None:
            labels = np.searchsorted(self._classes, labels)
        return images, labels


def all_classes(store: UserStore) -> np.ndarray:
    """Returns all labels of the training users, int64 ascending, for DP-FedAvg's shared head."""
    found: set[int] = set()
    for users in store.read_in_pieces(np.arange(len(store))):
        found.update(label for user in users for label in user.labels)
    return np.array(sorted(found), np.int64)


_LOG = logging.getLogger(__name__)


class Trainer:
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
        attempt: Attempt,
        users: VerifiedFolder,
        function: TrainingRound,
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
        progress = working_state.load_checkpoint(self._attempt.store) or start
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
        if last is None:
            return progress
        tags = () if last.tags_sha is None else chain.tags  # independent rounds need none
        return Progress(state, with_tags(last.mechanism_state, tags))

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
        with connected_hosts(self._attempt.config, self._attempt.backbone, self._function):
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
        index = cast("Index", GroupIndex(self._users))
        feed = Feed(
            self._function,
            mechanism,
            first=first,
            index=index,
            load=self._load,
            prepare=self._prepare,
        )
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
                progress = Progress(done.state, mechanism.state_to_json())
                self._save(progress)
                if stop.requested and ended < rounds:
                    raise Interrupted(
                        f"Stopped on request after round {ended} of {rounds}. Resume the run "
                        "to continue from there."
                    )
        if self._uncovered:  # all rounds were committed already
            self._save(progress)
        if self._audit is not None:
            self._audit.replay(self._function, mechanism, index, self._load, attempt.log.read)
        return Trained(state=progress.state, audit=self._audit)

    def _save(self, progress: Progress) -> None:
        if self._audit is not None:
            self._audit.save(self._attempt.store)
        working_state.save_checkpoint(self._attempt.store, progress)
        for record in self._uncovered:
            self._attempt.log.cut(record)
        self._uncovered = []


# Handles SIGTERM and Ctrl-C: the trainer stops after the current round.


class StopRequest:
    """While entered, records the signals instead of exiting; a second Ctrl-C kills the process.

    Outside the main thread, signals cannot be recorded and keep their default behavior.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> StopRequest:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = {
                number: signal.signal(number, self._note)
                for number in (signal.SIGTERM, signal.SIGINT)
            }
        return self

    def __exit__(self, *_: object) -> None:
        if self._main:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        _LOG.info(events.STOPPING)


# Un-noised diagnostics of every round, for the data owner only. Raw.
#
# The number of participating clients is secret (publishing it would weaken the guarantee), and so
# is everything computed from client updates before noise. All of it is written to the private
# root.


_FILE = "diagnostics.jsonl"


def describe(done: Round[object], plan: MechanismPlan) -> dict[str, float]:
    """Returns the diagnostics of one round.

    Args:
      done: the round, with its un-noised sums.
      plan: plan of the mechanism.
    """
    sums, l2_norm_clip = done.sums, plan.l2_norm_clip
    columns = dict(zip(STATISTICS, sums.clients.T, strict=True))
    norms = columns["norm"][np.isfinite(columns["norm"])]
    clients = len(columns["norm"])
    figures = {
        "clients": float(clients),
        "examples": float(columns["examples"].sum()),
        "nonfinite": float(clients - len(norms)),
        "l2_norm_clip": l2_norm_clip,
    }
    if len(norms):
        figures |= {
            "clipped": float(np.mean(norms > l2_norm_clip)),
            "norm_median": float(np.median(norms)),
            "norm_p90": float(np.quantile(norms, 0.9)),
            "norm_max": float(norms.max()),
        }
        for name in ("first_loss", "last_loss"):
            losses = columns[name][np.isfinite(columns[name])]
            if len(losses):
                figures[name] = float(losses.mean())
    total = np.asarray(sums.total, np.float64)
    signal = float(np.linalg.norm(total)) / 2.0**plan.grid_bits
    noise = plan.noise_multiplier * float(np.sqrt(len(total)))
    figures["mean_norm"] = signal * l2_norm_clip / plan.normalizer
    figures["noise_to_signal"] = noise / signal if signal else 0.0
    return figures | {f"seconds_{name}": value for name, value in done.seconds.items()}


class Diagnostics:
    """Writes round diagnostics to the private root.

    Args:
      store: `<private_root>/<run_id>/diagnostics`; a superseded trainer changes nothing there.
      first_round: lines of this and later rounds, written by a killed trainer, are dropped.
    """

    def __init__(self, store: Store, first_round: int) -> None:
        self._store = store
        try:
            before = [json.loads(line) for line in store.read(_FILE).splitlines()]
        except FileNotFoundError:
            before = []
        self._lines = [line for line in before if line["round"] < first_round]

    def write(self, index: int, figures: dict[str, float]) -> None:
        """Adds the diagnostics of a round.

        Raises:
          Superseded: the step was started again meanwhile.
        """
        self._lines.append({"round": index, **figures})
        lines = (json.dumps(line, sort_keys=True) + "\n" for line in self._lines)
        self._store.write(_FILE, "".join(lines).encode())


def run(context: StepContext, *, root_key: bytes | None = None) -> JsonObject:
    """Trains a model; arguments, result and errors are those of `run_attempt`.

    Raises:
      ConfigError: also raised for an algorithm without a guarantee.
    """
    config = context.config
    algorithm = config.training.algorithm
    if algorithm == "dp_fedavg" and config.purpose != "simulation":
        raise ConfigError(
            "training.algorithm=dp_fedavg takes the list of all classes from private data, which "
            "no guarantee covers; set purpose: simulation, or algorithm: dp_fedemb"
        )
    return run_attempt(context, train, root_key)


def train(attempt: Attempt, users: VerifiedFolder) -> Trained:
    """Runs the rounds that are not committed yet, and recomputes two of them."""
    config, training, store = attempt.config, attempt.config.training, UserStore(users)
    classes = all_classes(store) if training.algorithm == "dp_fedavg" else None
    loader = ClientLoader(
        store,
        config.model,
        max_examples=most_examples(config),
        one_image=config.mechanism.samples_images,
        classes=classes,
    )
    function, trunk = build_rounds(
        attempt.backbone,
        attempt.mechanism,
        config.model,
        training,
        workers=attempt.workers.number,
        devices=attempt.workers.devices,
        shared_head_rows=0 if classes is None else max(1, len(classes)),
    )
    if trunk is not None:
        _LOG.info(events.FEATURES)
    readers = unit_readers(config, trunk, loader.load)
    return Trainer(attempt, users, function, *readers).train()
