"""The first page of a run in the frame that Kubeflow's UI shows HTML artifacts in."""

import html

import pytest

from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.utility import UtilityReport
from fedemb.documents.verdict import ReleaseMarker, VerdictDocument
from fedemb.foundation.document import read
from fedemb.reports.headline import Failure, RunFacts, headline
from fedemb.reports.lineage import read_steps
from fedemb.reports.report import render
from fedemb.steps.show_outcome import PAGES, shown_of

pytestmark = pytest.mark.browser

FRAME = (
    "<!doctype html><html><body style='margin:0'><iframe sandbox='allow-scripts' "
    "style='border:1px solid #ddd;box-sizing:border-box;width:100%;min-height:600px' "
    'srcdoc="{}"></iframe></body></html>'
)
"""Attributes and style of KFP 2.17's viewer of HTML artifacts."""
FOLDER = "gs://team-fedemb-public/runs/dp-fedemb/0f9b2c1e-5a7d-4f37-9f6e-2b8f6a1f6c55"
WAIVER = {
    "code": "no_gain_over_public",
    "actor": "ada",
    "reason": "first release on the new start, agreed with the board",
    "sequence": 9,
}
REFUSED = {
    "step": "gate_release",
    "exit_code": 3,
    "error": "GateDenied",
    "message": "the report's run_id is not what the evidence gives; run account_privacy again",
}


def _verdict(run, state: str) -> VerdictDocument:
    body = read(run.verdict, VerdictDocument).body
    if state == "released":
        return body
    code, outcome = {
        "waived": ("no_gain_over_public", "waived"),
        "waiting": ("not_approved", "failed"),
        "refused": ("report_differs", "failed"),
    }[state]
    checks = [
        check.model_copy(update={"outcome": outcome}) if check.rule == code else check
        for check in body.checks
    ]
    changes = {"checks": [check.model_dump() for check in checks]}
    if state == "waived":
        changes |= {"waived": [code], "waivers": [WAIVER]}
    else:
        changes |= {"allow": False, "reasons": [code]}
    if state == "waiting":
        changes |= {"approvals": [{"actor": "ada", "sequence": 9}], "approvals_needed": 2}
    return VerdictDocument.of_fields({**body.model_dump(mode="json"), **changes})


def _page(run, state: str) -> tuple[str, str]:
    """Page and title of the run in a state."""
    out = state in ("released", "waived")
    failed = [REFUSED] if state == "refused" else []
    facts = RunFacts(
        verdict=_verdict(run, state),
        report=read(run.report, PrivacyReport).body,
        utility=read(run.utility, UtilityReport).body,
        released=out,
        failures=[Failure("gate_release", 3, "GateDenied")] if failed else [],
    )
    release = read(run.root / "release.json", ReleaseMarker).body if out else None
    pages = {name: f"{FOLDER}/account-privacy/8a1f/{name}" for name in PAGES}
    found = headline(facts)
    shown = shown_of(
        FOLDER,
        found=found,
        facts=facts,
        failed=failed,
        release=release,
        addresses=pages,
        lineage=read_steps(run.lineage),
    )
    return render("run_outcome.html", **shown), found.title


STATES = ("released", "waived", "waiting", "refused")


@pytest.mark.parametrize("look", [(state, w) for state in STATES for w in (1400, 700, 400)])
def test_page_fits_the_frame_of_kubeflow_and_needs_nothing_it_forbids(
    browser, released_run, screenshots, tmp_path, look
):
    state, width = look
    page, title = _page(released_run, state)
    framed, alone = tmp_path / "framed.html", tmp_path / "alone.html"
    framed.write_text(FRAME.format(html.escape(page, quote=True)))
    alone.write_text(page)
    pictures = [screenshots / f"kubeflow-{state}-{width}-{part}.png" for part in ("frame", "all")]
    visit = browser.open(framed, width=width, scheme="light", screenshot=pictures[0])
    assert visit.problems == []
    assert [url for url in visit.requests if url != "about:srcdoc"] == []
    assert visit.overflow <= 0
    # What a sandboxed frame holds cannot be asked from outside: the same page at its width.
    visit = browser.open(alone, width=width - 2, scheme="light", screenshot=pictures[1])
    assert visit.overflow <= 0
    assert title in visit.text
    assert "Epsilon of one user, all runs" in visit.text
    assert "target=" not in page  # the frame may open no window
