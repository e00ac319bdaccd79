"""Every measurement on evaluation people is a signed record, counted one by one."""

import ledger_kit as kit_
import pytest

from fedemb.errors import LedgerError, Refused
from fedemb.keys.signatures import Signer

MODEL = kit_.sha("model")


@pytest.fixture
def kit(tmp_path):
    return kit_.make(tmp_path)


def evaluator(kit):
    return Signer.load_or_create(kit.keys, "evaluate")


def committed(kit, run_id="monday"):
    ledger = kit.open()
    reservation = ledger.reserve(run_id=run_id, content=kit_.content())
    kit_.bind(ledger, reservation)
    kit_.commit(kit, ledger, reservation, 20)
    return kit.reader()


def test_each_look_counts_and_none_changes_what_is_charged(kit):
    ledger = committed(kit)
    spent = ledger.spent("all/0")
    for number in (1, 2):
        record = ledger.look("monday", MODEL, evaluator(kit))
        assert (record.kind, record.run_id, record.attempt) == ("look", "monday", 1)
        assert len(ledger.state.looks) == number
    again = kit.reader()
    again.verify()
    assert [record.body["model_sha"] for record in again.state.looks] == [MODEL, MODEL]
    assert again.spent("all/0") == spent


def test_what_was_never_trained_to_its_end_is_not_measured(kit):
    ledger = kit.open()
    with pytest.raises(Refused, match="no committed model"):
        ledger.look("monday", MODEL, evaluator(kit))
    kit_.bind(ledger, ledger.reserve(run_id="monday", content=kit_.content()))
    with pytest.raises(Refused, match="no committed model"):
        ledger.look("monday", MODEL, evaluator(kit))


@pytest.mark.parametrize("role", ["ledger", "trainer"])
def test_a_look_is_signed_by_evaluation_and_by_no_other(kit, role):
    ledger = committed(kit)
    with pytest.raises(LedgerError, match="'evaluate'"):
        ledger.look("monday", MODEL, Signer.load_or_create(kit.keys, role))


def test_evaluation_signs_looks_and_nothing_else(kit):
    ledger = kit.reader()
    with pytest.raises(LedgerError, match="'ledger'"):
        ledger._append("void", lambda: {"reservation": 0, "reason": "x"}, signer=evaluator(kit))
