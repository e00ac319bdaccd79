"""Alerts: received by real HTTP and SMTP servers, public values only, and never in the way."""

import json
import re
import time
from datetime import UTC, datetime
from email.header import decode_header, make_header

import pytest

from fedemb.documents.fields import Interval
from fedemb.reports.alerts import send
from fedemb.reports.alerts.alert import Alert, run_alert
from fedemb.reports.alerts.send import destinations, send_alerts
from fedemb.reports.headline import Failure, Figures, Headline, RunFacts, headline
from tests.kit.servers.alert_receivers import Webhook, certificate, smtp_server
from tests.kit.servers.free_port import free_port

NOW = datetime(2027, 8, 2, 3, tzinfo=UTC)
FACTS = {"epsilon_all_runs": 5.5, "epsilon_cap": None, "exit_code": 3}
ALERT = Alert("run.refused", "photos", "week-31", "Refused: a <rule> & more", NOW, FACTS)
LETTER = "FEDEMB_ALERT_EMAIL"


def letter(port, user="", host="127.0.0.1"):
    return f"smtp://{user}{host}:{port}/?from=fedemb@example.org&to=ada@example.org,bob@example.org"


def test_webhook_receives_a_cloud_event():
    with Webhook() as receiver:
        assert not send_alerts([ALERT], destinations({"FEDEMB_ALERT_WEBHOOK": receiver.url}))
    ((_, headers, event),) = receiver.posts
    assert headers["content-type"] == "application/cloudevents+json; charset=utf-8"
    assert event.pop("id") == ALERT.id
    assert event == {
        "specversion": "1.0",
        "source": "/fedemb/policies/photos",
        "type": "dev.fedemb.run.refused",
        "subject": "week-31",
        "time": "2027-08-02T03:00:00+00:00",
        "datacontenttype": "application/json",
        "data": {"title": "Refused: a <rule> & more", "policy": "photos", **FACTS},
    }


def test_repetition_of_an_alert_has_the_same_id():
    again = Alert(**{**vars(ALERT), "time": datetime(2027, 8, 3, tzinfo=UTC)})
    other = Alert(**{**vars(ALERT), "subject": "week-32"})
    assert ALERT.id == again.id != other.id


def test_slack_receives_a_message_without_markup_of_ours():
    with Webhook() as receiver:
        assert not send_alerts([ALERT], destinations({"FEDEMB_ALERT_SLACK": receiver.url}))
    ((_, headers, body),) = receiver.posts
    assert headers["content-type"] == "application/json"
    assert body["text"] == "Refused: a &lt;rule&gt; &amp; more (week-31, policy photos)"
    (block,) = body["blocks"]
    assert "epsilon_all_runs: 5.5" in block["text"]["text"]
    assert "epsilon_cap: infinite" in block["text"]["text"]


def test_mail_server_receives_a_message_for_each_recipient():
    with smtp_server() as box:
        assert not send_alerts([ALERT], destinations({LETTER: letter(box.port)}))
    ((sender, recipients, message, encrypted),) = box.messages
    assert (sender, recipients) == ("fedemb@example.org", ["ada@example.org", "bob@example.org"])
    assert str(make_header(decode_header(message["Subject"]))) == (
        "[fedemb] Refused: a <rule> & more"
    )
    assert "epsilon_all_runs: 5.5" in message.get_payload()
    assert not encrypted


def test_password_goes_over_an_encrypted_connection_only(tmp_path, monkeypatch):
    tls = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tls[0]))
    with smtp_server(tls) as box:
        url = letter(box.port, "ada:p%40ss@", "localhost")
        assert not send_alerts([ALERT], destinations({LETTER: url}))
    assert box.logins == ["\0ada\0p@ss"]
    assert box.messages[0][3]
    with smtp_server() as box:
        url = letter(box.port, "ada:p%40ss@", "localhost")
        (problem,) = send_alerts([ALERT], destinations({LETTER: url}))
    assert "offers no encryption" in problem
    assert not box.messages
    assert not re.search("p@ss|AUTH", " ".join(box.lines))


def test_certificate_of_a_mail_server_is_checked(tmp_path):
    with smtp_server(certificate(tmp_path)) as box:
        url = letter(box.port, "ada:p%40ss@", "localhost")
        assert len(send_alerts([ALERT], destinations({LETTER: url}))) == 1
    assert not box.messages
    assert not box.logins


@pytest.mark.parametrize("status", [302, 400, 500])
def test_answer_that_is_no_success_is_a_problem_and_is_not_followed(status):
    with Webhook(status) as receiver:
        (problem,) = send_alerts([ALERT], destinations({"FEDEMB_ALERT_SLACK": receiver.url}))
    assert f"the receiver answered {status}" in problem
    assert len(receiver.posts) == 1
    assert "s3cret" not in problem


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/s3cret",
        "ftp://127.0.0.1:{port}/s3cret",
        "http://[::1/s3cret",
        "s3cret",
        "http://user:s3cret@ /",
        "http://127.0.0.1:99999/s3cret",
    ],
)
@pytest.mark.parametrize("kind", ["WEBHOOK", "SLACK", "EMAIL"])
def test_address_that_does_not_work_is_named_without_its_secret(kind, url):
    found = destinations({f"FEDEMB_ALERT_{kind}": url.format(port=free_port())})
    (problem,) = send_alerts([ALERT], found)
    assert problem.startswith(f"alert to {kind.lower()} at ")
    assert "s3cret" not in problem


def test_refused_connection_is_named():
    found = destinations({"FEDEMB_ALERT_SLACK": f"http://127.0.0.1:{free_port()}/s3cret"})
    assert send_alerts([ALERT], found) == [
        "alert to slack at 127.0.0.1 was not sent: Connection refused"
    ]


def test_receiver_that_never_answers_delays_no_longer_than_its_time(monkeypatch):
    monkeypatch.setattr(send, "SECONDS", 0.5)
    with Webhook(delay=20) as slow, Webhook() as other:
        places = destinations({"FEDEMB_ALERT_WEBHOOK": slow.url, "FEDEMB_ALERT_SLACK": other.url})
        began = time.monotonic()
        (problem,) = send_alerts([ALERT], places)
        assert time.monotonic() - began < 3
    assert "webhook at 127.0.0.1 was not sent" in problem
    assert len(other.posts) == 1, "one receiver does not keep another from its alert"


def test_no_destination_and_no_alert_send_nothing():
    assert destinations({}) == []
    assert send_alerts([ALERT], []) == []
    with Webhook() as receiver:
        assert send_alerts([], destinations({"FEDEMB_ALERT_WEBHOOK": receiver.url})) == []
    assert receiver.posts == []


FIGURES = Figures(
    epsilon_all=float("inf"),
    epsilon_run=1.5,
    cap=8.0,
    delta=1e-5,
    gain=Interval(value=0.123, low=0.1, high=0.2),
    over="the public backbone",
)


@pytest.mark.parametrize(
    ("state", "code", "kind"),
    [
        ("Refused", 3, "run.refused"),
        ("Waiting for approval", 6, "run.waiting_for_approval"),
        ("Stopped", 1, "run.failed"),
        ("Stopped", 4, "run.failed"),
        ("Stopped", 5, None),
        ("Released", 0, None),
        ("Released with a waiver", 0, None),
        ("Simulation", 0, None),
        ("Running", None, None),
    ],
)
def test_alert_follows_from_the_state_and_holds_no_utility(state, code, kind):
    found = run_alert(Headline(state, state, code, FIGURES), "week-31", "photos", NOW)
    assert (found and found.kind) == kind
    if found:
        assert dict(found.facts) == {
            "exit_code": code,
            "epsilon_all_runs": None,
            "epsilon_this_run": 1.5,
            "epsilon_cap": 8.0,
            "delta": 1e-5,
        }
        assert "12.3" not in json.dumps(found.cloud_event()) + found.text()


def test_message_of_an_error_is_not_in_the_alert():
    failed = headline(RunFacts(failures=[Failure("partition_users", 2, "InputError")]))
    found = run_alert(failed, "week-31", "photos", NOW)
    assert found.title == "Stopped: partition_users, a wrong configuration or input"
