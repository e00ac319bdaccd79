"""The headline of a release, for its card, for registries and for `fedemb verify`."""

from __future__ import annotations

from collections.abc import Sequence

from fedemb.documents.evidence import Evidence
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.foundation.document import Written
from fedemb.gate.decide import applied_waivers
from fedemb.ledger import Ledger
from fedemb.reports.headline import Headline, RunFacts, headline


def release_headline(
    evidence: Evidence, report: Written[PrivacyReport], waived: Sequence[str], ledger: Ledger
) -> Headline:
    """Returns the headline of a model that the gate allowed."""
    facts = RunFacts(report=report.body, utility=evidence.utility.body, released=True)
    return headline(facts, waivers=applied_waivers(ledger, waived, report.body))
