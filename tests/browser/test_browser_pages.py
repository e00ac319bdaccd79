"""Every page opens without a network, without errors, and fits a phone, in light and dark."""

import html

import pytest

from fedemb.documents.audit import AuditReport
from fedemb.documents.plan import PrivacyPlan
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.utility import UtilityReport
from fedemb.documents.verdict import VerdictDocument
from fedemb.foundation.document import read
from fedemb.reports.headline import Failure, RunFacts, headline
from fedemb.reports.pages import REPORTS, run_page
from fedemb.reports.report import render
from fedemb.reports.utility_text import attack_sentences, utility_sentence
from tests.kit.pipeline_runs.evaluation_run import config, shared_run
from tests.kit.sealed_bundle import seal

pytestmark = pytest.mark.browser


def build_index(folder, _):
    from fedemb.pipelines.run.pages import render_index
    from tests.kit.pipeline_runs.honest_run import start
    from tests.kit.run_folder import run_folder

    run = start(folder / "one").until_gate()
    run.do_gate()
    refused = {"exit_code": 3, "failed_step": "gate_release", "error": "GateDenied"}
    (folder / "page.html").write_text(render_index(run_folder(run, folder / "runs", **refused)))
    return "monday"


def build_runs(folder, _):
    from fedemb.reports.pages import runs_page

    rows = (("monday", "Released", "8"), ("tuesday", "Refused: <no> gain over public", "10"))
    (folder / "page.html").write_text(runs_page(folder, [[*row, *"abcdef"] for row in rows]))
    return "tuesday"


def measured(step, folder, settings, document, words):
    finished = shared_run(lambda name: folder / name)
    step(finished.context(settings, folder))
    (folder / "report.html").rename(folder / "page.html")
    return words(read(folder / "report.json", document).body)


def build_utility(folder, _):
    from fedemb.steps.evaluate_model import run

    finished = shared_run(lambda name: folder / name)
    start = finished.root / "pretrained" / "backbone.keras"
    before = seal(finished.context(config()), start, folder / "before")
    settings = config(
        **{
            "purpose": "simulation",
            "data.source.columns.subgroup": "group",
            "evaluation.previous_release": before,
        }
    )
    return measured(run, folder, settings, UtilityReport, utility_sentence)


def first_sentence(report):
    return attack_sentences(report)[0]


def build_audit(folder, _):
    from fedemb.steps.audit_privacy import run

    return measured(run, folder, config(purpose="simulation"), AuditReport, first_sentence)


def build_audit_of_release(folder, _):
    from fedemb.steps.audit_privacy import run

    return measured(run, folder, config(), AuditReport, first_sentence)


def of_a_released_run(name, words):
    """Builds a page of a run that went through the gate."""

    def build(folder, _):
        from fedemb.pipelines.run.pages import collect_reports
        from tests.kit.pipeline_runs.honest_run import start
        from tests.kit.run_folder import run_folder

        run = start(folder / "one").until_gate()
        run.do_gate()
        collect_reports(run_folder(run, folder / "runs"))[name].rename(folder / "page.html")
        return words

    return build


def build_privacy_report(folder, _):
    from tests.kit.pipeline_runs.honest_run import start

    first = start(folder / "one").until_gate()
    second = start(folder / "two", run_id="tuesday", policy_root=first.policy_root).until_gate()
    second.page.rename(folder / "page.html")
    return "Assumptions and limits"


BUILDERS = {
    "run_index": build_index,
    "runs_list": build_runs,
    "utility_report": build_utility,
    "audit_report": build_audit,
    "audit_report_release": build_audit_of_release,
    "audit_report_full": of_a_released_run("audit_report", "Noise receipts"),
    "gate_checklist": of_a_released_run("verdict", "rules passed, 0 rules failed"),
    "privacy_report": build_privacy_report,
}


@pytest.fixture(scope="module", params=BUILDERS)
def page(request, tmp_path_factory):
    """Name, file, and words it must show."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder / "page.html", BUILDERS[request.param](folder, request)


@pytest.mark.long
@pytest.mark.parametrize("look", [(1100, "light"), (390, "dark"), (390, "light")])
def test_page_loads_without_errors_or_requests_and_fits_the_width(browser, page, screenshots, look):
    (name, file, words), (width, scheme) = page, look
    picture = screenshots / f"{name}-{width}-{scheme}.png"
    visit = browser.open(file, width=width, scheme=scheme, screenshot=picture)
    assert visit.problems == []
    assert visit.requests == []
    assert visit.overflow <= 0
    assert words in visit.text
    if name.startswith(("audit", "gate")):
        assert visit.scrolling == []
    assert picture.stat().st_size > 10_000


@pytest.mark.long
def test_list_of_runs_is_sorted_by_the_column_that_is_selected(browser, tmp_path):
    build_runs(tmp_path, None)
    page, shot = tmp_path / "page.html", tmp_path / "page.png"
    browser.open(page, width=1100, scheme="light", screenshot=shot)
    names = "[...document.querySelectorAll('tbody th')].map(e => e.innerText).join()"
    for column, wanted in ((0, "monday,tuesday"), (0, "tuesday,monday"), (2, "monday,tuesday")):
        browser.evaluate(f"document.querySelectorAll('thead th')[{column}].click()")
        assert browser.evaluate(names) == wanted


@pytest.mark.long
def test_browser_check_finds_page_errors(browser, tmp_path):
    """The test tests itself: an error, a request and an overflow are all seen."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<script>missing()</script><img src='http://127.0.0.1:9/x.png'>"
        "<div style='width:5000px'>wide</div>"
        "<div class='scroll' style='width:100px;overflow-x:auto'><table><tr>"
        "<th style='min-width:200px'>a</th></tr></table></div>"
    )
    visit = browser.open(page, width=390, scheme="light", screenshot=tmp_path / "bad.png")
    assert visit.problems
    assert visit.requests == ["http://127.0.0.1:9/x.png"]
    assert visit.overflow > 0
    assert len(visit.scrolling) == 1


# ---- The first page of a run in the frame that Kubeflow's UI shows HTML artifacts in ----


FRAME = (
    "<!doctype html><html><body style='margin:0'><iframe sandbox='allow-scripts' "
    "style='border:1px solid #ddd;box-sizing:border-box;width:100%;min-height:600px' "
    'srcdoc="{}"></iframe></body></html>'
)
"""Attributes and style of KFP 2.17's viewer of HTML artifacts."""
FOLDER = "gs://team-fedemb-public/runs/fedemb/0f9b2c1e-5a7d-4f37-9f6e-2b8f6a1f6c55"
WAIVER = {
    "code": "no_gain_over_public",
    "actor": "ada",
    "reason": "first release on the new start, agreed with the board",
    "sequence": 9,
}
REFUSED = Failure(
    "gate_release",
    3,
    "GateDenied",
    "the report's run_id is not what the evidence gives; run account_privacy again",
)


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
    facts = RunFacts(
        verdict=_verdict(run, state),
        report=read(run.report, PrivacyReport).body,
        utility=read(run.utility, UtilityReport).body,
        plan=read(run.artifacts.privacy_plan, PrivacyPlan).body,
        released=out,
        failures=[REFUSED] if state == "refused" else [],
    )
    found = headline(facts)
    pages = {page: f"{FOLDER}/account-privacy/8a1f/{page}" for page, _ in REPORTS.values()}
    shown = run_page(
        facts, found, run="0f9b2c1e", release="glyphs/1.0" if out else None, pages=pages
    )
    return render("run_page.html", **shown, folder=FOLDER, steps=()), found.title


STATES = ("released", "waived", "waiting", "refused")


@pytest.mark.long
@pytest.mark.parametrize("look", [(state, w) for state in STATES for w in (1400, 700, 400)])
def test_run_page_fits_the_sandboxed_frame_of_kubeflow(
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
