"""Version 1 of ledger, report and bundle stays readable, and means the same, for ever."""

from pathlib import Path

import pytest

from fedemb.documents.privacy_report import PrivacyReport
from fedemb.foundation.document import read
from fedemb.keys.trust import TrustStore
from fedemb.ledger import open_ledger
from tests.kit.verified import problems_of

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
    report = read(GOLDEN / "privacy_report.json", PrivacyReport)
    TrustStore.load(TRUST).check(report)
    assert report.body.accounting.epsilon == pytest.approx(0.4642628674469744, rel=0.01)


def test_bundle_of_version_1_verifies_offline_and_against_its_ledger():
    assert problems_of(str(GOLDEN / "bundle"), TRUST, str(GOLDEN / "ledger")) == []
