"""The headline of a run's state, for the CLI, pages, model cards, registries and Kubeflow.

`headline` derives the state from the documents of the run. The exit states of its processes are
used only if no document determines the state. Every display of a state uses this module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, NamedTuple

from fedemb.config.policy import Unit
from fedemb.documents.audit import AuditReport
from fedemb.documents.fields import Interval, points
from fedemb.documents.plan import PrivacyPlan
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.utility import AnyUtility, ClassifierReport
from fedemb.documents.verdict import NO_APPROVAL_IN_TIME, AppliedWaiver, VerdictDocument
from fedemb.foundation.document import Written
from fedemb.reports.report import signer_name, significant
from fedemb.reports.utility_text import best_baseline

State = Literal[
    "Released",
    "Released with a waiver",
    "Waiting for approval",
    "Refused",
    "Stopped",
    "Running",
    "Simulation",
    "Unknown",
]
WORDS = 12
"""Word limit of a title."""
_STOPPED = {
    1: "a bug or a broken environment",
    2: "a wrong configuration or input",
    4: "a store could not be reached",
    5: "interrupted",
}
_EXIT_CODES: dict[State, int] = {
    "Released": 0,
    "Released with a waiver": 0,
    "Simulation": 0,
    "Refused": 3,
    "Waiting for approval": 6,
}


Documents = Mapping[str, Written[Any] | None]
"""Output of a step -> its document; None: missing or not valid."""


@dataclass(frozen=True)
class Failure:
    """The failure of a step."""

    step: str
    exit_code: int
    error: str = ""
    """Class of the error."""
    message: str = ""


@dataclass(frozen=True)
class RunFacts:
    """Known facts of a run, with the documents that exist and could be read."""

    verdict: VerdictDocument | None = None
    report: PrivacyReport | None = None
    utility: AnyUtility | None = None
    audit: AuditReport | None = None
    plan: PrivacyPlan | None = None
    released: bool = False
    """Whether a bundle was published."""
    simulation: bool = False
    failures: Sequence[Failure] = ()
    """Failures of the steps that did not succeed later."""
    running: str | None = None
    """Step that is running; None if no step is running."""
    completed: bool | None = None
    """Whether all steps succeeded; None if unknown."""
    overdue: bool = False
    """Whether the approvals' deadline has passed since the verdict, without enough of them."""

    @classmethod
    def of(cls, documents: Documents) -> RunFacts:
        """Returns what documents say; each is named by the output of its step."""
        fields = {"privacy_report": "report", "utility_report": "utility"}
        fields |= {"audit_report": "audit", "privacy_plan": "plan", "verdict": "verdict"}
        return cls(**{fields[name]: item.body for name, item in documents.items() if item})

    def figures(self) -> dict[str, float]:
        """Returns the metrics of both reports, as far as they exist."""
        return {
            **(privacy_figures(self.report) if self.report else {}),
            **(utility_figures(self.utility) if self.utility else {}),
        }


class Figure(NamedTuple):
    """One metric with its label."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Figures:
    """Privacy and utility metrics, in the order in which a release is decided."""

    epsilon_all: float | None = None
    """Epsilon of the unit charged most, over all runs of the policy; None without a report."""
    epsilon_run: float | None = None
    """Epsilon of this run; None without a report."""
    cap: float | None = None
    delta: float | None = None
    unit: Unit = "user"
    gain: Interval | None = None
    """Gain over the best baseline; None if not measured."""
    over: str = ""
    """Name of the baseline of the gain."""

    @classmethod
    def of(cls, report: PrivacyReport | None, utility: AnyUtility | None) -> Figures:
        """Returns the metrics of two documents; infinite epsilons stay infinite."""
        found = cls()
        if report is not None:
            accounting, cumulative = report.accounting, report.cumulative
            found = replace(
                found,
                epsilon_all=_or_infinite(cumulative.max_block_epsilon),
                epsilon_run=_or_infinite(accounting.epsilon),
                cap=cumulative.cap,
                delta=cumulative.delta,
                unit=report.unit.unit,
            )
        if utility is not None and utility.gain is not None:
            found = replace(found, gain=utility.gain, over=best_baseline(utility))
        return found

    def rows(self) -> list[Figure]:
        """Returns epsilon over all runs, that of this run if it differs, and the gain."""
        of_cap = "" if self.cap is None else f"of the cap {significant(self.cap)}"
        at = "" if self.delta is None else f" at delta {significant(self.delta)}"
        gain = self.gain
        interval = gain and f"95 % interval [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
        every, this = _epsilon(self.epsilon_all), _epsilon(self.epsilon_run)
        return [
            Figure(f"Epsilon of one {self.unit}, all runs", every, of_cap + at),
            *([Figure("Epsilon of this run", this, at.strip())] if this != every else []),
            Figure(
                "Gain over the best baseline",
                _points(gain),
                f"{interval}; over {self.over}" if gain else "",
            ),
        ]

    def sentence(self) -> str:
        """Returns the same metrics in one line."""
        return (
            f"epsilon of one {self.unit} {_epsilon(self.epsilon_all)} (all runs), "
            f"{_epsilon(self.epsilon_run)} (this run); gain {points(self.gain)}"
        )


@dataclass(frozen=True)
class Headline:
    """The state of a run: title and metrics."""

    state: State
    title: str
    """The state with its cause, at most `WORDS` words."""
    exit_code: int | None
    """Exit code of the run, see `fedemb.errors`; None if unknown."""
    figures: Figures

    @property
    def tone(self) -> Literal["good", "bad", "plain"]:
        """Colour of a page: good only for a release with a significant gain and no waiver."""
        if self.state in ("Refused", "Stopped"):
            return "bad"
        gain = self.figures.gain
        gained = gain is None or gain.low > 0
        return "good" if self.state == "Released" and gained else "plain"

    def sentence(self) -> str:
        """Returns title and metrics in one line."""
        return f"{self.title}; {self.figures.sentence()}"


def headline(facts: RunFacts, *, waivers: Sequence[AppliedWaiver] | None = None) -> Headline:
    """Returns the headline of a run; without `waivers`, it uses those that the verdict names.

    A run with a running step is shown as running. Otherwise the verdict of the gate decides; exit
    states of processes change neither a denial nor a release.
    """
    state, why, code = (
        ("Running", facts.running, None)
        if facts.running is not None
        else _by_verdict(facts, waivers) or _by_failures(facts.failures) or _by_end(facts)
    )
    figures = Figures.of(facts.report, facts.utility)
    return Headline(state, title_of(state, why), _EXIT_CODES.get(state, code), figures)


_Found = tuple[State, str, int | None]
"""State, its cause, and the exit code if the state does not determine it."""


def _by_verdict(facts: RunFacts, waivers: Sequence[AppliedWaiver] | None) -> _Found | None:
    verdict = facts.verdict
    if verdict is not None and verdict.simulation:
        return "Simulation", "never released", None
    if verdict is not None and not verdict.allow:
        if verdict.waiting and not facts.overdue:
            return "Waiting for approval", _approvals(verdict, facts.report), None
        return "Refused", _denied(verdict, facts), None
    if not facts.released:
        return None
    if waivers is None:
        waivers = () if verdict is None else verdict.waivers
    return ("Released with a waiver", waived(waivers), None) if waivers else ("Released", "", None)


def _by_failures(failures: Sequence[Failure]) -> _Found | None:
    """Returns the most severe failure: waiting and refusals before retryable failures."""
    for state in ("Waiting for approval", "Refused"):
        for failure in failures:
            if failure.exit_code == _EXIT_CODES[state]:
                cause = f"{failure.step}, {_spaced(failure.error)}" if state == "Refused" else ""
                return state, cause, None
    if not failures:
        return None
    first = failures[0]
    why = f"{first.step}, {_STOPPED.get(first.exit_code, 'see its log')}"
    return "Stopped", why, max(failure.exit_code for failure in failures)


def _by_end(facts: RunFacts) -> _Found:
    if facts.completed is False:
        return "Stopped", "no step reported an error", 1
    if facts.completed and facts.simulation:
        return "Simulation", "never released", None
    if facts.completed:
        return "Unknown", "completed without a verdict", 0
    return "Unknown", "no verdict, and the state of the run is not known", None


def title_of(state: State, why: str = "") -> str:
    """Returns a state and its cause in at most `WORDS` words.

    >>> title_of("Refused", "no gain over public")
    'Refused: no gain over public'
    """
    link = " by " if state == "Released with a waiver" else ": "
    words = f"{state}{link}{why}".split() if why else state.split()
    if len(words) <= WORDS:
        return " ".join(words)
    return " ".join(words[:WORDS]).rstrip(",;:.") + "…"


def waived(waivers: Sequence[AppliedWaiver]) -> str:
    """Returns who waived rules and why: `NAME: REASON`, only the first of several."""
    first = waivers[0]
    who = signer_name(first.actor)
    also = f" (and {len(waivers) - 1} more)" if len(waivers) > 1 else ""
    return f"{who}{also}: {first.reason or _spaced(first.code)}"


def _approvals(verdict: VerdictDocument, report: PrivacyReport | None) -> str:
    needed, deadline = verdict.approvals_needed, report and report.approve_by
    given = "" if needed is None else f"{len(verdict.approvals)} of {needed} given"
    return f"{given} until {_day(deadline)}".strip() if deadline else given


def _day(deadline: datetime) -> str:
    return f"{deadline:%Y-%m-%d %H:%M} UTC"


def _denied(verdict: VerdictDocument, facts: RunFacts) -> str:
    deadline = facts.report and facts.report.approve_by
    late = facts.overdue or verdict.reasons == [NO_APPROVAL_IN_TIME]
    if deadline is not None and late:
        return f"no approval by {_day(deadline)}"
    codes = [code for code in verdict.reasons if code != "not_approved"] or verdict.reasons
    more = f" and {len(codes) - 1} more" if len(codes) > 1 else ""
    return (_spaced(codes[0]) if codes else "by the gate") + more


def _spaced(name: str) -> str:
    """Returns `no_gain_over_public` or `BudgetExceeded` as separate words."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").lower()


def _or_infinite(epsilon: float | None) -> float:
    return math.inf if epsilon is None else epsilon


def _epsilon(value: float | None) -> str:
    if value is None:
        return "-"
    return "infinite" if math.isinf(value) else significant(value)


def _points(gain: Interval | None) -> str:
    return "not measured" if gain is None else f"{100 * gain.value:+.1f} points"


def privacy_figures(report: PrivacyReport) -> dict[str, float]:
    """Returns epsilon of the run, and of all runs of its policy for the user charged most."""
    accounting, cumulative = report.accounting, report.cumulative
    return _finite(
        {
            "epsilon": accounting.epsilon,
            "delta": accounting.delta,
            "epsilon_cumulative": cumulative.max_block_epsilon,
            "epsilon_cap": cumulative.cap,
        }
    )


def utility_figures(report: AnyUtility) -> dict[str, float]:
    """Returns metrics of the model, its public backbone, the best baseline and the gain over it.

    Unmeasured metrics are omitted.
    """
    name, found = "recall", dict[str, float | None]()
    if isinstance(report, ClassifierReport):
        name, found["top_5"] = "top_1", _value(report.model and report.model.top_5)
    found[name] = _value(report.headline())
    if report.best_baseline is not None:
        found[f"{name}_public_backbone"] = _value(report.headline("public_backbone"))
        found[f"{name}_best_baseline"] = _value(report.headline(report.best_baseline))
        found["gain"] = _value(report.gain)
        if report.gain is not None:
            found["gain_low"], found["gain_high"] = report.gain.low, report.gain.high
    return _finite(found)


def _value(figure: Interval | None) -> float | None:
    return figure and figure.value


def _finite(values: Mapping[str, float | None]) -> dict[str, float]:
    return {
        name: value for name, value in values.items() if value is not None and math.isfinite(value)
    }
