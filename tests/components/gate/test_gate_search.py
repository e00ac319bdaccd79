"""A model that is the best of a private search: allowed only as it was declared and charged."""

import dataclasses
import json

import pytest

from fedemb.documents.evidence import read_evidence
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.errors import ConfigError, Refused
from fedemb.foundation.document import read
from fedemb.gate.decide import decide
from fedemb.ledger import read_reservation
from fedemb.privacy.accounting.events import event_from_json
from fedemb.privacy.mechanisms.registry import plan_mechanism
from fedemb.steps.plan_privacy import plan
from tests.kit.pipeline_runs import honest_run

RECIPES = {
    "short": {"mechanism.rounds": 4, "training.server.learning_rate": 0.5},
    "small-clip": {"mechanism.l2_norm_clip": 0.5},
}
SEARCH = {
    "data": "search",
    "method": "grid of two",
    "search": {"mean_trials": 3, "law": "geometric", "recipes": RECIPES},
}


def searched(root, recipe="short", **changes):
    """An honest run whose model is the best of a search, up to the gate."""
    run = honest_run.start(root, **{"tuning": SEARCH, **changes})
    run.do_plan()
    run.do_reserve()
    run.do_partition()
    run.do_train(recipe=recipe)
    run.do_measure()
    run.do_account()
    return run


def verdict_of(run, **changes):
    evidence = dataclasses.replace(read_evidence(run.config, run.artifacts), **changes)
    return decide(evidence, read(run.report, PrivacyReport), run.ledger())


def codes(verdict):
    return [reason.code for reason in verdict.reasons]


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_declared_and_charged_search_is_allowed(tmp_path, recipe):
    run = searched(tmp_path / "run", recipe)
    assert codes(verdict_of(run)) == []
    report = json.loads(run.report.read_text())
    found = report["tuning"]["search"]
    assert (found["recipe"], found["recipes"], found["mean_trials"]) == (recipe, 2, 3.0)
    assert found["epsilon_one_trial"] < report["accounting"]["epsilon"]
    assert report["accounting"]["event"]["type"] == "repeat_and_select"
    assert report["mechanism"]["rounds_planned"] == RECIPES[recipe].get("mechanism.rounds", 6)
    assert {"search_selection", "search_time"} <= set(report["limitations"])
    block = report["cumulative"]["blocks"][0]
    assert block["epsilon"] > found["epsilon_one_trial"], "the ledger is charged for the search"


def test_whole_search_is_charged_before_the_first_private_byte(tmp_path):
    run = honest_run.start(tmp_path / "run", tuning=SEARCH)
    run.do_plan()
    run.do_reserve()
    reserved = read_reservation(run.reservation)
    event = event_from_json(reserved.event)
    assert event == plan_mechanism(run.config).event()
    assert (event.mean, event.shape, event.event.count) == (3.0, 1.0, 6)
    spent = run.ledger().spent("all/0").epsilon
    single = honest_run.start(tmp_path / "single")
    single.do_plan()
    single.do_reserve()
    assert spent > 1.3 * single.ledger().spent("all/0").epsilon


def test_model_of_a_search_without_its_reservation_is_denied(tmp_path):
    """One run was reserved and priced; the model says that a search chose it."""
    run = honest_run.start(tmp_path / "run").until_gate()
    run.rewrite(run.model / "model.json", recipe="short")
    assert "search_not_reserved" in codes(verdict_of(run))


@pytest.mark.parametrize("recipe", [None, "other"])
def test_recipe_outside_the_list_is_denied(tmp_path, recipe):
    run = searched(tmp_path / "run")
    run.rewrite(run.model / "model.json", recipe=recipe)
    assert "recipe_not_declared" in codes(verdict_of(run))


def test_recipe_that_did_not_train_the_model_is_denied(tmp_path):
    run = searched(tmp_path / "run", "short")
    run.rewrite(run.model / "model.json", recipe="small-clip")
    assert "stopped_early" in codes(verdict_of(run)), "four rounds of six"


def test_price_of_one_run_in_place_of_the_search_is_denied(tmp_path, monkeypatch):
    """The plan was made and reserved as if one run were released."""
    run = searched(tmp_path / "run")
    event = json.loads(run.report.read_text())["accounting"]["event"]["event"]
    for document in (run.reservation, run.plan):
        run.rewrite(document, event=event)
    assert "event_differs" in codes(verdict_of(run))


def test_recipe_that_costs_more_is_denied_by_the_gate_and_before_the_charge(tmp_path, monkeypatch):
    dear = {**RECIPES, "dear": {"mechanism.noise_multiplier": 1.0}}
    tuned = {**SEARCH, "search": {**SEARCH["search"], "recipes": dear}}
    run = honest_run.start(tmp_path / "run", tuning=tuned)
    with pytest.raises(ConfigError, match=r"'dear' of tuning\.search costs more privacy"):
        run.do_plan()
    monkeypatch.setattr(plan, "check_recipes", lambda *_: None)
    run.do_plan()
    with pytest.raises(Refused, match=r"'dear'.*Nothing was charged"):
        run.do_reserve()
    monkeypatch.setattr("fedemb.gate.before_charge.check_recipes", lambda *_: None)
    run.do_reserve()
    run.do_partition()
    run.do_train(recipe="dear")
    run.do_measure()
    run.do_account()
    assert codes(verdict_of(run)) == ["recipe_above_price"]


def test_another_list_of_recipes_than_the_reserved_one_is_denied(tmp_path):
    run = searched(tmp_path / "run")
    search = {**SEARCH["search"], "recipes": {**RECIPES, "later": {"mechanism.l2_norm_clip": 2.0}}}
    changed = run.config.updated({"tuning": {**SEARCH, "search": search}})
    verdict = verdict_of(run, config=changed)
    assert not verdict.allow
    assert "not_what_was_reserved" in codes(verdict)
