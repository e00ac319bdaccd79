"""The study: who is read when, what is cached, what a table says, what noise is equal."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from fedemb.config import RunConfig
from fedemb.errors import ArtifactError, InputError
from fedemb.pipelines.run.load_config import load_config
from fedemb.privacy.mechanisms.group_poisson_gaussian import GroupPoissonGaussian
from fedemb.privacy.mechanisms.mechanism import Cohort
from fedemb.privacy.mechanisms.registry import plan_mechanism
from studies.utility import grid
from studies.utility.certify import LEAST_NOISE, TARGET, certify, cohorts
from studies.utility.execute import SCHEMA, Study, estimate, execute
from studies.utility.page import verdict
from studies.utility.protocol import OMNIGLOT, Protocol
from studies.utility.rows import Row
from studies.utility.table import (
    HEADER,
    ablation_cells,
    cells,
    markdown,
    price_cells,
    summarise,
)
from studies.utility.write import write_report
from tests.conftest import REPOSITORY

TINY = Protocol("tiny/1", "alphabet", ("Latin",), ("Balinese",), ("Greek", "Early_Aramaic"), 1)
SMALL = {
    "pretraining.epochs": 1,
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
        "people": {"train": 46, "evaluation": 22},
        "last_rounds": {},
        "seconds": seconds,
        "code_sha": "0" * 64,
        "versions": {"numpy": "2"},
    }


def put(study, row, **arguments):
    study.path(row).parent.mkdir(parents=True, exist_ok=True)
    study.path(row).write_text(json.dumps({"schema": SCHEMA, **result(**arguments)}))


# ---- who plays which part -----------------------------------------------------------------------


def test_no_alphabet_plays_two_parts():
    every = [*OMNIGLOT.public, *OMNIGLOT.validation, *OMNIGLOT.private]
    assert len(set(every)) == len(every) == 30
    for stage in ("selection", "final"):
        parts = [set(part) for part in OMNIGLOT.split(stage)]
        assert sum(map(len, parts)) == len(set.union(*parts))


def test_selection_never_sees_the_test_alphabets():
    selection, final = OMNIGLOT.split("selection"), OMNIGLOT.split("final")
    assert set(final.evaluation) == set(OMNIGLOT.test) <= set(OMNIGLOT.private)
    assert not set(OMNIGLOT.test) & {name for part in selection for name in part}
    assert set(final.train) == set(selection.train) | set(OMNIGLOT.validation)
    assert all(row.stage == "selection" for row in grid.selection_rows() + grid.ablation_rows())


def test_the_draw_of_the_test_alphabets_is_fixed():
    assert len(OMNIGLOT.test) == 8
    assert OMNIGLOT.test[0] == "Bengali"
    assert OMNIGLOT.test[-1] == "Tagalog"


def test_the_preset_is_the_final_recipe_of_the_study():
    preset = load_config("omniglot_identities")
    final = OMNIGLOT.split("final")
    assert set(preset.partition.evaluation.values) == set(final.evaluation)
    assert set(preset.data.source.where["alphabet"]) == {*final.train, *final.evaluation}
    assert preset.pretraining.source.where["alphabet"] == final.public
    noise = preset.mechanism.noise_multiplier / (
        preset.mechanism.sampling_probability * preset.partition.virtual_clients
    )
    row = next(r for r in grid.final_rows() if r.method == "fedemb" and r.noise == 3e-3)
    assert noise == pytest.approx(row.noise, rel=0.01)
    config = row.config(grid.base_config(preset.data.source.uri), 619)
    assert config.training.local == preset.training.local
    assert config.training.server == preset.training.server
    assert config.mechanism.rounds == preset.mechanism.rounds
    assert config.mechanism.l2_norm_clip == preset.mechanism.l2_norm_clip
    assert config.partition.virtual_clients == preset.partition.virtual_clients
    assert config.pretraining.epochs == preset.pretraining.epochs


# ---- cache --------------------------------------------------------------------------------------


def test_a_row_is_found_again_by_what_decides_it_and_by_nothing_else(study):
    row = Row(method="fedemb", noise=1e-2)
    assert study.path(replace(row, label="renamed")) == study.path(row)
    changed = [
        replace(row, seed=1),
        replace(row, noise=3e-3),
        replace(row, stage="final"),
        replace(row, method="ftrl"),
        replace(row, method="ftrl", noise=3e-3),
        replace(row, clients_per_round=2),
        replace(row, users_per_client=8),
        replace(row, settings={"mechanism.l2_norm_clip": 2.0}),
        replace(row, settings={"pretraining.epochs": 2}),
        replace(row, settings={"training.mixed_precision": True}),
        replace(row, settings={"partition.groupings": 2}),
        replace(row, settings={"model.trainable": "projection"}),
    ]
    assert len({study.path(one) for one in [row, *changed]}) == len(changed) + 1


def test_baselines_do_not_depend_on_settings_of_rounds(study):
    for method in ("untrained", "public_only", "centralized"):
        row = Row(method=method)
        assert study.path(replace(row, settings={"mechanism.rounds": 7})) == study.path(row)
    more = replace(Row(method="centralized"), settings={"evaluation.centralized_epochs": 2})
    assert study.path(more) != study.path(Row(method="centralized"))


def test_another_file_of_images_is_another_study(base, study, tmp_path):
    path = tmp_path / "other.parquet"
    path.write_bytes(b"other")
    other = Study(base.updated({"data.source.uri": str(path)}), TINY, study.cache)
    row = Row(method="untrained")
    assert other.path(row) != study.path(row)


def test_a_damaged_row_is_named(study):
    row = Row(method="untrained")
    put(study, row)
    study.path(row).write_text("{")
    with pytest.raises(ArtifactError, match=study.path(row).name):
        study.result(row)


def test_missing_images_are_an_input_error(base, tmp_path):
    with pytest.raises(InputError, match="--data"):
        Study(base.updated({"data.source.uri": str(tmp_path / "none")}), TINY, tmp_path)
    command = [sys.executable, "-m", "studies.utility", "--data", str(tmp_path / "none.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == InputError.exit_code
    assert done.stderr.startswith("InputError: the study reads one local file")


# ---- budget -------------------------------------------------------------------------------------


def test_a_row_is_expected_to_take_as_long_as_the_longest_of_its_method(study):
    rows = [Row(method="fedemb", seed=seed) for seed in range(3)]
    assert estimate(study, rows[2], rows) == 0.0
    put(study, rows[0], seconds=20.0)
    put(study, rows[1], seconds=30.0)
    assert estimate(study, rows[2], rows) == 30.0
    assert estimate(study, Row(method="fedavg"), rows) == 30.0


def test_a_row_that_would_pass_the_budget_is_not_started(study):
    rows = [Row(method="fedemb", seed=seed) for seed in range(3)]
    put(study, rows[0], seconds=1000.0)
    said = []
    left = execute(study, rows, budget=900.0, jobs=1, say=said.append)
    assert left == rows[1:]
    assert "2 rows left" in said[-1]
    assert not study.path(rows[1]).exists()


# ---- table --------------------------------------------------------------------------------------


def test_table_arithmetic():
    def row(method, noise=0.0, seed=0):
        return Row(stage="final", method=method, noise=noise, seed=seed)

    found = [
        (row("public_only"), result(0.30, (0.2, 0.4))),
        (row("public_only", seed=1), result(0.32, (0.2, 0.4))),
        (row("centralized"), result(0.50)),
        (row("fedemb", 1e-2), result(0.40, (0.3, 0.4))),
        (row("fedemb", 1e-2, 1), result(0.44, (0.3, 0.5))),
        (row("fedavg", 1e-2, 7), result(0.20)),
    ]
    price = {"epsilon": 1.5, "examples": 3e8, "population": 10**5}
    lines = summarise(found, {("fedemb", 1e-2): [price, price, price]})
    by_method = {line.method: line for line in lines}
    ours = by_method["fedemb"]
    assert ours.recall["0.001"] == pytest.approx(0.42)
    assert ours.spread == pytest.approx(np.std([0.40, 0.44], ddof=1))
    assert ours.relative == pytest.approx(0.42 / 0.50 - 1)
    assert ours.gain == pytest.approx(0.11)  # (0.40 - 0.30 + 0.44 - 0.32) / 2
    # Draws are paired by person and averaged over seeds: (0.1 + 0.1) / 2 and (0.0 + 0.1) / 2.
    assert ours.gain_low == pytest.approx(0.05 + 0.025 * 0.05)
    assert ours.gain_high == pytest.approx(0.05 + 0.975 * 0.05)
    assert by_method["public_only"].gain is None
    assert by_method["centralized"].spread is None
    assert by_method["fedavg"].gain is None, "no public row of that seed"
    text = markdown(HEADER, [cells(line) for line in lines])
    assert len({line.count("|") for line in text}) == 1
    assert "| DP-FedEmb | 0.01 | 2 | 0.420 ± 0.028 | 0.520 | 0.900 | -16 % | +0.110 [" in text[4]
    again = [*lines, replace(ours, method="fedavg")]
    assert price_cells(again) == [("DP-FedEmb, DP-FedAvg", "0.01", "1.5 (3e8)", "-", "-")]
    assert "outside the 95 % interval" in verdict(lines)
    assert "+0.220 against DP-FedAvg" in verdict(lines)


def test_ablations_are_compared_with_the_first_row():
    found = [(Row(label="a", method="fedemb"), result(0.4))]
    found += [(Row(label="b", method="fedemb", seed=1), result(0.3))]
    assert [row[-1] for row in ablation_cells(found)] == ["+0.000", "-0.100"]


# ---- price --------------------------------------------------------------------------------------


def test_the_certified_cohort_is_the_smallest_tried_that_reaches_the_target():
    from fedemb.privacy.accounting.accounting import price

    found = certify(GroupPoissonGaussian, 1e-2, 10, 32, 1_000_000)
    assert found.noise_multiplier == pytest.approx(1e-2 * found.clients_per_round)
    assert found.epsilon <= TARGET
    tried = cohorts(1e-2, 1_000_000 // 32)
    assert tried[0] == int(LEAST_NOISE / 1e-2)
    assert tried == sorted(set(tried))
    before = tried[tried.index(found.clients_per_round) - 1]
    for clients, wanted in ((found.clients_per_round, True), (before, False)):
        cohort = Cohort(
            population=1_000_000,
            users_per_client=32,
            clients_per_round=clients,
            noise_multiplier=1e-2 * clients,
            rounds=10,
        )
        plan = GroupPoissonGaussian.at(cohort)
        epsilon = price(plan.event(), plan.relation, found.delta).epsilon
        assert (epsilon <= TARGET) is wanted
    assert found.examples(users_per_client=32, images_per_user=20, visits=20) == (
        found.clients_per_round * 32 * 20 * 20
    )


@pytest.mark.statistical
def test_correlated_noise_of_a_row_is_as_strong_in_running_sums(base):
    """Root mean square over rounds within 5 %; 5,000 independent numbers give 1 %. Fixed key."""
    from fedemb.privacy.queries import build_mechanism
    from studies.utility.train import with_noise

    size, rounds, noise = 5000, 12, 1e-2
    strength = {}
    for method in ("fedemb", "ftrl"):
        row = Row(method=method, noise=noise, settings={"mechanism.rounds": rounds})
        plan = plan_mechanism(with_noise(row.config(base, 640), noise))
        mechanism = build_mechanism(plan, bytes(32), method, 1, "")
        zeros = mechanism.initial_sample_state(size)
        means = np.stack([mechanism.aggregate(r, zeros).mean for r in range(rounds)])
        strength[method] = np.sqrt(np.square(np.cumsum(means, axis=0)).mean())
    expected = noise * np.sqrt((rounds + 1) / 2)
    assert strength["fedemb"] == pytest.approx(expected, rel=0.05)
    assert strength["ftrl"] == pytest.approx(expected, rel=0.05)


# ---- the whole of it ----------------------------------------------------------------------------


def test_a_tiny_study_runs_resumes_and_reports(study):
    small = {"stage": "final", "users_per_client": 20, "clients_per_round": 1}
    rows = [
        Row(method="public_only", **small),
        Row(method="fedemb", noise=1e-2, **small),
        Row(method="fedavg", noise=1e-2, **small),
        Row(method="ftrl", noise=1e-2, **small),
    ]
    said = []
    assert execute(study, rows, budget=1e6, jobs=1, say=said.append) == []
    assert said[0] == "0 of 4 rows are there, 4 to run"
    assert len(said) == 5
    for row in rows:
        found = study.result(row)
        assert found["people"] == {"train": 46, "evaluation": 24}, "Greek is drawn"
        # Noise is fresh each time, and two steps of it can leave nothing at the strict rate.
        assert 0 <= found["recall"]["0.001"] <= found["recall"]["0.01"] <= 1
        assert found["recall"]["0.01"] > 0
    dimensions = [study.result(row)["last_rounds"].get("dimensions") for row in rows]
    assert dimensions[2] - dimensions[1] == 46 * 16, "FedAvg's head is clipped and noised too"

    before = {path: path.stat().st_mtime_ns for path in study.cache.rglob("*.json")}
    assert execute(study, rows, budget=1e6, jobs=1, say=said.append) == []
    assert said[-1] == "4 of 4 rows are there, 0 to run"
    assert {path: path.stat().st_mtime_ns for path in study.cache.rglob("*.json")} == before

    for row in rows[1:]:  # prices are tested above, and take a minute each
        write_prices(study, row)
    printed = write_report(study, rows, [])
    assert sum("DP-" in line for line in printed) >= 3
    assert (study.cache / "study.md").read_text().startswith("| method |")
    page = (study.cache / "study.html").read_text()
    assert "://" not in page.replace("http://www.w3.org", "")
    drawing = ET.fromstring((study.cache / "study.svg").read_bytes())
    assert "prefers-color-scheme" in drawing[0].text
    assert json.loads((study.cache / "study.json").read_text())["lines"][1]["noise"] == 1e-2


def write_prices(study, row):
    from studies.utility.write import price_path

    path = price_path(study, row)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": "fedemb/study_prices/1", "certificates": []}))
