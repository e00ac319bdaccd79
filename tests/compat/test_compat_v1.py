"""Version 1 of ledger, report and bundle stays readable, and means the same, for ever."""

from pathlib import Path

import pytest

from fedemb.documents.evidence import read_document
from fedemb.keys.trust import verify_document
from fedemb.ledger.ledger import TrustStore, open_ledger
from fedemb.steps.release_model.verify import verify_bundle

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"
TRUST = GOLDEN / "ledger" / "trust.json"


def test_ledger_of_version_1_verifies_and_charges_the_same():
    ledger = open_ledger(str(GOLDEN / "ledger"), "weekly", trust=TrustStore.load(TRUST))
    ledger.verify()
    assert [record.kind for record in ledger.chain.records] == [
        "policy",
        "reserve",
        "bind",
        "commit",
        "release",
    ]
    assert ledger.spent("all/0").epsilon == pytest.approx(1.2746748021448258, rel=1e-6)


def test_report_of_version_1_is_read_and_its_signature_holds():
    report = read_document(GOLDEN / "privacy_report.json", "report").body
    verify_document(report, TrustStore.load(TRUST), "report")
    assert report["accounting"]["epsilon"] == pytest.approx(0.4642628674469744, rel=0.01)


def test_bundle_of_version_1_verifies_offline_and_against_its_ledger():
    assert verify_bundle(str(GOLDEN / "bundle"), TRUST, str(GOLDEN / "ledger")) == []
