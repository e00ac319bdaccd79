"""The step that trains classifiers: one run, killed at every act of a round, resumed, replayed."""

import json

import numpy as np
import pytest

from fedemb.documents.evidence import MODEL_FILES
from fedemb.errors import PlanMismatch
from fedemb.foundation.canonical_json import tree_digests
from fedemb.models.backbone_files import load_backbone
from fedemb.training import working_state
from fedemb.training.working_state import RoundLog
from tests.kit.pipeline_runs.training_run import classifier_config, killed_at, prepare

ROUNDS = 3
SETTINGS = {
    "all layers": classifier_config(),
    "head": classifier_config(
        **{
            "model.trainable": "head",
            "training.unit_gradient": {"images_per_unit": 2, "microbatch": 4},
        }
    ),
}


@pytest.fixture(scope="module", params=SETTINGS)
def prepared(request, tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("prepared"), SETTINGS[request.param], users=101)


@pytest.fixture(scope="module")
def finished(prepared, tmp_path_factory):
    run = prepared.copy(tmp_path_factory.mktemp("finished") / "run")
    run.train()
    return run


def _same_model(one, other):
    assert tree_digests(one.root / "model") == tree_digests(other.root / "model")
    assert set(tree_digests(one.root / "model")) == MODEL_FILES


def test_model_is_backbone_and_head_and_only_the_group_that_trains_has_moved(finished):
    model, start = (
        load_backbone(finished.root / folder / "backbone.keras", finished.config.model)
        for folder in ("model", "pretrained")
    )
    assert model.output_shape == (None, 3)
    moved = {
        after.path
        for after, before in zip(model.weights, start.weights, strict=True)
        if not np.array_equal(after.numpy(), before.numpy())
    }
    head = {"logits/kernel", "logits/bias"}
    assert moved == head if finished.config.model.trainable == "head" else moved > head
    card = json.loads((finished.root / "model" / "model.json").read_text())
    assert card["rounds_run"] == ROUNDS


def test_round_log_prices_each_round_and_holds_public_fields_only(finished):
    lines = (finished.root / "model" / "rounds.jsonl").read_text().splitlines()
    rounds = [json.loads(line) for line in lines]
    assert [entry["round"] for entry in rounds] == list(range(ROUNDS))
    for entry in rounds:
        assert set(entry) == {"round", "clients_planned", "output_sha", "event"}
        assert entry["clients_planned"] == 12.0
        assert entry["event"]["sampling_probability"] == 0.3


ACTS = (
    (RoundLog, "commit", False),
    (RoundLog, "commit", True),
    (working_state, "save_checkpoint", True),
)
"""Where a kill strikes: before and after a round comes on record, and after its checkpoint."""


@pytest.mark.long
def test_killed_around_every_round_resumes_to_the_same_bits(prepared, finished, tmp_path):
    ready = prepared.copy(tmp_path / "run")
    for _ in range(2):  # each time the last act comes a round later: all rounds are met
        for place, name, after in ACTS:
            with killed_at(place, name, after=after):
                ready.train()
    ready.train()
    _same_model(ready, finished)


@pytest.mark.parametrize(
    "change", [{"training.unit_gradient.microbatch": 8}, {"training.backend": "jax"}]
)
def test_another_microbatch_or_backend_is_another_run(prepared, tmp_path, change):
    ready = prepared.copy(tmp_path / "run")
    changed = ready.config.updated(change)
    with pytest.raises(PlanMismatch, match="another configuration"):
        ready.train(changed)
    assert not (ready.private / "train").exists()


def test_two_rounds_solve_the_head_and_leave_no_features_behind(tmp_path):
    solving = {"kind": "least_squares", "noise_multiplier": 1.0, "units_per_round": 100}
    unit = {"images_per_unit": 2, "microbatch": 4}
    changes = {"model.trainable": "head", "training.unit_gradient": unit, "mechanism": solving}
    settings = classifier_config(**changes)
    run = prepare(tmp_path / "run", settings, users=101)
    card = run.train()
    assert card["rounds_run"] == 2
    audit = card["mechanism_audit"]
    assert (audit["replay"], audit["fold"]["same"]) == ({"rounds": 2, "failed": []}, True)
    lines = (run.root / "model" / "rounds.jsonl").read_text().splitlines()
    noise = [json.loads(line)["event"]["noise_multiplier"] for line in lines]
    assert noise == [1.0, 4.0]
    head = load_backbone(run.root / "model" / "backbone.keras", run.config.model).weights[-2:]
    assert all(np.abs(weight.numpy()).max() > 0 for weight in head)
    assert not [path for path in run.root.rglob("*") if "features" in path.parts]
    with pytest.raises(ValueError, match="solves for the head"):
        classifier_config(mechanism=solving, **{"model.trainable": "all"})
