"""Alert at the end of a run on this machine. It never changes how the run ended."""

from __future__ import annotations

from datetime import UTC, datetime

from fedemb.errors import Interrupted
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.headline import run_headline
from fedemb.reports.alerts.alert import run_alert
from fedemb.reports.alerts.send import destinations, send_alerts


def alert_run(run: RunDirectory) -> list[str]:
    """Sends the alert of a finished run, if it needs one.

    Returns: One sentence for each destination that did not accept it. Never raises.
    """
    try:
        places = destinations()
        if not places or run.read_state().exit_code == Interrupted.exit_code:
            return []
        now = datetime.now(UTC).replace(microsecond=0)
        found = run_headline(run, running=False)
        alert = run_alert(found, run.run_id, run.config().policy.policy_id, now)
    except Exception as error:
        return [f"no alert was sent, because the state of the run is unknown ({error})"]
    return send_alerts([alert] if alert else [], places)
