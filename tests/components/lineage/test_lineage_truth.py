"""Lineage says and sends nothing that the gate rejected, or that did not happen."""

import json

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
def test_denied_run_tells_digests_of_report_and_verdict_alone(receiving, tmp_path, forged):
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
    steps = lineage.read_steps(run.root)
    assert [step.step for step in steps if step.failed] == ["gate_release"]
    known = [{**step.inputs, **step.outputs} for step in steps]
    assert {None} == {
        found[name] for name in ("model", "raw_images") for found in known if name in found
    }


def test_commitments_before_the_gate_are_those_of_the_ledger(receiving, tmp_path):
    receiver = receiving()
    run = honest_run.start(tmp_path / "run")
    run.do("plan reserve partition train measure")
    run.rewrite(run.users, commitments={"users": FORGED, "evaluation": FORGED})
    run.do_account()
    assert _versions(receiver.events)["users"] == honest_run.COMMITMENTS["users"]
    assert FORGED not in run.lineage.read_text()


def test_simulation_whose_documents_nobody_compared_tells_no_commitment(receiving, tmp_path):
    run = honest_run.start(tmp_path / "run", purpose="simulation").until_gate()
    _change(run.users, commitments={"users": FORGED, "evaluation": FORGED})
    receiver = receiving()
    run.do_gate()
    assert {"users", "evaluation_identities"}.isdisjoint(_versions(receiver.events))


def test_receiver_hears_of_no_release_that_was_refused(receiving, tmp_path):
    receiver = receiving()
    run = honest_run.start(tmp_path / "run").until_gate()
    run.do_gate()
    planted = run.root / "releases" / "glyphs" / "1.0" / "file"
    planted.parent.mkdir(parents=True)
    planted.write_text("put there by somebody else")
    with pytest.raises(SignatureInvalid):
        run.do_release()
    assert _jobs(receiver)[-1] == "gate_release"
    assert "release_model" not in _jobs(receiver)


def test_receiver_hears_of_a_release_once_the_ledger_has_it(receiving, tmp_path):
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
    published = run.root / "releases" / "glyphs" / "1.0" / "lineage.jsonl"
    lines = [json.loads(line) for line in published.read_text().splitlines()]
    assert receiver.events[before:] == lines
    assert _jobs(receiver)[-1] == "release_model"
