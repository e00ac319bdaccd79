"""Every state of the headline on the first page of a run, on a wide screen and on a phone."""

import re

import pytest

from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.utility import UtilityReport
from fedemb.documents.verdict import VerdictDocument
from fedemb.foundation.document import read
from fedemb.reports.headline import WORDS, Failure, RunFacts, headline
from fedemb.reports.report import render
from tests.kit.pipeline_runs import honest_run

pytestmark = pytest.mark.browser

WAIVER = {
    "code": "no_gain_over_public",
    "actor": "ada.lovelace@analytical-engine.example.org",
    "reason": "first release on the new start, agreed with the board of the museum on Monday",
    "sequence": 9,
}
TONES = {"Released": "good", "Refused": "bad", "Stopped": "bad"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    made = honest_run.start(tmp_path_factory.mktemp("states") / "run").until_gate()
    made.do_gate()
    return made


def facts_of(run, name: str) -> RunFacts:
    verdict = read(run.verdict, VerdictDocument).body
    report = read(run.report, PrivacyReport).body
    utility = read(run.utility, UtilityReport).body
    terms = report.release.model_copy(update={"approval_hours": 48.0})
    dated = report.model_copy(update={"release": terms})

    def judged(**changes):
        return VerdictDocument.of_fields({**verdict.model_dump(mode="json"), **changes})

    denied = {"allow": False, "checks": []}
    waits = judged(**denied, reasons=["not_approved"], approvals_needed=2)
    waived = judged(waived=["no_gain_over_public"], waivers=[WAIVER])
    codes = ["evaluation_users_overlap_training", "report_differs", "round_log_incomplete"]
    refused = judged(**denied, reasons=codes)
    return {
        "Released": RunFacts(verdict, report, utility, released=True),
        "Released with a waiver": RunFacts(waived, report, utility, released=True),
        "Waiting for approval": RunFacts(waits, dated, utility),
        "Refused": RunFacts(refused, report, utility),
        "Refused at the deadline": RunFacts(waits, dated, utility, overdue=True),
        "Stopped": RunFacts(failures=[Failure("evaluate_embeddings", 4, "StorageError")]),
        "Running": RunFacts(running="evaluate_embeddings"),
        "Simulation": RunFacts(simulation=True, completed=True, utility=utility),
    }[name]


STATES = (
    "Released",
    "Released with a waiver",
    "Waiting for approval",
    "Refused",
    "Refused at the deadline",
    "Stopped",
    "Running",
    "Simulation",
)


@pytest.mark.parametrize("look", [(name, width) for name in STATES for width in (1400, 400)])
def test_headline_of_every_state_is_whole_and_fits(browser, run, screenshots, tmp_path, look):
    name, width = look
    found = headline(facts_of(run, name))
    state = name.removesuffix(" at the deadline")
    assert found.state == state
    assert found.title.startswith(state)
    assert len(found.title.split()) <= WORDS
    page = tmp_path / "page.html"
    page.write_text(
        render(
            "run_index.html",
            run_id="weekly-2026-11-21",
            purpose="simulation" if name == "Simulation" else "release",
            headline=found,
            guarantee="(7.553, 1e-05)-differential privacy for one user with everything they own",
            utility="On 900 identities that never trained, the model recognises 50.0 %.",
            release="none",
            steps=[("plan_privacy", "done", 1.0, None)],
            seconds=1.0,
            **dict.fromkeys(("reports", "budget", "artifacts", "facts", "verdict", "time")),
        )
    )
    picture = screenshots / f"headline-{name.replace(' ', '-').lower()}-{width}.png"
    visit = browser.open(page, width=width, scheme="light", screenshot=picture)
    assert visit.problems == []
    assert visit.overflow <= 0
    assert re.sub(r"\s+", " ", visit.text).count(found.title) >= 1
    assert f'class="verdict {TONES.get(state, "plain")}"' in page.read_text()
