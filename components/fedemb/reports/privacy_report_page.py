"""Page of the privacy report, for lawyers, engineers and operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from markupsafe import Markup

from fedemb.documents.evidence import Evidence
from fedemb.documents.privacy_report import TRUST, PrivacyReport, assumptions, limitations
from fedemb.foundation.document import Written
from fedemb.ledger import Ledger, Spent
from fedemb.ledger.budget import spent
from fedemb.ledger.state import PricePoint
from fedemb.privacy.accounting.units import UNITS
from fedemb.privacy.mechanisms.registry import plan_from_json
from fedemb.reports import privacy_report_words as words
from fedemb.reports.audit_words import audit_sentence
from fedemb.reports.charts import Axis, Line, line_chart
from fedemb.reports.epsilon_meaning import DEPLOYMENTS, meaning
from fedemb.reports.mechanism_text import TEXTS, comparison
from fedemb.reports.report import render
from fedemb.reports.utility_words import floors_sentence, utility_sentence

if TYPE_CHECKING:
    from fedemb.reports.lineage import StepLineage

_TICKS = 6
"""Maximum number of dates on the axis of spending."""


def report_page(
    signed: Written[PrivacyReport],
    evidence: Evidence,
    ledger: Ledger,
    lineage: Sequence[StepLineage],
) -> str:
    """Renders `privacy_report.html`; spending over time and waivers come from the ledger."""
    report, cumulative = signed.body, signed.body.cumulative
    block = ledger.state.worst_block([row.block for row in cumulative.blocks])
    last = cumulative.ledger_sequence
    points = ledger.state.price_history(block, last) if block else []
    before = _before(report, ledger, block)
    after = cumulative.max_block_epsilon
    simulation = report.purpose == "simulation"
    plan, release = plan_from_json(evidence.plan.body.plan), evidence.config.release
    within = after is not None and after <= cumulative.cap
    return render(
        "privacy_report.html",
        tone="plain" if simulation else "good" if within else "bad",
        report=signed.json,
        simulation=simulation,
        within=within,
        block=block,
        before=before.epsilon if before else 0.0,
        after=after if after is not None else math.inf,
        meaning=meaning(plan, report.guarantee),
        deployments=DEPLOYMENTS,
        words=words,
        trust=TRUST,
        unit=UNITS[plan.unit],
        method="DP-SGD" if evidence.config.task == "classification" else "DP-FedEmb",
        assumptions=assumptions(plan.unit),
        limitations=limitations(plan.unit),
        plan=plan,
        backend=words.BACKENDS[report.mechanism.backend],
        sampler=TEXTS[plan.kind].sampler,
        samplers={other.name: comparison(plan, other.name) for other in plan.comparisons()},
        guarantee=words.report_sentence(report),
        audit=audit_sentence(evidence.audit.body),
        self_test_passed=not report.audit.self_test.failed,
        utility=utility_sentence(evidence.utility.body),
        floors=floors_sentence(release.min_gain_over_public, release.no_worse_than),
        evaluations=sum(record.sequence <= last for record in ledger.state.evaluations),
        config=evidence.config,
        identifiers=ledger.terms.identifiers,
        external=[record for record in ledger.state.external if record.sequence <= last],
        waivers=[ledger.chain.records[item.sequence] for item in report.waivers],
        projections=evidence.plan.body.projections,
        lineage=lineage,
        curve=_curve(report),
        spending=_spending(points, cumulative.cap, UNITS[plan.unit].many),
    )


def _before(report: PrivacyReport, ledger: Ledger, block: str | None) -> Spent | None:
    """Returns the privacy loss of the worst block without this run."""
    if block is None:
        return None
    own = ledger.state.attempts[report.run_id, report.attempt]
    return spent(ledger.terms, ledger.state.charges(block, without=own))


def _curve(report: PrivacyReport) -> Markup | None:
    points = report.accounting.curve
    if not points:
        return None
    deltas, epsilons = [point[0] for point in points], [point[1] for point in points]
    delta = report.accounting.delta
    return line_chart(
        [Line("this run", deltas, epsilons)],
        x=Axis("delta", log=True),
        y=Axis("epsilon", limits=(0.0, max(epsilons) * 1.08)),
        alt="Epsilon of this run over delta, logarithmic delta axis; the policy's delta is marked",
        marks=[("policy", delta)],
    )


def _spending(points: list[PricePoint], cap: float, units: str) -> Markup | None:
    if not points:
        return None
    records = [0, *(point.sequence for point in points)]
    spent = [0.0, *(point.epsilon for point in points)]
    ends = [0, records[-1]]
    shown = points[:: -(-len(points) // _TICKS)]
    ticks = [
        (point.sequence, f"{point.sequence}\n{datetime.fromisoformat(point.time):%-d %b}")
        for point in shown
    ]
    return line_chart(
        [Line("spent", records, spent), Line("cap", ends, [cap, cap])],
        x=Axis("ledger record and its date", ticks=ticks),
        y=Axis("cumulative epsilon", limits=(0.0, max([cap, *spent]) * 1.08)),
        alt=f"Cumulative epsilon of the fullest block of {units} over the ledger's records, with "
        "its cap",
        steps=True,
    )
