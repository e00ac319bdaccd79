"""Every page opens without a network, without errors, and fits a phone, in light and dark."""

import pytest

from fedemb.documents.audit import AuditReport
from fedemb.documents.utility import UtilityReport
from fedemb.foundation.document import read
from fedemb.reports.measured_words import attack_sentences, utility_sentence
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


def measured(step, folder, settings, document, words):
    finished = shared_run(lambda name: folder / name)
    step(finished.context(settings, folder))
    (folder / "report.html").rename(folder / "page.html")
    return words(read(folder / "report.json", document).body)


def build_utility(folder, _):
    from fedemb.steps.evaluate_embeddings import run

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
    "utility_report": build_utility,
    "audit_report": build_audit,
    "audit_report_release": build_audit_of_release,
    "audit_report_full": of_a_released_run("audit_report", "Noise receipts"),
    "gate_checklist": of_a_released_run("verdict", "rules passed, 0 failed"),
    "privacy_report": build_privacy_report,
}


@pytest.fixture(scope="module", params=BUILDERS)
def page(request, tmp_path_factory):
    """Name, file, and words it must show."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder / "page.html", BUILDERS[request.param](folder, request)


@pytest.mark.parametrize("look", [(1100, "light"), (390, "dark"), (390, "light")])
def test_page_opens_clean_and_fits(browser, page, screenshots, look):
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


def test_a_page_that_misbehaves_is_noticed(browser, tmp_path):
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
