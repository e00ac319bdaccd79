"""Pages of a run and of its reports: each a pure function of documents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_accounting.privacy_accountant import NeighboringRelation
from markupsafe import Markup

from fedemb.documents.audit import AuditReport, SelfTest, finding
from fedemb.documents.evidence import Evidence
from fedemb.documents.fields import Interval
from fedemb.documents.privacy_report import PrivacyReport, assumptions, limitations
from fedemb.documents.utility import (
    AnyUtility,
    ClassifierReport,
    Compared,
    ComparedClassifier,
    UtilityReport,
)
from fedemb.documents.verdict import VerdictDocument
from fedemb.errors import ArtifactError
from fedemb.foundation.document import Written
from fedemb.ledger import Ledger
from fedemb.ledger.budget import spent
from fedemb.privacy.guarantee import neighbours
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.registry import plan_from_json
from fedemb.privacy.section import UNITS
from fedemb.reports import privacy_text as words
from fedemb.reports.charts import Axis, Line, bar_chart, line_chart
from fedemb.reports.headline import Figure, Headline, RunFacts, State, headline
from fedemb.reports.lineage import steps_of
from fedemb.reports.report import figure, link, render, tone_of
from fedemb.reports.utility_text import (
    LIMITATIONS,
    attack_sentences,
    audit_answer,
    audit_sentence,
    covers,
    model_name,
    utility_sentence,
    utility_sentences,
)

if TYPE_CHECKING:
    from fedemb.runtime.step import Step


REPORTS = {
    "privacy_report": ("privacy_page", "Privacy report"),
    "utility_report": ("utility_page", "Utility report"),
    "audit_report": ("audit_page", "Audit report"),
    "verdict": ("verdict_page", "Gate checklist"),
}
"""Document -> the output that is its page, and its title."""

_USED = "Embed or classify photos: fedemb embed PHOTOS -m RELEASE -o FILE.parquet"
NEXT: Mapping[State, str] = {
    "Simulation": "For a release, set purpose=release and tuning (see fedemb config tuning).",
    "Released": _USED,
    "Released with a waiver": _USED,
}
"""State of a run that ended well -> next action; a refused or stopped run states its remedy."""


def run_page(
    facts: RunFacts, found: Headline, *, run: str, release: str | None, pages: Mapping[str, str]
) -> dict[str, object]:
    """Returns the content of `run_page.html` and `summary.md.j2`.

    Args:
      facts: documents and failures of the run.
      found: headline of the run.
      run: name of the run.
      release: the released bundle, or the cause of a run without release; None: no release.
      pages: output that is a page -> its address.
    """
    report, tiles, plan = facts.report, found.figures.rows(), None
    with suppress(ArtifactError):
        plan = facts.plan and plan_from_json(facts.plan.plan)
    if plan and report and report.purpose == "release":
        many = UNITS[plan.unit].many
        for rate, found_at_most in words.attack_rates(plan, report.guarantee)[:1]:
            label = f"Share of training {many} that an attacker finds"
            note = f"with wrong guesses on {words.percent(rate)} of the others; this run alone"
            tiles.insert(-1, Figure(label, f"≤ {words.percent(found_at_most)}", note))
    utility = utility_sentences(facts.utility) if facts.utility else ["not measured"]
    return {
        "headline": found,
        "tiles": tiles,
        "run": run,
        "policy": report and report.cumulative.policy_id,
        "time": report and report.time,
        "failed": facts.failures,
        "verdict": facts.verdict,
        "chart": facts.utility and _drawn(facts.utility)["chart"],
        "release": release,
        "closing": [
            ("guarantee", words.guarantee_lines(report, facts.plan)),
            ("utility", utility),
            *([("audit", [audit_answer(facts.audit, plan)])] if facts.audit and plan else []),
            ("release", [release or "none"]),
            *([("next", [NEXT[found.state]])] if found.state in NEXT else []),
        ],
        "reports": [
            (title, page, pages[page]) for page, title in REPORTS.values() if page in pages
        ],
    }


RUN_COLUMNS = (
    "run",
    "headline",
    "epsilon, all runs",
    "epsilon",
    "gain",
    "time",
    "by",
    "code",
    "data",
)


def runs_page(folder: Path, rows: Sequence[Sequence[str]]) -> str:
    """Renders `runs_page.html`; each row has a cell for each of `RUN_COLUMNS`, the run first.

    Runs whose own page is in the folder are links.
    """
    pages = {run: f"{run}/index.html" for run, *_ in rows}
    linked = [
        [link(run, pages[run]) if (folder / pages[run]).is_file() else run, *cells]
        for run, *cells in rows
    ]
    return render("runs_page.html", rows=linked, columns=RUN_COLUMNS)


def report_page(
    signed: Written[PrivacyReport], evidence: Evidence, ledger: Ledger, steps: Sequence[Step]
) -> str:
    """Renders `privacy_report.html`; waivers and external charges come from the ledger.

    `steps` are those that led to the report, see `step.leading_to`.
    """
    report, cumulative = signed.body, signed.body.cumulative
    block = ledger.state.worst_block([row.block for row in cumulative.blocks])
    last = cumulative.ledger_sequence
    before = _before(report, ledger, block)
    after = cumulative.max_block_epsilon
    simulation = report.purpose == "simulation"
    plan = plan_from_json(evidence.plan.body.plan)
    within = after is not None and after <= cumulative.cap
    return render(
        "privacy_report.html",
        tone="plain" if simulation else "good" if within else "bad",
        report=report,
        signed=signed.json,
        neighbours=neighbours(NeighboringRelation[report.guarantee.relation], plan.unit),
        simulation=simulation,
        within=within,
        block=block,
        before=before,
        after=math.inf if after is None else after,
        words=words,
        unit=UNITS[plan.unit],
        method="DP-SGD" if evidence.config.task == "classification" else "DP-FedEmb",
        limits=assumptions(plan.unit) + limitations(plan.unit),
        plan=plan,
        audit=audit_sentence(evidence.audit.body),
        utility=utility_sentences(evidence.utility.body)[0],
        evaluations=sum(record.sequence <= last for record in ledger.state.evaluations),
        config=evidence.config,
        external=[record for record in ledger.state.external if record.sequence <= last],
        waivers=[ledger.chain.records[item.sequence] for item in report.waivers],
        lineage=steps_of(evidence, steps, signed),
    )


def _before(report: PrivacyReport, ledger: Ledger, block: str | None) -> float:
    """Returns epsilon of the worst block without this run."""
    if block is None:
        return 0.0
    own = ledger.state.attempts[report.run_id, report.attempt]
    found = spent(ledger.terms, ledger.state.charges(block, without=own))
    return found.epsilon if found else 0.0


def checklist_page(verdict: VerdictDocument, run_id: str) -> str:
    """Renders `gate_checklist.html`; the same verdict gives the same bytes."""
    found = headline(RunFacts(verdict))
    tone = found.tone if not verdict.allow else "plain" if verdict.waived else "good"
    return render(
        "gate_checklist.html",
        tone=tone,
        title="Allowed" if verdict.allow else found.title,
        verdict=verdict,
        run_id=run_id,
    )


def _cases(found: SelfTest) -> list[tuple[str, str, str, bool]]:
    """Returns name, expected and found result of each case, and whether it passed."""
    nulls, refused = found.no_leak, {True: "error", False: "accepted"}
    alarms = f"AUROC {nulls.auroc:.3f}, {nulls.alarms} alarms in {nulls.trials}"
    reversed_sign = "leak planted, sign of the score reversed"
    planted, turned = (f"AUROC {figure(one)}" for one in (found.planted_leak, found.reversed_sign))
    score, side = refused[found.missing_score_refused], refused[found.missing_side_refused]
    cases = {
        "no_leak": ("no leak planted", "AUROC 0.5, few chance alarms", alarms),
        "planted_leak": ("leak planted", "leak found", planted),
        "reversed_sign": (reversed_sign, "reported as reversed", turned),
        "missing_score": ("one score missing", "error", score),
        "missing_side": ("one side missing", "error", side),
    }
    return [(*case, name not in found.failed) for name, case in cases.items()]


def audit_page(report: AuditReport, plan: MechanismPlan) -> str:
    """Renders `audit_report.html`; the same report and plan give the same bytes."""
    leak, chart = False, None
    if report.measured is not None:
        plain, calibrated = report.measured.plain.auroc, report.measured.calibrated.auroc
        leak = finding(calibrated) == "leak"
        chart = bar_chart(
            [("score", plain), ("minus before training", calibrated)],
            x_label="AUROC (0.5: no signal)",
            alt="AUROC of the attack with 95 % intervals",
            x_limits=(0.0, 1.0),
            reference=0.5,
        )
    answer, tones = audit_answer(report, plan), {"Yes": "good", "No": "bad", "Unknown": "plain"}
    return render(
        "audit_report.html",
        tone="bad" if leak else tones[answer.partition(":")[0]],
        answer=answer,
        report=report,
        sentences=attack_sentences(report),
        limitations=LIMITATIONS,
        chart=chart,
        cases=_cases(report.self_test),
    )


def _by_rate(found: Mapping[str, Interval]) -> dict[float, Interval]:
    return {float(rate): interval for rate, interval in found.items()}


def _drawn(report: AnyUtility) -> dict[str, Any]:
    return _classifier(report) if isinstance(report, ClassifierReport) else _embeddings(report)


def utility_page(report: AnyUtility) -> str:
    """Returns the page of a utility report; the same report gives the same text."""
    return render(
        f"{'classifier' if isinstance(report, ClassifierReport) else 'utility'}_report.html",
        tone=tone_of(report.gain),
        report=report,
        sentence=utility_sentence(report),
        **_drawn(report),
    )


def _embeddings(report: UtilityReport) -> dict[str, object]:
    others = (*report.baselines, "centralized")
    models: list[tuple[str, UtilityReport | Compared]] = [
        ("this model", report),
        *((model_name(name, report), part) for name in others if (part := getattr(report, name))),
    ]
    rate, found = report.headline_rate, dict[str, Markup]()
    if rate is not None:
        recalls = [(name, part.recall_at_far[rate]) for name, part in models]
        found["recall"] = bar_chart(
            recalls,
            x_label="recall",
            alt=f"Recall at a false accept rate of {rate}, with 95 % intervals",
            x_limits=(0.0, max(item.high or item.value for _, item in recalls) * 1.08 or 1.0),
        )
        found["roc"] = line_chart(
            [
                Line(name, part.roc.far, part.roc.recall, _by_rate(part.recall_at_far))
                for name, part in models
            ],
            x=Axis("false accept rate", log=True),
            y=Axis("recall", limits=(0, 1.02)),
            alt="Recall over the false accept rate for each model, logarithmic axis",
            marks=[(f"FAR {rate}", float(rate)) for rate in report.recall_at_far],
            diagonal="chance",
        )
    return {
        "covers": covers("user"),
        "models": models if report.measured else [],
        "charts": found,
        "chart": found.get("roc"),
    }


def _classifier(report: ClassifierReport) -> dict[str, object]:
    others: list[tuple[str, ComparedClassifier]] = [
        (model_name(name, report), part)
        for name in (*report.baselines, "centralized", "previous_release")
        if (part := getattr(report, name))
    ]
    models = [("this model", report.model), *others] if report.model else others
    found = [(name, part.top_1) for name, part in models]
    alt, bins = (
        "Share of images whose class is named first, with 95 % intervals",
        report.reliability,
    )
    reliability = bins and line_chart(
        [Line("this model", [b.confidence for b in bins], [b.accuracy for b in bins])],
        x=Axis("confidence"),
        y=Axis("accuracy", limits=(0, 1.02)),
        alt="Accuracy over confidence: "
        + ", ".join(f"{b.accuracy:.2f} at {b.confidence:.2f}" for b in bins),
        diagonal="calibrated",
    )
    return {
        "covers": covers(report.unit),
        "models": models,
        "others": others,
        "parts": [("class", report.by_class), ("group", report.by_group)],
        "name_of": partial(model_name, report=report),
        "chart": models and bar_chart(found, x_label="top-1", alt=alt, x_limits=(0.0, 1.0)),
        "reliability": reliability or None,
    }
