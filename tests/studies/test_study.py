"""The study: who is read when, what is cached, what a table says, what noise is equal."""

import math
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedemb.config import RunConfig
from fedemb.pipelines.run.load_config import load_config
from fedemb.privacy.registry import plan_mechanism
from studies.photos.figure import METHODS, figure, gains
from studies.shared import standalone
from studies.utility import grid
from studies.utility.grid import OMNIGLOT, Protocol, Row
from studies.utility.report import write_report
from studies.utility.run import Decided, Study, execute, run_study
from tests.conftest import REPOSITORY

PEOPLE = {"selection": 399, "final": 566}
OMNIGLOT_SHA = "63a04a640f839293508552534beb7a26d13ef908370c62700a8a3e5db26c59d9"
"""Digest of `omniglot_background.parquet`."""
TINY = Protocol(
    name="tiny/1",
    public=("Latin",),
    validation=("Balinese",),
    judged=(),
    unread=("Greek", "Early_Aramaic"),
    tests=1,
)
SMALL = {
    "pretraining.epochs": 1,
    "pretraining.learning_rate": 0.05,
    "pretraining.loss": {"kind": "normalized_softmax"},
    "evaluation.centralized_epochs": 1,
    "evaluation.bootstrap_samples": 20,
    "mechanism.rounds": 2,
    "model.embedding_dim": 16,
    "training.local.epochs": 1,
}


@pytest.fixture
def base(data_dir) -> RunConfig:
    return grid.base_config(str(data_dir / "omniglot_small.parquet")).updated(SMALL)


@pytest.fixture
def study(base, tmp_path) -> Study:
    return Study(base, TINY, tmp_path / "study")


def result(recall=0.5, draws=(0.4, 0.6), seconds=10.0):
    return {
        "recall": {"0.001": recall, "0.01": recall + 0.1},
        "nearest_neighbour": 0.9,
        "draws": list(draws),
        "seconds": seconds,
    }


def put(study, row, **arguments):
    study.table.put(study.key(row), result(**arguments))


# ---- who plays which part -----------------------------------------------------------------------


def test_study_alphabets_are_disjoint():
    every = [*OMNIGLOT.public, *OMNIGLOT.validation, *OMNIGLOT.judged, *OMNIGLOT.unread]
    assert len(set(every)) == len(every) == 30
    for stage in ("selection", "final"):
        parts = [set(part) for part in OMNIGLOT.split(stage)]
        assert sum(map(len, parts)) == len(set.union(*parts))


def test_selection_never_sees_the_test_alphabets():
    selection, final = OMNIGLOT.split("selection"), OMNIGLOT.split("final")
    assert set(final.evaluation) == set(OMNIGLOT.test) <= set(OMNIGLOT.unread)
    assert not set(OMNIGLOT.test) & {name for part in selection for name in part}
    assert set(final.train) == set(selection.train) | set(OMNIGLOT.validation)
    tried = [row for contest in every_contest() for row in contest.tries]
    assert all(row.stage == "selection" for row in tried)


@pytest.fixture
def recorded(tmp_path, monkeypatch) -> tuple[Study, Decided]:
    """What the last study found; its data are not here."""
    shutil.copytree(REPOSITORY / "studies/utility/results", tmp_path / "results")
    monkeypatch.setattr("studies.utility.run.file_digest", lambda _: OMNIGLOT_SHA)
    monkeypatch.setattr("studies.utility.run.people_who_train", lambda _, stage: PEOPLE[stage])
    (tmp_path / "omniglot.parquet").touch()
    base = grid.base_config(str(tmp_path / "omniglot.parquet"))
    study = Study(base, OMNIGLOT, tmp_path / "results")
    said = []
    decided = run_study(study, budget=0.0, jobs=1, say=said.append)
    assert [line.split(", ")[-1] for line in said] == ["0 to run"] * 3
    return study, decided


def test_study_tables_and_figure_match_the_recorded_results(recorded):
    study, _ = recorded
    before = {name: (study.cache / name).read_bytes() for name in ("study.md", "study.svg")}
    write_report(*recorded)
    assert {name: (study.cache / name).read_bytes() for name in before} == before
    assert before["study.svg"] == (REPOSITORY / "docs/images/study.svg").read_bytes()


def test_preset_equals_the_best_recipe_of_the_study(recorded):
    preset, final = load_config("omniglot_identities"), OMNIGLOT.split("final")
    assert preset.partition.evaluation.values == final.evaluation
    assert set(preset.data.source.where["alphabet"]) == {*final.train, *final.evaluation}
    assert preset.pretraining.source.where["alphabet"] == final.public
    row = next(
        won
        for contest, won in recorded[1].contests
        if (contest.net, contest.method, contest.noise) == grid.OF_PRESET
    )
    config = row.config(grid.base_config(preset.data.source.uri), PEOPLE["final"])
    assert config.training == preset.training
    assert config.mechanism == preset.mechanism
    assert config.partition.virtual_clients == preset.partition.virtual_clients
    assert preset.evaluation.centralized_epochs == grid.equal_passes(PEOPLE["final"])
    source = preset.pretraining.source
    assert config.pretraining.model_copy(update={"source": source}) == preset.pretraining


# ---- contests -----------------------------------------------------------------------------------


def every_contest():
    public = grid.public_contests()
    starts = {contest.net: contest.tries[0] for contest in public}
    return [*public, *grid.contests(starts, PEOPLE["selection"])]


def test_study_reads_test_users_only_after_selection(study, monkeypatch):
    monkeypatch.setattr("studies.utility.run.execute", fill(ran := []))
    decided = run_study(study, budget=10.0, jobs=1, say=lambda _: None)
    assert decided.final
    stages = [row.stage for row in ran]
    assert stages == sorted(stages, reverse=True), "selection first"
    assert stages.count("final") == len(decided.final)
    study.table.path.unlink()
    monkeypatch.setattr("studies.utility.run.execute", fill(ran := [], most=9))
    decided = run_study(study, budget=10.0, jobs=1, say=lambda _: None)
    assert decided.final == ()
    assert {row.stage for row in ran} == {"selection"}


def fill(ran, most=10**6):
    """Hours of training, skipped: rows get a result, until the budget of so many ends."""

    def execute(study, rows, **_):
        for row in rows:
            if len(ran) < most:
                ran.append(row)
                put(study, row, recall=0.3 + len(ran) / 1000)

    return execute


# ---- cache --------------------------------------------------------------------------------------


def test_study_key_depends_only_on_deciding_fields(study):
    row = Row(method="fedemb", noise=1e-2)
    assert study.key(replace(row, label="renamed")) == study.key(row)
    changed = [
        replace(row, seed=1),
        replace(row, noise=3e-3),
        replace(row, stage="final"),
        replace(row, method="ftrl"),
        replace(row, method="ftrl", noise=3e-3),
        replace(row, clients_per_round=2),
        replace(row, users_per_client=8),
        replace(row, net="resnet8_s2"),
        replace(row, settings={"mechanism.l2_norm_clip": 2.0}),
        replace(row, settings={"pretraining.epochs": 2}),
        replace(row, settings={"training.mixed_precision": False}),
        replace(row, settings={"partition.groupings": 2}),
        replace(row, settings={"model.trainable": "projection"}),
    ]
    assert len({study.key(one) for one in [row, *changed]}) == len(changed) + 1


# ---- noise --------------------------------------------------------------------------------------


@pytest.mark.statistical
def test_tree_noise_matches_the_running_sum_noise_of_a_row(base):
    """Root mean square over rounds within 5 %; 5,000 independent numbers give 1 %. Fixed key."""
    from fedemb.privacy.running import build_mechanism
    from studies.utility.run import with_noise

    size, rounds, noise = 5000, 12, 1e-2
    strength = {}
    for method in ("fedemb", "ftrl"):
        row = Row(method=method, noise=noise, settings={"mechanism.rounds": rounds})
        plan = plan_mechanism(with_noise(row.config(base, 640), noise))
        mechanism = build_mechanism(plan, bytes(32), method, 1, "")
        zeros = np.zeros(size, np.int64)
        means = np.stack([mechanism.aggregate(r, zeros).mean for r in range(rounds)])
        strength[method] = np.sqrt(np.square(np.cumsum(means, axis=0)).mean())
    expected = noise * np.sqrt((rounds + 1) / 2)
    assert strength["fedemb"] == pytest.approx(expected, rel=0.05)
    assert strength["ftrl"] == pytest.approx(expected, rel=0.05)


@pytest.mark.long
def test_study_row_trains_with_its_noise(study, monkeypatch):
    from studies.utility import run

    plans, of = [], run.Simulation.of
    monkeypatch.setattr(
        run.Simulation, "of", lambda config: (plans.append(plan_mechanism(config)), of(config))[1]
    )
    row = Row(method="fedemb", noise=0.2, users_per_client=8, clients_per_round=2)
    run.run_row(row, study.base, study.protocol.split(row.stage), study.cache)
    (plan,) = plans
    assert plan.noise_multiplier / plan.normalizer == pytest.approx(row.noise)


# ---- the whole of it ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tiny_study_runs_resumes_and_reports(study):
    small = {
        "stage": "final",
        "users_per_client": 20,
        "clients_per_round": 1,
        "settings": {"training.server.learning_rate": 0.1},
    }
    rows = [
        Row(method="public_only", **small),
        Row(method="fedemb", noise=1e-2, **small),
        Row(method="fedavg", noise=1e-2, **small),
        Row(method="ftrl", noise=1e-2, **small),
    ]
    said = []
    execute(study, rows, deadline=math.inf, jobs=1, say=said.append)
    assert said[0] == "0 of 4 rows are there, 4 to run"
    assert len(said) == 5
    results = [found for _, found in study.results(rows)]
    for found in results:
        assert found["people"] == {"train": 46, "evaluation": 24}, "Greek is drawn"
        # Noise is fresh each time, and two steps of it can leave nothing at the strict rate.
        assert 0 <= found["recall"]["0.001"] <= found["recall"]["0.01"] <= 1
        assert found["recall"]["0.01"] > 0
    dimensions = [found["last_rounds"].get("dimensions") for found in results]
    assert dimensions[2] - dimensions[1] == 46 * 16, "FedAvg's head is clipped and noised too"

    before = study.table.path.read_bytes()
    execute(study, rows, deadline=math.inf, jobs=1, say=said.append)
    assert said[-1] == "4 of 4 rows are there, 0 to run"
    assert study.table.path.read_bytes() == before

    tried = every_contest()[1]
    put(study, tried.tries[0])
    printed = write_report(study, Decided([(tried, None)], rows))
    assert sum("DP-" in line for line in printed) >= 3
    assert (study.cache / "study.md").read_text().startswith("| net |")
    assert tried.tries[0].label in (study.cache / "study.md").read_text()
    drawing = ET.fromstring((study.cache / "study.svg").read_bytes())
    assert "text{fill:currentColor}@media(prefers-color-scheme:dark)" in drawing[0].text


# ---- Figure of the study of photos ----


def test_cars_figure_matches_the_recorded_results():
    found = gains()
    assert set(found) == set(METHODS)
    for rows in found.values():
        assert len(rows) >= 2
        for row in rows:
            assert len(row.seeds) == 3
            assert all(low < value < high for value, low, high in row.seeds)
    assert Path("docs/images/cars.svg").read_bytes() == standalone(figure())
