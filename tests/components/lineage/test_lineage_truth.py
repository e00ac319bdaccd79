"""Lineage says and sends nothing that the gate rejected, or that did not happen."""

import json
import logging
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fedemb.errors import GateDenied, SignatureInvalid
from fedemb.foundation.canonical_json import file_digest
from fedemb.foundation.files import write_bytes
from fedemb.ledger import Ledger
from fedemb.reports import lineage
from tests.kit.pipeline_runs import honest_run

FORGED = "f" * 64
"""Of a document that somebody changed: a plain digest of private rows, say."""


def _change(path, **changes):
    write_bytes(path, honest_run.spelled({**json.loads(path.read_text()), **changes}))


def _versions(events):
    return {
        dataset["name"].rpartition("/")[2]: dataset["facets"]["version"]["datasetVersion"]
        for event in events
        for dataset in (*event["inputs"], *event["outputs"])
        if "version" in dataset.get("facets", {})
    }


def _jobs(receiver):
    return [event["job"]["name"] for event in receiver.events]


@pytest.mark.parametrize("forged", ["users", "model", "reservation", "plan"])
def test_denied_run_publishes_only_digests(receiving, tmp_path, forged):
    run = honest_run.start(tmp_path / "run").until_gate()
    if forged == "users":
        _change(run.users, commitments={"users": FORGED, "evaluation": FORGED})
    elif forged == "model":
        honest_run.write_model_file(run.model / "backbone.keras", names=["a/0", "b/0", "c/0"])
    elif forged == "reservation":
        body = json.loads(run.reservation.read_text())["body"]
        _change(run.reservation, body={**body, "code_sha": FORGED, "config_sha": FORGED})
    else:
        _change(run.plan, config_sha=FORGED)
    receiver = receiving()
    with pytest.raises(GateDenied):
        run.do_gate()
    told = _versions(receiver.events)
    digests = {"privacy_report": file_digest(run.report), "verdict": file_digest(run.verdict)}
    assert told == digests
    said = run.lineage.read_text()
    sent = b"".join(body for _, _, body in receiver.sent).decode()
    for digest in (FORGED, file_digest(run.model / "backbone.keras"), file_digest(run.users)):
        assert digest not in said
        assert digest not in sent
    events = [json.loads(line) for line in said.splitlines()]
    assert _versions(events) == digests
    failed = [event["job"]["name"] for event in events if event["eventType"] == "FAIL"]
    assert failed == ["gate_release"]


def test_commitments_before_the_gate_are_those_of_the_ledger(receiving, tmp_path):
    receiver = receiving()
    run = honest_run.start(tmp_path / "run")
    run.do("plan reserve partition train measure")
    run.rewrite(run.users, commitments={"users": FORGED, "evaluation": FORGED})
    run.do_account()
    assert _versions(receiver.events)["users"] == honest_run.COMMITMENTS["users"]
    assert FORGED not in run.lineage.read_text()


def test_unverified_simulation_shows_no_commitment(receiving, tmp_path):
    run = honest_run.start(tmp_path / "run", purpose="simulation").until_gate()
    _change(run.users, commitments={"users": FORGED, "evaluation": FORGED})
    receiver = receiving()
    run.do_gate()
    assert {"users", "evaluation_identities"}.isdisjoint(_versions(receiver.events))


def test_lineage_of_a_refused_release_is_not_sent(receiving, tmp_path):
    receiver = receiving()
    run = honest_run.start(tmp_path / "run").until_gate()
    run.do_gate()
    planted = run.bundle / "file"
    planted.parent.mkdir(parents=True)
    planted.write_text("put there by somebody else")
    with pytest.raises(SignatureInvalid):
        run.do_release()
    assert _jobs(receiver)[-1] == "gate_release"
    assert "release_model" not in _jobs(receiver)


def test_lineage_of_a_release_is_sent_after_its_record(receiving, tmp_path):
    receiver = receiving()
    run = honest_run.start(tmp_path / "run").until_gate()
    run.do_gate()

    def killed(*_, **__):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Ledger, "release", killed)
        with pytest.raises(KeyboardInterrupt):
            run.do_release()
    assert (run.root / "releases" / "glyphs" / "1.0.json").exists()
    assert "release_model" not in _jobs(receiver)
    before = len(receiver.sent)
    run.do_release()
    published = (run.bundle / "lineage.jsonl").read_text()
    lines = [json.loads(line) for line in published.splitlines()]
    assert receiver.events[before:] == lines
    assert _jobs(receiver)[-1] == "release_model"


# ---- Lineage joins runs by itself, and needs nothing of Kubeflow's ----


def _shared(path) -> dict[str, tuple[str | None, str]]:
    """Artifact -> its digest and its identifier in all runs."""
    found = {}
    for line in path.read_text().splitlines():
        event = json.loads(line)
        for dataset in (*event["inputs"], *event["outputs"]):
            facets = dataset.get("facets", {})
            for same in facets.get("symlinks", {}).get("identifiers", []):
                version = facets.get("version", {}).get("datasetVersion")
                found[dataset["name"].rpartition("/")[2]] = (version, same["name"])
    return found


def test_release_has_the_same_lineage_name_in_all_runs(tmp_path):
    first = honest_run.start(tmp_path / "first").until_release()
    (bundle,) = Path(first.releases_uri).glob("*/*/lineage.jsonl")
    release = _shared(bundle)["release"][1]
    later = first.config.updated(
        {
            "pretraining.kind": "import",
            "pretraining.import_path": f"{bundle.parent}/backbone.keras",
            "evaluation.previous_release": str(bundle.parent),
        }
    )
    found = lineage.parents_of(later, "later")
    assert found["backbone_config"] == found["previous_release"] == release
    assert release.startswith("releases/")
    assert _shared(bundle)["policy"][1] == f"policies/{first.config.policy.policy_id}"


# ---- OpenLineage settings around a run change neither its lineage file nor what is sent of it ----


STEPS = [
    lineage.StepLineage("partition_users", {"raw_images": None}, {"users": "c" * 64}),
    lineage.StepLineage("train_model", {"users": "c" * 64}, {"model": "d" * 64}, failed=True),
]
DISABLED = {"OPENLINEAGE_DISABLED": "true"}
FACETS = "facets: {environment_variables: [SECRET_TOKEN]}"
SETTINGS = {
    "disabled": (DISABLED, None),
    "filter": ({"OPENLINEAGE__FILTERS": '[{"type": "exact", "match": "train_model"}]'}, None),
    "facets": ({"OPENLINEAGE__FACETS__ENVIRONMENT_VARIABLES": '["SECRET_TOKEN"]'}, None),
    "named file": ({"OPENLINEAGE_CONFIG": "named.yml"}, "named.yml"),
    "file in the folder": ({}, "openlineage.yml"),
}
"""Variables, and the name of a file of settings."""


@pytest.fixture(params=SETTINGS.values(), ids=SETTINGS.keys())
def settings(request, tmp_path, monkeypatch):
    """Applies settings when called, and says whether they disable the client."""
    variables, file = request.param

    def apply():
        monkeypatch.setenv("SECRET_TOKEN", "very secret")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        if file is not None:
            (tmp_path / file).write_text(FACETS)
        monkeypatch.chdir(tmp_path)
        return variables is DISABLED

    return apply


def _write(path):
    digests = {"config_sha": "a" * 64, "code_sha": "b" * 64}
    time = datetime(2026, 1, 1, tzinfo=UTC)
    lineage.write(path, "run-1", STEPS, **digests, time=time)


def test_lineage_events_sent_equal_the_file_unless_disabled(settings, receiving, tmp_path):
    receiver = receiving()
    _write(tmp_path / "plain")
    disabled = settings()
    lineage.send((tmp_path / "plain").read_bytes)
    written = [json.loads(line) for line in (tmp_path / "plain").read_text().splitlines()]
    assert receiver.events == ([] if disabled else written)


# ---- OpenLineage over HTTP: to a real receiver, to one that is down, broken, or never done ----


def _emit(path):
    _write(path)
    lineage.send(path.read_bytes)


def test_lineage_receiver_gets_its_api_key(receiving, tmp_path, monkeypatch, caplog):
    receiver = receiving()
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "a key")
    _emit(tmp_path / "lineage.jsonl")
    assert {path for path, _, _ in receiver.sent} == {"/api/v1/lineage"}
    assert {headers["Authorization"] for _, headers, _ in receiver.sent} == {"Bearer a key"}
    assert caplog.messages == []


def _sentence(caplog) -> str:
    (message,) = [item.getMessage() for item in caplog.records if item.levelno >= logging.WARNING]
    assert "the run continues" in message
    return message


def test_unreachable_lineage_receiver_keeps_the_file(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("OPENLINEAGE_URL", "http://127.0.0.1:9")
    started = time.monotonic()
    _emit(tmp_path / "lineage.jsonl")
    assert time.monotonic() - started < 10
    assert "ConnectionError" in _sentence(caplog)
    assert len((tmp_path / "lineage.jsonl").read_text().splitlines()) == len(STEPS)


def test_lineage_contains_only_artifact_names_and_keyed_digests(receiving, tmp_path):
    receiver = receiving()
    honest_run.start(tmp_path / "run").until_release()
    events = receiver.events
    assert {event["job"]["name"] for event in events} == {
        *("plan_privacy", "reserve_budget", "pretrain_public", "partition_users"),
        *("train_model", "evaluate_model", "audit_privacy", "account_privacy"),
        *("gate_release", "release_model"),
    }
    sent = b"".join(body for _, _, body in receiver.sent).decode()
    # Neither where the images are, nor whose machine it is: names of artifacts and digests alone.
    for raw in ("private.parquet", str(tmp_path), "evaluation/", "hostname"):
        assert raw not in sent
    for event in events:
        assert set(event["run"]["facets"]) == {"parent", "tags"}
        for dataset in (*event["inputs"], *event["outputs"]):
            facets = dataset.get("facets", {})
            assert set(facets) <= {"version", "symlinks"}
            for same in facets.get("symlinks", {}).get("identifiers", []):
                assert same["name"].split("/")[0] in ("policies", "releases"), "no address"
    versions = _versions(events)
    assert versions["users"] == honest_run.COMMITMENTS["users"]  # keyed, never a plain digest
    assert "raw_images" not in versions
