"""Averages beside the released one: written by the trainer, measured, never released.

One small training that keeps the released decay once more, the last weights, and a third average.
"""

import json
import shutil
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from fedemb.config import RunConfig
from fedemb.data.client_data import UserStore
from fedemb.documents.classifier import ClassifierReport
from fedemb.documents.evidence import MODEL_FILES
from fedemb.documents.model import Averages, ModelCard, average_file
from fedemb.engine import load_backbone
from fedemb.errors import ArtifactError, PlanMismatch
from fedemb.evaluation.held_out import apply_models
from fedemb.foundation.digests import tree_digests
from fedemb.foundation.document import read
from fedemb.gate.utility_rules import measured_as_asked
from fedemb.keys.signatures import Signer, write_signed
from fedemb.models.inference import classify
from fedemb.steps.evaluate_classifier import evaluate
from fedemb.steps.evaluate_classifier.page import classifier_page
from fedemb.training.round_log import RoundLog
from tests.kit.pipeline_runs.training_run import (
    RUN_ID,
    ReadyRun,
    classifier_config,
    finished_classifier,
    prepare,
)
from tests.kit.verified_folder import as_committed

RELEASED, OTHERS = 0.8, (0.8, 0.0, 0.5)
SERVER = {"learning_rate": 0.5, "momentum": 0.9, "ema_decay": RELEASED}
FEW = {"evaluation.bootstrap_samples": 20}


class Trained(NamedTuple):
    run: ReadyRun
    means: list[np.ndarray]
    """Of the rounds, noised."""


def _trained(folder, config: RunConfig) -> Trained:
    means, commit = [], RoundLog.commit

    def keeping(log, index, mechanism, output):
        means.append(np.asarray(output.mean, np.float64))
        return commit(log, index, mechanism, output)

    untrained = prepare(folder / "untrained", config).root
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundLog, "commit", keeping)
        root = finished_classifier(untrained, folder / "run", config)
    return Trained(ReadyRun(root, config), means)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    server = {**SERVER, "other_ema_decays": OTHERS}
    config = classifier_config(**{"training.server": server, **FEW})
    return _trained(tmp_path_factory.mktemp("averages"), config)


@pytest.fixture(scope="module")
def report(trained):
    evaluate.run(trained.run.context())
    return read(trained.run.root / "report.json", ClassifierReport)


def _flat(run, file):
    weights = load_backbone(run.root / file, run.config.model).weights
    return np.concatenate([np.asarray(weight, np.float64).ravel() for weight in weights])


def test_files_hold_the_averages_that_follow_from_the_noised_means(trained):
    weights, slot = _flat(trained.run, "pretrained/backbone.keras"), 0.0
    history = []
    for mean in trained.means:
        slot = 0.9 * slot + mean
        weights = weights + 0.5 * slot
        history.append(weights)
    files = ["model/backbone.keras"]
    files += [f"averages/{average_file(number + 1)}" for number in range(len(OTHERS))]
    for file, decay in zip(files, (RELEASED, *OTHERS), strict=True):
        shares = decay ** np.arange(len(history) - 1, -1, -1.0)
        expected = np.tensordot(shares / shares.sum(), np.array(history), 1)
        np.testing.assert_allclose(_flat(trained.run, file), expected, rtol=1e-4, atol=1e-6)


def test_the_model_artifact_holds_the_released_average_alone(trained):
    assert set(tree_digests(trained.run.root / "model")) == MODEL_FILES


def test_each_average_is_measured_on_the_same_images_in_the_same_look(trained, report):
    run, body = trained.run, report.body
    assert body.decays == (RELEASED, *OTHERS)
    again, last, third = body.averages.others
    fields = {"decay", "difference"}
    assert again.model_dump(exclude=fields) == body.model.model_dump()
    assert again.difference.value == again.difference.low == again.difference.high == 0
    store = UserStore(as_committed(run.private / "evaluation"))
    for number, found in ((2, last), (3, third)):
        model = load_backbone(run.root / "averages" / average_file(number), run.config.model)
        subjects, tables = apply_models(store, {"it": model}, run.config, classify)
        right = np.mean(tables["it"].argmax(axis=1) == subjects.labels)
        assert found.top_1.value == pytest.approx(right, abs=1e-6)
    assert len(run.context().ledger.state.evaluations) == 1


def test_training_users_in_the_place_of_held_out_ones_are_not_measured(trained, tmp_path):
    run = ReadyRun(tmp_path / "run", trained.run.config)
    shutil.copytree(trained.run.root, run.root)
    shutil.rmtree(run.private / "evaluation")
    shutil.copytree(run.private / "users", run.private / "evaluation")
    evaluations = len(run.context().ledger.state.evaluations)
    with pytest.raises(PlanMismatch, match="is not the folder the run is bound to"):
        evaluate.run(run.context())
    assert len(run.context().ledger.state.evaluations) == evaluations


def test_the_page_shows_each_average_and_that_the_released_one_was_fixed_before(report):
    page = classifier_page(report.body)
    assert "Averages of the weights" in page
    assert "The released one was fixed before any was measured" in page
    assert "0.8, released" in page


def _reasons(run, report, body):
    config = run.config
    case = SimpleNamespace(
        evidence=SimpleNamespace(
            utility=SimpleNamespace(body=body),
            model=read(run.root / "model" / "model.json", ModelCard),
            config=config,
            written=config.model_dump(mode="json"),
        ),
        reservation=SimpleNamespace(run_id=RUN_ID),
        trained_config=config,
        same_environment=True,
    )
    return [reason.sentence for reason in measured_as_asked(case) if "stale" in reason.code]


def test_the_gate_wants_every_average_that_the_configuration_names(trained, report):
    body = report.body
    assert _reasons(trained.run, report, body) == []
    fewer = body.averages.model_copy(update={"others": body.averages.others[1:]})
    for left_out in (None, fewer):
        wrong = body.model_copy(update={"averages": left_out})
        (sentence,) = _reasons(trained.run, report, wrong)
        assert "another averages" in sentence


@pytest.mark.long
def test_no_other_average_leaves_an_empty_list_and_nothing_to_show(tmp_path):
    run = _trained(tmp_path, classifier_config(**{"training.server": SERVER, **FEW})).run
    assert set(tree_digests(run.root / "averages")) == {"averages.json"}
    assert json.loads((run.root / "averages" / "averages.json").read_text())["others"] == []
    assert evaluate.run(run.context()).body.averages is None
    body = read(run.root / "report.json", ClassifierReport).body
    assert body.decays == ()
    assert "Averages of the weights" not in classifier_page(body)


@pytest.fixture
def copy(trained, tmp_path):
    shutil.copytree(trained.run.root, tmp_path / "run")
    return ReadyRun(tmp_path / "run", trained.run.config)


def test_an_average_that_the_trainer_did_not_sign_is_not_measured(copy):
    files = [copy.root / "averages" / average_file(number) for number in (1, 2)]
    shutil.copy(*files)
    with pytest.raises(
        ArtifactError, match=r"average-2\.keras in averages is not the one its step"
    ):
        evaluate.run(copy.context())


def test_averages_of_another_training_are_not_measured(copy):
    path = copy.root / "averages" / "averages.json"
    other = read(path, Averages).body.model_copy(update={"model_sha": "0" * 64})
    write_signed(path, other, Signer.newest(copy.context().keys, "trainer"))
    with pytest.raises(ArtifactError, match="Use model and averages of one training step"):
        evaluate.run(copy.context())
