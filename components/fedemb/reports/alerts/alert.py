"""One alert, and its form as CloudEvent, Slack message and e-mail.

An alert holds public values only: ids, the title of a headline, and epsilons of signed reports and
of the ledger. It never holds error messages, utility, or names of files and users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from email.message import EmailMessage
from typing import Literal

from fedemb.errors import Interrupted
from fedemb.foundation.canonical_json import JsonFields, json_digest
from fedemb.reports.headline import Headline, State

Kind = Literal[
    "run.refused",
    "run.failed",
    "run.waiting_for_approval",
    "budget.low",
    "budget.cap_forecast",
    "budget.unknown",
    "test",
]
_KINDS: dict[State, Kind] = {
    "Refused": "run.refused",
    "Stopped": "run.failed",
    "Waiting for approval": "run.waiting_for_approval",
}


@dataclass(frozen=True)
class Alert:
    """One alert."""

    kind: Kind
    policy: str
    subject: str
    """Run, or block of the policy."""
    title: str
    """One sentence."""
    time: datetime
    facts: Mapping[str, str | float | int | None] = field(default_factory=dict)
    """Public values; None is an infinite epsilon."""

    @property
    def id(self) -> str:
        """The same for the same alert, so that receivers can drop repetitions."""
        content = [self.kind, self.policy, self.subject, self.title, dict(self.facts)]
        return json_digest(content)[:32]

    def text(self) -> str:
        """Returns title and values as lines of text."""
        lines = [f"{self.title} ({self.subject}, policy {self.policy})"]
        lines += [f"{name}: {_shown(value)}" for name, value in self.facts.items()]
        return "\n".join(lines)

    def cloud_event(self) -> JsonFields:
        """Returns the alert as a CloudEvent 1.0 in structured JSON."""
        return {
            "specversion": "1.0",
            "id": self.id,
            "source": f"/fedemb/policies/{self.policy}",
            "type": f"dev.fedemb.{self.kind}",
            "subject": self.subject,
            "time": self.time.isoformat(timespec="seconds"),
            "datacontenttype": "application/json",
            "data": {"title": self.title, "policy": self.policy, **self.facts},
        }

    def slack(self) -> JsonFields:
        """Returns the alert as a message of Slack's incoming webhooks."""
        text = self.text().replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        title, _, rest = text.partition("\n")
        section = {"type": "mrkdwn", "text": f"*{title}*" + (f"\n{rest}" if rest else "")}
        return {"text": title, "blocks": [{"type": "section", "text": section}]}

    def email(self, sender: str, recipients: list[str]) -> EmailMessage:
        """Returns the alert as an e-mail in plain text."""
        message = EmailMessage()
        message["Subject"] = f"[fedemb] {' '.join(self.title.split())}"
        message["From"] = sender
        message["To"] = ", ".join(recipients)
        message["Message-ID"] = f"<{self.id}@fedemb.alerts>"
        message.set_content(f"{self.text()}\ntime: {self.time.isoformat(timespec='seconds')}\n")
        return message


def run_alert(headline: Headline, run_id: str, policy: str, time: datetime) -> Alert | None:
    """Returns the alert of a finished run; None if it needs no attention.

    A run that somebody interrupted needs none.
    """
    kind = _KINDS.get(headline.state)
    if kind is None or headline.exit_code == Interrupted.exit_code:
        return None
    figures = headline.figures
    facts: dict[str, str | float | int | None] = {"exit_code": headline.exit_code}
    values = {
        "epsilon_all_runs": figures.epsilon_all,
        "epsilon_this_run": figures.epsilon_run,
        "epsilon_cap": figures.cap,
        "delta": figures.delta,
    }
    for name, value in values.items():
        if value is not None:
            facts[name] = value if value < float("inf") else None
    return Alert(kind, policy, run_id, headline.title, time, facts)


def _shown(value: str | float | int | None) -> str:
    if value is None:
        return "infinite"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
