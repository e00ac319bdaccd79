"""OpenLineage over HTTP: to a real receiver, to one that is down, broken, or never done."""

import json
import logging
import time

from fedemb.reports import lineage
from tests.kit.pipeline_runs import honest_run

STEPS = [
    lineage.StepLineage("partition_users", {"raw_images": None}, {"users": "c" * 64}),
    lineage.StepLineage("train_dp_fedemb", {"users": "c" * 64}, {"model": "d" * 64}),
]


def _emit(path):
    lineage.write(
        path, "run-1", STEPS, pipeline="dp-fedemb", config_sha="a" * 64, code_sha="b" * 64
    )
    lineage.send(path.read_bytes)


def test_receiver_gets_the_events_of_the_file(receiving, tmp_path, monkeypatch, caplog):
    receiver = receiving()
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "a key")
    _emit(tmp_path / "lineage.jsonl")
    written = [json.loads(line) for line in (tmp_path / "lineage.jsonl").read_text().splitlines()]
    assert receiver.events == written
    assert {path for path, _, _ in receiver.sent} == {"/api/v1/lineage"}
    assert {headers["Authorization"] for _, headers, _ in receiver.sent} == {"Bearer a key"}
    assert [event["job"]["name"] for event in written] == ["partition_users", "train_dp_fedemb"]
    assert caplog.messages == []


def _sentence(caplog) -> str:
    (message,) = [item.getMessage() for item in caplog.records if item.levelno >= logging.WARNING]
    assert "the run continues" in message
    return message


def test_receiver_that_is_down_is_a_sentence_and_the_file_is_whole(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("OPENLINEAGE_URL", "http://127.0.0.1:9")
    started = time.monotonic()
    _emit(tmp_path / "lineage.jsonl")
    assert time.monotonic() - started < 10
    assert "ConnectionError" in _sentence(caplog)
    assert len(lineage.read_steps(tmp_path / "lineage.jsonl")) == len(STEPS)


def test_run_sends_no_raw_fact(receiving, tmp_path):
    receiver = receiving()
    honest_run.start(tmp_path / "run").until_release()
    events = receiver.events
    assert {event["job"]["name"] for event in events} == {
        *("plan_privacy", "reserve_budget", "pretrain_public", "partition_users"),
        *("train_dp_fedemb", "evaluate_embeddings", "audit_privacy", "account_privacy"),
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
    versions = {
        dataset["name"].rpartition("/")[2]: dataset["facets"]["version"]["datasetVersion"]
        for event in events
        for dataset in (*event["inputs"], *event["outputs"])
        if "version" in dataset.get("facets", {})
    }
    assert versions["users"] == honest_run.COMMITMENTS["users"]  # keyed, never a plain digest
    assert "raw_images" not in versions
