"""One headline in every place: CLI, pages, card, registries; approvals that wait; the checklist."""

import json
import re
from pathlib import Path

import pytest

from fedemb.documents.verdict import VerdictDocument
from fedemb.errors import AwaitingApproval, GateDenied, Refused
from fedemb.foundation.document import read
from fedemb.pipelines.run.pages import collect_reports, render_index, run_row
from fedemb.release.decide import RULES
from fedemb.release.registries import Release
from tests.kit.cli import fedemb, ssh_key
from tests.kit.pipeline_runs import honest_run
from tests.kit.run_folder import run_folder

WAITING = {"exit_code": 6, "failed_step": "gate_release", "error": "AwaitingApproval"}
DENIED = {"exit_code": 3, "failed_step": "gate_release", "error": "GateDenied"}
REASON = "the board accepts an imported start"
WAIVED = f"Released with a waiver by ada: {REASON}"


def call(*words) -> str:
    with honest_run.stand_in_for_serving():
        return fedemb(*words)


def title(page: str) -> str:
    return re.search(r"<h1>(.*?)</h1>", page)[1]


def policy(**changes):
    return {**honest_run.config().policy.model_dump(), **changes}


def without_gain(run):
    """The utility report of a model that may have gained by chance, signed and accounted."""
    start = json.loads(run.utility.read_text())["public_backbone"]
    chance = {"value": 0.2, "low": 0.0, "high": 0.4}
    gained = dict.fromkeys(start["difference"], chance)
    run.rewrite(run.utility, public_backbone={**start, "difference": gained})
    run.do_account()
    return run


@pytest.fixture(scope="module")
def waived(tmp_path_factory):
    """A model that gained nothing, waived by the policy owner and released_run."""
    run = without_gain(honest_run.start(tmp_path_factory.mktemp("waived") / "run").until_gate())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDEMB_ACTOR", "ada")
        run.waive("no_gain_over_public", REASON)
    run.do("account gate release")
    return run


@pytest.fixture(scope="module")
def waiting(tmp_path_factory):
    """A run that two people must approve."""
    root = tmp_path_factory.mktemp("waiting") / "run"
    run = honest_run.start(root, policy=policy(approvals=2)).until_gate()
    with pytest.raises(AwaitingApproval):
        run.do_gate()
    return run


@pytest.mark.long
def test_waiver_is_named_in_every_report(waived, tmp_path):
    folder = run_folder(waived, tmp_path / "runs")
    collect_reports(folder)
    assert title(render_index(folder)) == WAIVED
    assert WAIVED in run_row(folder).cells
    assert WAIVED in call("verify", waived.bundle, "--trust", waived.trust)
    card = (waived.bundle / "README.md").read_text()
    assert f"**{WAIVED}.** Epsilon of one user " in card
    release = Release.of(waived.bundle, "s3://releases/glyphs/1.0")
    assert release.properties["fedemb.headline"] == WAIVED
    assert release.properties["fedemb.waived"] == "no_gain_over_public"
    assert release.run.headline.sentence().startswith(f"{WAIVED}; epsilon of one user ")
    checklist = (folder.reports / "verdict.html").read_text()
    assert f"<code>no_gain_over_public</code> waived by ada: {REASON}" in checklist


def test_waiver_is_still_shown_when_the_verdict_file_is_missing(waived, tmp_path):
    folder = run_folder(waived, tmp_path / "runs")
    folder.output("verdict").unlink()
    assert title(render_index(folder)) == WAIVED


def test_release_without_waiver_is_titled_released_in_every_report(released_run, tmp_path):
    folder = run_folder(released_run, tmp_path / "runs")
    assert title(render_index(folder)) == "Released"
    assert "Released" in run_row(folder).cells
    assert "\nReleased; epsilon of one user " in call(
        "verify", released_run.bundle, "--trust", released_run.trust
    )
    assert "**Released.** Epsilon of one user " in (released_run.bundle / "README.md").read_text()
    release = Release.of(released_run.bundle, "s3://releases/glyphs/1.0")
    assert release.properties["fedemb.state"] == "Released"


def test_verdict_that_names_another_waiver_than_the_ledger_is_not_released(waived, tmp_path):
    run = honest_run.copy_of(waived, tmp_path / "run")
    verdict = json.loads(run.verdict.read_text())
    run.rewrite(run.verdict, waivers=[{**verdict["waivers"][0], "actor": "somebody else"}])
    with pytest.raises(GateDenied, match="not those of the ledger"):
        run.do_release()


def test_run_waiting_for_approval_is_shown_as_waiting(waiting, tmp_path):
    folder = run_folder(waiting, tmp_path / "runs", **WAITING)
    page = render_index(folder)
    assert title(page) == "Waiting for approval: 0 of 2 given"
    assert 'class="verdict plain"' in page
    assert "Waiting for approval: 0 of 2 given" in run_row(folder).cells


def test_missing_approval_is_reported_after_all_other_reasons(tmp_path):
    run = without_gain(honest_run.start(tmp_path / "run", policy=policy(approvals=2)).until_gate())
    with pytest.raises(GateDenied) as denied:
        run.do_gate()
    assert denied.value.exit_code == 3
    assert str(denied.value).startswith("the gain over ")
    verdict = read(run.verdict, VerdictDocument).body
    assert verdict.reasons == ["no_gain_over_public", "not_approved"]
    assert RULES[-1].code == verdict.checks[-1].rule == "not_approved"
    folder = run_folder(run, tmp_path / "runs", **DENIED)
    assert title(render_index(folder)) == "Refused: no gain over public"


def test_forged_verdict_is_not_shown(waiting, tmp_path):
    folder = run_folder(waiting, tmp_path / "runs", **DENIED)
    path = folder.output("verdict")
    path.write_text(path.read_text().replace('"allow": false', '"allow": true'))
    assert title(render_index(folder)) == "Refused: gate_release, gate denied"


# ---- approving --------------------------------------------------------------------------------


def name_people(run, *keys: Path) -> None:
    named = [f"{path.name}={path}.pub" for path in keys]
    stores = ("--ledger", run.ledger_uri, "--keys", run.keys_uri)
    call("ledger", "approvers", *named, *stores, "--reason", "the board")


def test_approver_is_shown_the_figures_and_what_the_gate_will_decide(waiting, tmp_path):
    run = honest_run.copy_of(waiting, tmp_path / "run")
    run.config = waiting.config
    ada, bob = ssh_key(tmp_path, "ada"), ssh_key(tmp_path, "bob")
    name_people(run, ada, bob)
    folder = run_folder(run, tmp_path / "runs", **WAITING)
    out = call("approve", folder.root, "--key", ada, "--yes")
    lines = out.splitlines()
    order = ("Epsilon of one user, all runs: ", "Gain over the best baseline")
    found = [next(i for i, line in enumerate(lines) if line.startswith(s)) for s in order]
    assert found == sorted(found)
    assert "after your signature: still waiting, 1 of 2 approvals" in out
    out = call("approve", folder.root, "--key", bob, "--yes")
    assert "after your signature: the gate allows the release\n" in out
    run.do("gate release")
    folder = run_folder(run, tmp_path / "after")
    page = render_index(folder)
    assert title(page) == "Released"
    assert "Approved by ada" in page
    assert "Approved by bob" in page
    assert "approved by ada, bob" in call("verify", run.bundle, "--trust", run.trust)


def test_run_denied_by_other_rules_cannot_be_approved(tmp_path):
    run = without_gain(honest_run.start(tmp_path / "run", policy=policy(approvals=1)).until_gate())
    with pytest.raises(GateDenied):
        run.do_gate()
    ada = ssh_key(tmp_path, "ada")
    name_people(run, ada)
    folder = run_folder(run, tmp_path / "runs", **DENIED)
    head = run.ledger().head
    with pytest.raises(
        Refused, match=r"stays refused, with or without approvals: .*no_gain_over_public"
    ):
        call("approve", folder.root, "--key", ada, "--yes")
    assert run.ledger().head == head
