"""Sends alerts to the destinations in the environment. A failure never reaches the caller.

Each destination has `SECONDS` in all, in a thread that cannot keep the process alive. Addresses
contain secrets, so messages name only the host.
"""

from __future__ import annotations

import os
import smtplib
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import parse_qs, unquote, urlsplit

from fedemb.foundation.canonical_json import JsonFields
from fedemb.foundation.deadline import in_time
from fedemb.foundation.http_calls import StatusError, call_json
from fedemb.reports.alerts.alert import Alert

WEBHOOK, SLACK, EMAIL = "FEDEMB_ALERT_WEBHOOK", "FEDEMB_ALERT_SLACK", "FEDEMB_ALERT_EMAIL"
"""Environment variables: address of a CloudEvents receiver, of a Slack webhook, and
`smtp[s]://[USER:PASSWORD@]HOST[:PORT]/?from=ADDRESS&to=ADDRESS[,ADDRESS]`."""
SECONDS = 10.0
"""Time for all alerts of one destination."""


class NotSent(Exception):
    """An alert was not accepted; the message contains no secret."""


@dataclass(frozen=True)
class Destination:
    """A place that alerts are sent to."""

    name: str
    """Kind and host."""
    send: Callable[[Alert], None]


def destinations(environment: Mapping[str, str] = os.environ) -> list[Destination]:
    """Returns the configured destinations; a value that is not valid fails when it is used."""
    makers: dict[str, Callable[[str, Alert], None]] = {
        WEBHOOK: lambda url, alert: _post(
            url, alert.cloud_event(), "application/cloudevents+json; charset=utf-8"
        ),
        SLACK: lambda url, alert: _post(url, alert.slack(), "application/json"),
        EMAIL: _mail,
    }
    found: list[Destination] = []
    for variable, maker in makers.items():
        if url := environment.get(variable, "").strip():
            name = f"{variable.removeprefix('FEDEMB_ALERT_').lower()} at {_host(url)}"
            found.append(Destination(name, partial(maker, url)))
    return found


def send_alerts(alerts: Sequence[Alert], places: Sequence[Destination] | None = None) -> list[str]:
    """Sends every alert to every destination; by default those of the environment.

    Returns: One sentence for each destination that did not accept all alerts. Never raises.
    """
    problems: list[str] = []
    for place in (destinations() if places is None else places) if alerts else ():
        late = f"no answer within {SECONDS:g} s"
        if why := in_time(partial(_send_all, place, alerts), SECONDS, late):
            problems.append(f"alert to {place.name} was not sent: {why}")
    return problems


def _send_all(place: Destination, alerts: Sequence[Alert]) -> str:
    """Returns why an alert was not sent; empty: all were."""
    try:
        for alert in alerts:
            place.send(alert)
    except NotSent as error:
        return str(error)
    except Exception as error:
        # Texts of other errors may contain the address, and with it a token or a password.
        reason = getattr(error, "reason", error)
        known = reason.strerror if isinstance(reason, OSError) else None
        return known or type(error).__name__
    return ""


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or "an address without a host"
    except ValueError:
        return "an address that is not valid"


def _post(url: str, body: JsonFields, content_type: str) -> None:
    if urlsplit(url).scheme not in ("http", "https"):
        raise NotSent("the address is not an http or https URL")
    headers = {"Content-Type": content_type, "User-Agent": "fedemb"}
    try:
        call_json(url, headers, body, answers=False)
    except StatusError as error:
        raise NotSent(f"the receiver answered {error.status}") from None


def _mail(url: str, alert: Alert) -> None:
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    if parts.scheme not in ("smtp", "smtps") or not parts.hostname or {"from", "to"} - set(query):
        raise NotSent("the address is not smtp://HOST:PORT/?from=ADDRESS&to=ADDRESS")
    recipients = [each.strip() for each in query["to"].split(",") if each.strip()]
    message = alert.email(query["from"], recipients)
    secure = ssl.create_default_context()
    if parts.scheme == "smtps":
        server: smtplib.SMTP = smtplib.SMTP_SSL(
            parts.hostname, parts.port or 465, timeout=SECONDS, context=secure
        )
    else:
        server = smtplib.SMTP(parts.hostname, parts.port or 587, timeout=SECONDS)
    with server:
        server.ehlo()
        encrypted = parts.scheme == "smtps"
        if not encrypted and server.has_extn("starttls"):
            server.starttls(context=secure)
            server.ehlo()
            encrypted = True
        if parts.username:
            if not encrypted:
                raise NotSent("the server offers no encryption, so no password was sent")
            server.login(unquote(parts.username), unquote(parts.password or ""))
        refused = server.send_message(message, query["from"], recipients)
        if refused:
            raise NotSent(f"the server refused {len(refused)} of {len(recipients)} recipients")
