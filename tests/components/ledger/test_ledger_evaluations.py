"""Every measurement on evaluation people is a signed record, counted one by one."""

import pytest

from fedemb.errors import LedgerError, Refused, Superseded
from fedemb.keys.trust import Signer
from tests.kit import ledger_kit as kit_

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


def test_each_evaluation_counts_and_none_changes_what_is_charged(kit):
    ledger = committed(kit)
    spent = ledger.spent("all/0")
    for number in (1, 2):
        record = ledger.record_evaluation("monday", MODEL, evaluator(kit))
        assert (record.kind, record.run_id, record.attempt) == ("evaluation", "monday", 1)
        assert len(ledger.state.evaluations) == number
    again = kit.reader()
    again.verify()
    assert [record.body["model_sha"] for record in again.state.evaluations] == [MODEL, MODEL]
    assert again.spent("all/0") == spent


def test_only_the_last_start_of_an_evaluation_goes_on(kit):
    """Two processes of one step, each with its own view of the ledger."""
    committed(kit)
    first, second = kit.reader(), kit.reader()
    early = first.record_evaluation("monday", MODEL, evaluator(kit))
    first.check_latest_evaluation(early)
    late = second.record_evaluation("monday", MODEL, evaluator(kit))
    with pytest.raises(Superseded, match="'monday' was started again"):
        first.check_latest_evaluation(early)
    second.check_latest_evaluation(late)
    assert len(kit.reader().state.evaluations) == 2, "both are counted"


def test_what_was_never_trained_to_its_end_is_not_measured(kit):
    ledger = kit.open()
    with pytest.raises(Refused, match="no committed model"):
        ledger.record_evaluation("monday", MODEL, evaluator(kit))
    kit_.bind(ledger, ledger.reserve(run_id="monday", content=kit_.content()))
    with pytest.raises(Refused, match="no committed model"):
        ledger.record_evaluation("monday", MODEL, evaluator(kit))


def test_written_evaluation_at_what_was_not_committed_breaks_the_ledger(kit):
    ledger = kit.open()
    body = {"reservation": 1, "model_sha": MODEL}
    kit_.bind(ledger, ledger.reserve(run_id="monday", content=kit_.content()))
    ledger._append(
        "evaluation", lambda: body, run_id="monday", attempt=lambda: 1, signer=evaluator(kit)
    )
    with pytest.raises(LedgerError, match="only a committed model is measured"):
        kit.reader().verify()


@pytest.mark.parametrize("role", ["ledger", "trainer"])
def test_a_evaluation_is_signed_by_evaluation_and_by_no_other(kit, role):
    ledger = committed(kit)
    with pytest.raises(LedgerError, match="'evaluate'"):
        ledger.record_evaluation("monday", MODEL, Signer.load_or_create(kit.keys, role))


def test_evaluation_signs_evaluations_and_nothing_else(kit):
    ledger = kit.reader()
    with pytest.raises(LedgerError, match="'ledger'"):
        ledger._append("void", lambda: {"reservation": 0, "reason": "x"}, signer=evaluator(kit))
