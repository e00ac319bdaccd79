"""A policy record is read back with terms that can hold, or not at all."""

import math

import pytest

from fedemb.errors import LedgerError
from fedemb.ledger.terms import PolicyTerms
from tests.kit import ledger_kit

LEAST = ledger_kit.terms().users_lower_bound


@pytest.mark.parametrize(
    "changes",
    [
        {"renyi_order": 512.0},
        {"renyi_order": math.nextafter(1.0, 2.0)},
        {"delta": math.nextafter(0.0, 1.0)},
        {"delta": math.nextafter(1 / LEAST, 0.0)},
        {"epsilon_cap": math.nextafter(0.0, 1.0)},
        {"approvals": 0},
        {"unit": "image"},
        {"audit_level": "full"},
    ],
    ids=str,
)
def test_terms_within_bounds_are_read_back(changes):
    terms = ledger_kit.terms(**changes)
    assert PolicyTerms.from_json(terms.to_json()) == terms


@pytest.mark.parametrize(
    "changes",
    [
        {"renyi_order": math.nextafter(512.0, 513.0)},
        {"renyi_order": 1.0},
        {"renyi_order": math.nan},
        {"delta": 0.0},
        {"delta": -1e-9},
        {"delta": 1 / LEAST},
        {"delta": math.nan},
        {"epsilon_cap": 4},  # of another type than the signed one
        {"epsilon_cap": 0.0},
        {"epsilon_cap": math.inf},
        {"epsilon_cap": math.nan},
        {"approvals": -1},
        {"unit": "household"},
        {"audit_level": "none"},
        {"composition": "planned"},
        {"composition": "basic"},
        {"rollback_anchor_sha": "0" * 63},
        {"trust_sha": "G" * 64},
    ],
    ids=str,
)
def test_terms_out_of_bounds_are_refused(changes):
    with pytest.raises(LedgerError, match=r"out of bounds|wrong type"):
        PolicyTerms.from_json(ledger_kit.terms(**changes).to_json())


def test_an_evaluation_in_no_block_is_refused():
    body = ledger_kit.terms().to_json()
    body["users"]["blocks_per_cohort"] = 0
    with pytest.raises(LedgerError, match="out of bounds"):
        PolicyTerms.from_json(body)
