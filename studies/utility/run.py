"""Runs rows in processes, within a budget; every finished row is one line, so a study resumes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedemb.config import RunConfig, SourceConfig
from fedemb.data.photos import PhotoReader
from fedemb.data.sources import find_parts, read_part, read_public_images
from fedemb.errors import InputError
from fedemb.evaluation.held_out import Subjects, measure, rate_name
from fedemb.foundation.canonical_json import file_digest, json_digest
from fedemb.models.backbones import build_backbone
from fedemb.models.inference import embed
from fedemb.models.keras_backend import configure_threads
from fedemb.privacy.registry import plan_mechanism
from fedemb.runtime.provenance import code_digest
from fedemb.training.central import pretrain, train_centralized
from fedemb.training.rounds import Round, assign_weights
from fedemb.training.simulation import Simulation
from studies.shared import TableFile, at_equal_utility
from studies.utility.grid import (
    CENTRALIZED,
    Contest,
    Net,
    Protocol,
    Row,
    Split,
    Stage,
    contests,
    final_rows,
    public_contests,
)

Say = Callable[[str], None]
Result = Mapping[str, Any]
COLUMN = "alphabet"


@dataclass(frozen=True)
class Study:
    """Subject of a study, and location of its results.

    Attributes:
      base: data, model and public backbone of all rows.
      protocol: which users train, validate and test.
      cache: folder of results.
    """

    base: RunConfig
    protocol: Protocol
    cache: Path
    data_sha: str = field(init=False)

    def __post_init__(self) -> None:
        """Computes the digest of the images once.

        Raises:
          InputError: the images are not a local file.
        """
        path = Path(self.base.data.source.uri)
        if not path.is_file():
            raise InputError(
                f"the study reads one local file, and {path} is not one; name the Omniglot Parquet "
                "file with --data"
            )
        object.__setattr__(self, "data_sha", file_digest(path))

    @property
    def table(self) -> TableFile:
        """Results of all rows."""
        return TableFile(self.cache / "rows.jsonl")

    def key(self, row: Row) -> str:
        """Name of a row's result in the table, there or not."""
        return row.digest(self.data_sha, self.protocol.split(row.stage))

    def results(self, rows: Iterable[Row]) -> list[tuple[Row, dict[str, Any]]]:
        """The rows that have been run, with their results."""
        found = self.table.rows()
        return [(row, found[key]) for row in rows if (key := self.key(row)) in found]

    def recall(self, rows: Iterable[Row]) -> dict[Row, float]:
        """Recall at the first false accept rate of the rows that have been run."""
        return {row: headline(found) for row, found in self.results(rows)}


def headline(result: Result) -> float:
    """Returns recall at the first false accept rate."""
    return next(iter(result["recall"].values()))


# ---- one row ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    """Images of one part, sorted by alphabet and identity. Raw."""

    images: np.ndarray
    """uint8 `[images, size, size, channels]`."""
    labels: np.ndarray
    """int64 `[images]`, 0 .. identities - 1, ascending."""
    groups: np.ndarray
    """str `[images]`: alphabet; an identity is in one."""

    @property
    def identities(self) -> int:
        """Number of identities."""
        return int(self.labels[-1]) + 1


def load_part(source: SourceConfig, names: tuple[str, ...], size: int) -> Images:
    """Reads the images of some alphabets; grey."""
    images, labels, first = [], [], 0
    for name in names:
        group = source.model_copy(update={"where": {COLUMN: (name,)}}).model_dump_json()
        pixels, classes = _load(group, size)
        images.append(pixels)
        labels.append(classes + first)
        first = int(labels[-1].max()) + 1
    sizes = [len(part) for part in images]
    return Images(np.concatenate(images), np.concatenate(labels), np.repeat(names, sizes))


@lru_cache(maxsize=64)
def _load(source: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    images, classes = read_public_images(
        SourceConfig.model_validate_json(source), PhotoReader(size, channels=1)
    )
    labels = np.unique(classes, return_inverse=True)[1]
    order = np.argsort(labels, kind="stable")
    return images[order], labels[order]


def public_backbone(config: RunConfig, public: Images, cache: Path) -> Any:
    """The public backbone of a row; trained once per recipe and seed, then read from the cache."""
    recipe, seed = config.pretraining, config.training.seed
    backbone = build_backbone(config.model, seed)
    key = {
        "model": config.model.model_dump(mode="json", exclude={"trainable"}),
        "pretraining": recipe.model_dump(mode="json", exclude={"source"}),
        "seed": seed,
        "images": [len(public.images), int(public.images.sum(dtype=np.int64))],
    }
    path = cache / "public" / f"{json_digest(key)[:16]}.npy"
    if path.exists():
        assign_weights(backbone.trainable_variables, np.load(path))
        return backbone
    pretrain(backbone, public.images, public.labels, recipe, seed=seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_suffix(f".{os.getpid()}.npy")  # another process may train the same one
    np.save(made, np.concatenate([v.numpy().ravel() for v in backbone.trainable_variables]))
    made.replace(path)
    return backbone


def with_noise(config: RunConfig, noise: float) -> RunConfig:
    """The configuration with noise of `noise` x clip on the mean.

    Equal noise, for correlated noise, means: the running sum of updates is as noisy as with
    independent noise, root mean square over rounds (`studies.shared.at_equal_utility`).
    """
    plan = plan_mechanism(config)
    equal = at_equal_utility(plan, noise * plan.normalizer).noise_multiplier
    return config.updated({"mechanism.noise_multiplier": equal})


def train_rounds(
    config: RunConfig, noise: float, start: Any, users: Images
) -> tuple[Any, dict[str, float]]:
    """Trains by rounds from a public backbone; returns the model and its number of weights.

    Coins and noise come from a fresh key: repeats differ in them as real runs do.
    """
    settings = with_noise(config, noise).updated({"training.parallel_clients": 1})
    rounds: list[Round[None]] = []
    result = Simulation.of(settings).train(
        users.images, users.labels, users.labels, start=start, on_round=rounds.append
    )
    figures = {"dimensions": float(rounds[-1].state.weights.size)}
    return result.model, figures


def run_row(row: Row, base: RunConfig, split: Split, cache: Path) -> dict[str, Any]:
    """Trains and measures one row.

    Args:
      row: method, noise, seed and settings.
      base: data, model and public backbone; the settings of the row override it.
      split: who pretrains, trains and is evaluated.
      cache: folder of public backbones.

    Returns:
      Recall per false accept rate, nearest neighbour accuracy, bootstrap draws of the first rate,
      figures of the last rounds, seconds and code.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    configure_threads(1)
    started = time.monotonic()
    size, source = base.model.image_size, base.data.source
    users = load_part(source, split.train, size)
    config = row.config(base, users.identities)
    seen: Mapping[str, float] = {}
    if row.method == "untrained":
        backbone = build_backbone(config.model, config.training.seed)
    else:
        backbone = public_backbone(config, load_part(source, split.public, size), cache)
        if row.method in CENTRALIZED:
            train_centralized(
                backbone,
                users.images,
                users.labels,
                config.training,
                epochs=config.evaluation.centralized_epochs,
                learning_rate=row.learning_rate,
            )
        elif row.method != "public_only":
            backbone, seen = train_rounds(config, row.noise, backbone, users)
    held_out = load_part(source, split.evaluation, size)
    subjects = Subjects(held_out.labels, held_out.labels.astype(np.uint64), held_out.groups)
    measured = measure(subjects, embed(backbone, held_out.images), config.evaluation)
    rates, recall = measured.verification.false_accept_rates, measured.verification.recall
    return {
        "row": asdict(row),
        "recall": {rate_name(f): round(e.value, 6) for f, e in zip(rates, recall, strict=True)},
        "nearest_neighbour": round(measured.retrieval.nearest_neighbour.value, 6),
        "draws": [round(float(draw), 6) for draw in recall[0].draws],
        "people": {"train": users.identities, "evaluation": held_out.identities},
        "last_rounds": dict(seen),
        "seconds": round(time.monotonic() - started, 1),
        "code_sha": code_digest(),
    }


# ---- all rows -----------------------------------------------------------------------------------


def execute(study: Study, rows: Sequence[Row], *, deadline: float, jobs: int, say: Say) -> None:
    """Runs the rows that have no result yet, in order, several at once.

    Args:
      study: what and where.
      rows: in order of what they teach.
      deadline: `time.monotonic()` after which no row is started.
      jobs: processes, one core each.
      say: called with one line for every row.
    """
    distinct = {study.key(row): row for row in rows}  # two contests may share a training
    there = study.table.rows()
    todo = [row for key, row in distinct.items() if key not in there]
    say(f"{len(distinct) - len(todo)} of {len(distinct)} rows are there, {len(todo)} to run")
    running: dict[Future[dict[str, Any]], Row] = {}
    context = multiprocessing.get_context("spawn")  # TensorFlow does not survive a fork
    with ProcessPoolExecutor(max_workers=jobs, mp_context=context) as pool:
        try:
            while running or (todo and time.monotonic() < deadline):
                while todo and len(running) < jobs and time.monotonic() < deadline:
                    row = todo.pop(0)
                    split = study.protocol.split(row.stage)
                    running[pool.submit(run_row, row, study.base, split, study.cache)] = row
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    row, found = running.pop(future), future.result()
                    study.table.put(study.key(row), found)
                    name = f"{row.stage} {row.net} {row.method} {row.noise:g} seed {row.seed}"
                    say(f"{name} {row.label}: {headline(found):.3f} in {found['seconds']:.0f} s")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if todo:
        say(f"the budget ends here: {len(todo)} rows left; run the same command again")


@dataclass(frozen=True)
class Decided:
    """Results of a study so far.

    Attributes:
      contests: as far as their starts are decided, each with its winner or None.
      final: the rows of the table; none before all contests are decided.
    """

    contests: Sequence[tuple[Contest, Row | None]]
    final: Sequence[Row]


def run_study(study: Study, *, budget: float, jobs: int, say: Say = print) -> Decided:
    """Runs the contests, then what they chose: test people are read when all are decided.

    Args:
      study: what and where.
      budget: seconds after which no row is started.
      jobs: processes, one core each.
      say: called with one line for every row.
    """
    deadline = time.monotonic() + budget

    def decide(found: Sequence[Contest]) -> list[tuple[Contest, Row | None]]:
        rows = [row for contest in found for row in contest.tries]
        execute(study, rows, deadline=deadline, jobs=jobs, say=say)
        recall = study.recall(rows)
        return [(contest, contest.winner(recall)) for contest in found]

    stages: tuple[Stage, ...] = ("selection", "final")
    people: dict[Stage, int] = {stage: people_who_train(study, stage) for stage in stages}
    public = decide(public_contests())
    starts: dict[Net, Row] = {contest.net: won for contest, won in public if won is not None}
    decided = [*public, *decide(contests(starts, people["selection"]))]
    winners = [won for _, won in decided if won is not None]
    if len(winners) < len(decided):
        return Decided(decided, ())
    final = final_rows(winners, people)
    execute(study, final, deadline=deadline, jobs=jobs, say=say)
    return Decided(decided, final)


def people_who_train(study: Study, stage: Stage) -> int:
    """How many, read from the data."""
    names = study.protocol.split(stage).train
    source = study.base.data.source.model_copy(update={"where": {COLUMN: names}})
    column = source.columns.user_id
    assert column is not None, "the preset names it"
    found: set[str] = set()
    for part in find_parts(source, [column]):
        for batch in read_part(source, part, [column]):
            found.update(map(str, batch.columns[column]))
    return len(found)
