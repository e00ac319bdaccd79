"""evaluate_embeddings over a finished run: report, page, comparisons, bad input."""

import json
import re
import shutil

import numpy as np
import pytest
from evaluation_run import FinishedRun, config, write_users

from fedemb.documents.artifacts import read_json, write_json
from fedemb.documents.evidence import read_document
from fedemb.errors import ArtifactError
from fedemb.steps.evaluate_embeddings.evaluate import SCHEMA, run
from fedemb.steps.evaluate_embeddings.previous import embedding_space_id

SUBGROUPS = {"data.source.columns.subgroup": "group"}


@pytest.fixture(scope="module")
def report(finished, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    settings = config(
        **SUBGROUPS, **{"evaluation.previous_release": str(finished.root / "pretrained")}
    )
    returned = run(finished.context(settings, folder))
    read_document(folder / "report.json", "utility")  # of the form the gate wants
    return returned, read_json(folder / "report.json", SCHEMA), (folder / "report.html").read_text()


def test_report_on_disk_is_what_was_returned(report):
    assert json.loads(json.dumps(report[0])) == report[1]


def test_trained_model_beats_public_and_untrained_backbones(report):
    _, document, _ = report
    for name in ("public_backbone", "untrained"):
        assert document[name]["difference"]["0.001"]["low"] > 0
        assert document[name]["recall_at_far"].keys() == document["recall_at_far"].keys()
    assert document["centralized"] is None
    assert document["utility_drop"] is None


def test_every_estimate_lies_in_its_interval(report):
    def estimates(node):
        if isinstance(node, dict):
            if {"value", "low", "high"} <= node.keys():
                yield node
            for child in node.values():
                yield from estimates(child)

    found = list(estimates({k: v for k, v in report[1].items() if k != "subgroups"}))
    assert len(found) > 20
    assert all(e["low"] <= e["high"] for e in found)


def test_sentence_says_recall_comparison_and_the_page_whom_the_guarantee_covers(report):
    _, document, page = report
    recall = document["recall_at_far"]["0.001"]["value"]
    assert f"{100 * recall:.1f} %" in document["sentence"]
    assert "more than the public backbone" in document["sentence"]
    assert "accepts 1 in 1,000 of the others" in document["sentence"]
    assert document["sentence"] in re.sub(r"</?span[^>]*>", "", page)
    assert "covers training users only" in page
    assert "without noise" in page


def test_subgroups_are_listed_worst_first(report):
    groups = report[1]["subgroups"]["measured"]
    assert [group["identities"] for group in groups] == [24, 24, 24]
    values = [group["recall_at_own_threshold"]["value"] for group in groups]
    assert values == sorted(values)
    assert all(group["false_accept_rate_at_common_threshold"]["value"] < 0.05 for group in groups)


def test_old_gallery_is_measured_and_the_spaces_have_names(report):
    previous = report[1]["previous_release"]
    assert previous["comparable"]
    assert previous["old"]["recall_at_far"] == report[1]["public_backbone"]["recall_at_far"]
    crossed = previous["new_against_old"]["recall_at_far"]["0.001"]["value"]
    assert crossed < report[1]["recall_at_far"]["0.001"]["value"]
    assert previous["old_embedding_space_id"] != report[1]["embedding_space_id"]


def test_embedding_space_depends_on_weights_and_on_what_the_model_sees():
    model = config().model
    one = embedding_space_id("a" * 64, model)
    assert one == embedding_space_id("a" * 64, model)
    assert one != embedding_space_id("b" * 64, model)
    assert one != embedding_space_id("a" * 64, model.model_copy(update={"channels": 3}))


def test_the_same_run_gives_the_same_bytes(finished, tmp_path):
    settings = config(**{"evaluation.max_images": 60})
    one, other = tmp_path / "a", tmp_path / "b"
    for folder in (one, other):
        folder.mkdir()
        run(finished.context(settings, folder))
    for name in ("report.json", "report.html"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    assert read_json(one / "report.json", SCHEMA)["evaluated"]["images"] == 60


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished.root, tmp_path / "run")
    return FinishedRun(tmp_path / "run")


@pytest.mark.parametrize("users", [0, 1])
def test_too_few_held_out_users_give_a_report_without_figures(copied, tmp_path, users):
    shutil.rmtree(copied.private / "evaluation")
    write_users(copied.private / "evaluation", users)
    report = run(copied.context(config(), tmp_path))
    read_document(tmp_path / "report.json", "utility")
    assert report["measured"] is False
    assert report["recall_at_far"] == {}
    assert "hold out more users" in report["sentence"]
    assert report["sentence"] in (tmp_path / "report.html").read_text()


def test_model_of_another_run_is_refused(copied, tmp_path):
    with pytest.raises(ArtifactError, match="another run"):
        run(copied.context(config(), tmp_path, run_id="run-2"))


def test_model_of_another_schema_is_refused(copied, tmp_path):
    write_json(copied.root / "model" / "model.json", "fedemb/model/9", {})
    with pytest.raises(ArtifactError, match="fedemb/model/1"):
        run(copied.context(config(), tmp_path))


def test_damaged_backbone_is_one_sentence(copied, tmp_path):
    (copied.root / "model" / "backbone.keras").write_bytes(b"not a model")
    with pytest.raises(ArtifactError, match="cannot be loaded"):
        run(copied.context(config(), tmp_path))


def test_previous_release_of_another_shape_is_reported_not_raised(copied, tmp_path):
    from fedemb.embedding import build_backbone

    other = config().model.model_copy(update={"embedding_dim": 8})
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    build_backbone(other, seed=0).save(bundle / "backbone.keras")
    settings = config(**{"evaluation.previous_release": str(bundle)})
    report = run(copied.context(settings, tmp_path))
    read_document(tmp_path / "report.json", "utility")
    assert report["previous_release"]["comparable"] is False
    assert "embedding_dim" in report["previous_release"]["reason"]


def test_without_public_pretraining_the_start_is_called_untrained(finished, tmp_path):
    settings = config(**{"pretraining.kind": "none", "evaluation.max_images": 80})
    report = run(finished.context(settings, tmp_path))
    read_document(tmp_path / "report.json", "utility")
    assert report["untrained"] is None
    assert "an untrained backbone" in report["sentence"]
    assert "public backbone" not in report["sentence"]


@pytest.mark.slow
def test_beam_and_this_process_embed_alike(finished):
    from fedemb.data.client_data import UserStore
    from fedemb.embedding.loading import load_backbone
    from fedemb.steps.evaluate_embeddings.beam import embed_users_beam
    from fedemb.steps.evaluate_embeddings.embed import embed_users

    settings = config(**{"evaluation.max_images": 101})
    store = UserStore(finished.private / "evaluation")
    model = load_backbone(finished.root / "model" / "backbone.keras", settings.model)
    here, one = embed_users(store, {"model": model}, settings)
    there, two = embed_users_beam(store, {"model": model}, settings, ["--runner=DirectRunner"])
    assert np.abs(one["model"] - two["model"]).max() < 1e-5
    for name in ("labels", "users", "subgroups"):
        assert (getattr(here, name) == getattr(there, name)).all()


def test_a_simulation_prints_the_utility_drop(finished, tmp_path):
    settings = config(
        **{
            "purpose": "simulation",
            "evaluation.centralized_baseline": True,
            "evaluation.centralized_epochs": 2,
        }
    )
    report = run(finished.context(settings, tmp_path))
    read_document(tmp_path / "report.json", "utility")
    drop = report["utility_drop"]["0.001"]
    central, own = (part["recall_at_far"]["0.001"] for part in (report["centralized"], report))
    assert drop["value"] == pytest.approx(central["value"] - own["value"], abs=1e-5)
    assert "central training without privacy" in report["sentence"]
