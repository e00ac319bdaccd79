"""The headline of a run: one state from its documents, at most twelve words, figures in order."""

import pytest

from fedemb.documents.fields import Interval
from fedemb.documents.verdict import VerdictDocument
from fedemb.reports.headline import WORDS, Failure, Figures, RunFacts, headline

SHA = "ab" * 32
WAIVER = {
    "code": "no_gain_over_public",
    "actor": "ada",
    "reason": "first release of a new start, agreed with the board on Monday",
    "sequence": 7,
}


def verdict(**changes) -> VerdictDocument:
    fields = {
        "allow": True,
        "simulation": False,
        "reasons": [],
        "waived": [],
        "audit_level": "full",
        "config_sha": SHA,
        "model_sha": SHA,
        "report_sha": SHA,
        "checks": [],
        "waivers": [],
        "approvals": [],
        "approvals_needed": 0,
        "ledger_sequence": 8,
        "name": "embedding",
        "version": "week-1",
    }
    return VerdictDocument.of_fields({**fields, **changes})


def denied(*reasons: str, **changes) -> VerdictDocument:
    return verdict(allow=False, reasons=list(reasons), **changes)


SUPERSEDED = Failure("train_dp_fedemb", 3, "Superseded")
CASES = {
    "released": (RunFacts(verdict(), released=True), "Released", 0),
    "released, and a pod of it failed": (
        RunFacts(verdict(), released=True, failures=[SUPERSEDED], completed=False),
        "Released",
        0,
    ),
    "released with a waiver": (
        RunFacts(verdict(waived=[WAIVER["code"]], waivers=[WAIVER]), released=True),
        "Released with a waiver by ada: first release of a new start…",
        0,
    ),
    "waiting": (
        RunFacts(
            denied(
                "not_approved",
                approvals=[{"actor": "ada", "sequence": 9}],
                approvals_needed=2,
            )
        ),
        "Waiting for approval: 1 of 2 given",
        6,
    ),
    "waiting, and something else denies": (
        RunFacts(denied("not_approved", "epsilon_above_cap")),
        "Refused: epsilon above cap",
        3,
    ),
    "refused by the gate": (
        RunFacts(denied("report_differs", "clock_skewed", "utility_stale")),
        "Refused: report differs and 2 more",
        3,
    ),
    "refused before the gate": (
        RunFacts(failures=[Failure("reserve_budget", 3, "BudgetExceeded")]),
        "Refused: reserve_budget, budget exceeded",
        3,
    ),
    "stopped": (
        RunFacts(failures=[Failure("train_dp_fedemb", 4, "StorageError")]),
        "Stopped: train_dp_fedemb, a store could not be reached",
        4,
    ),
    "lost": (RunFacts(completed=False), "Stopped: no step reported an error", 1),
    "running again after a denial": (
        RunFacts(denied("utility_stale"), running="evaluate_embeddings"),
        "Running: evaluate_embeddings",
        None,
    ),
    "simulation": (
        RunFacts(denied(simulation=True), simulation=True),
        "Simulation: never released",
        0,
    ),
    "allowed, not released, lost": (
        RunFacts(verdict(), completed=False),
        "Stopped: no step reported an error",
        1,
    ),
    "nothing known": (
        RunFacts(),
        "Unknown: no verdict, and the state of the run is not known",
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_state_is_derived_from_the_documents(case):
    facts, title, exit_code = CASES[case]
    found = headline(facts)
    assert (found.title, found.exit_code) == (title, exit_code)
    assert found.title.startswith(found.state)
    assert len(found.title.split()) <= WORDS


def test_epsilon_of_the_person_comes_first_then_of_the_run_then_the_gain():
    gain = Interval(value=0.042, low=0.01, high=0.074)
    figures = Figures(
        epsilon_all=7.3412, epsilon_run=3.1, cap=8, delta=1e-6, gain=gain, over="raw pixels"
    )
    assert [(row.value, row.note) for row in figures.rows()] == [
        ("7.34", "of the cap 8 at delta 1e-06"),
        ("3.1", "at delta 1e-06"),
        ("+4.2 points", "95 % interval [+1.0, +7.4]; over raw pixels"),
    ]
    assert figures.sentence() == (
        "epsilon of one user 7.34 (all runs), 3.1 (this run); gain +4.2 points [+1.0, +7.4]"
    )
    assert [row.value for row in Figures().rows()] == ["-", "-", "not measured"]


def test_only_a_clean_release_with_a_certain_gain_is_green():
    chance = Interval(value=0.01, low=-0.01, high=0.03)
    released = headline(RunFacts(verdict(), released=True))
    assert released.tone == "good"
    assert headline(CASES["released with a waiver"][0]).tone == "plain"
    assert headline(CASES["waiting"][0]).tone == "plain"
    assert headline(CASES["refused by the gate"][0]).tone == "bad"
    from dataclasses import replace

    assert replace(released, figures=Figures(gain=chance)).tone == "plain"
