"""`fedemb alert`: tests the destinations of alerts."""

from __future__ import annotations

from datetime import UTC, datetime

from fedemb.errors import InputError, StorageError
from fedemb.pipelines.output import say


def alert() -> None:
    """Send a test alert to every destination in the environment.

    Destinations: FEDEMB_ALERT_WEBHOOK, FEDEMB_ALERT_SLACK and FEDEMB_ALERT_EMAIL.

    Example: FEDEMB_ALERT_WEBHOOK=https://alerts.example/fedemb fedemb alert
    """
    from fedemb.reports.alerts.alert import Alert
    from fedemb.reports.alerts.send import EMAIL, SLACK, WEBHOOK, destinations, send_alerts

    places = destinations()
    if not places:
        raise InputError(
            f"No destination of alerts. Set {WEBHOOK}, {SLACK} or {EMAIL} in the environment."
        )
    now = datetime.now(UTC).replace(microsecond=0)
    problems = send_alerts([Alert("test", "none", "fedemb alert", "Test alert", now)], places)
    failed = {place.name for place in places for text in problems if f" {place.name} " in text}
    for place in places:
        if place.name not in failed:
            say(f"sent: {place.name}")
    if problems:
        raise StorageError(
            f"{problems[0]}. Correct the address, then run the command again.", *problems[1:]
        )
