"""10,000 records: shown in under 2 seconds, verified in under 5, of processor time."""

import time

import pytest

from fedemb.pipelines.cli import ledger_summary
from tests.kit import big_ledger
from tests.kit.pipeline_runs import honest_run


@pytest.mark.slow
def test_ten_thousand_records_are_shown_and_verified_in_time(tmp_path):
    run = honest_run.start(tmp_path)
    run.do_plan()
    run.do_reserve()
    big_ledger.grow(run, 10_000)
    started = time.process_time()
    ledger = ledger_summary.load(run.ledger_uri, None, None, signatures=False)
    found = ledger_summary.summary(ledger)
    shown = time.process_time() - started
    assert len(ledger.chain.records) >= 10_000
    assert len(found["runs"]) > 3000
    started = time.process_time()
    ledger_summary.load(run.ledger_uri, None, None, signatures=True).verify()
    verified = time.process_time() - started
    assert shown < 2, f"shown in {shown:.2f} s"
    assert verified < 5, f"verified in {verified:.2f} s"
