"""Pages and charts: self-contained, deterministic, escaped, legible."""

import html
import re
from dataclasses import replace

import pytest

from fedemb.documents.evidence import read_evidence
from fedemb.documents.fields import Interval
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.utility import Subgroup, Subgroups
from fedemb.errors import ArtifactError
from fedemb.foundation.document import read
from fedemb.pipelines.cli.planned import lines, priced
from fedemb.pipelines.run.command import _stated
from fedemb.privacy.section import UNITS
from fedemb.release.model_card import model_card
from fedemb.reports import charts, report
from fedemb.reports.charts import Line
from fedemb.reports.headline import RunFacts, headline
from fedemb.reports.pages import run_page
from fedemb.reports.utility_text import covers
from fedemb.training.noise_warnings import warnings
from tests.kit.pipeline_runs import honest_run

SHARE = Interval(value=0.3, low=0.2, high=0.4)
STEPS = [
    ("plan_privacy", "done", 1.2),
    ("train_model", "failed", 95.0),
    ("gate_release", "skipped", None),
]


def index(**overrides):
    facts = RunFacts(released=True)
    shown = run_page(
        facts,
        headline(facts),
        run="run-1",
        release="releases/run-1",
        pages={"privacy_page": "p.html"},
    )
    context = shown | {"folder": None, "steps": STEPS, "facts": ()} | overrides
    return report.render("run_page.html", **context)


def example_charts():
    lines = [Line("a", [1e-4, 1e-2, 1], [0.1, 0.5, 1])]
    return [
        charts.line_chart(
            lines, x=charts.Axis("x", log=True), y=charts.Axis("y"), alt="curve", diagonal="chance"
        ),
        charts.bar_chart([("a", SHARE), ("b", SHARE)], x_label="x", alt="bars"),
        charts.bar_chart([("a", SHARE)], x_label="x", alt="dots", reference=0.5),
    ]


@pytest.mark.parametrize(
    ("facts", "then"),
    [
        ({"released": True}, "fedemb embed PHOTOS"),
        ({"completed": True, "simulation": True}, "set purpose=release"),
        ({"completed": False}, "None"),
    ],
)
def test_page_of_a_run_that_ended_well_says_what_is_next(facts, then):
    known = RunFacts(**facts)
    shown = run_page(known, headline(known), run="run-1", release=None, pages={})
    assert then in str(dict(shown["closing"]).get("next"))


def test_six_curves_have_six_styles():
    lines = [Line(str(n), [0, 1], [n, n + 1]) for n in range(6)]
    chart = charts.line_chart(lines, x=charts.Axis("x"), y=charts.Axis("y"), alt="six")
    assert len(set(re.findall(r'style="(fill: none; stroke[^"]*--series[^"]*)"', chart))) == 6


def test_texts_are_escaped():
    assert "<script>" not in index(run="<script>alert(1)</script>")
    chart = charts.bar_chart([("<b>&", SHARE)], x_label="<i>", alt='"><script>')
    assert not re.search(r"<(b|i|script)>", chart)


def test_pages_contain_no_external_address_and_no_script():
    for page in (index(), *example_charts()):
        text = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
        assert not re.search(r"https?:|//\w|@import|<script|src=|url\((?!#)", text)


def test_missing_template_value_is_an_error():
    with pytest.raises(ArtifactError, match=r"run_page\.html"):
        report.render("run_page.html", tone="plain")


# ---- What is protected is said in one way: no text of a guarantee for images speaks of users ----


ALONE = {
    "kind": "poisson_gaussian",
    "rounds": 6,
    "sampling_probability": 0.05,
    "noise_multiplier": 2.0,
    "units_per_round": 900,
}
OTHER = {"user": r"\b(one|every|each|any one) image\b", "image": r"\busers?\b|\bpeople\b"}


def _config(unit):
    image = {"policy.unit": "image", "data.source.columns.user_id": None}
    return honest_run.config(mechanism=ALONE, **(image if unit == "image" else {}))


@pytest.fixture(scope="module", params=UNITS)
def unit_texts(request, tmp_path_factory):
    """A unit, and every text about it; the audit has words of its own."""
    config = _config(request.param)
    run = honest_run.start(tmp_path_factory.mktemp(request.param))
    run.config = config
    run.until_gate()
    page = re.sub(r"<(style|svg).*?</\1>", "", run.page.read_text(), flags=re.DOTALL)
    assert len(re.sub(r"<[^>]+>", " ", page).split()) <= 600
    page = re.sub(r"<h2[^>]*>Evidence</h2>.*?<h2", "<h2", page, flags=re.DOTALL)
    page = re.sub(r"<summary>Steps and.*", "", page, flags=re.DOTALL)  # names of steps
    evidence = read_evidence(config, run.artifacts)
    report = read(run.report, PrivacyReport)
    card = model_card(evidence, report, run.ledger(), (), ("glyphs", "1.0"))
    return request.param, {
        "page": html.unescape(re.sub(r"<[^>]+>", " ", page)),
        "card": "\n".join(part for part in card.splitlines() if not part.startswith("Audit: ")),
        "plan": "\n".join(lines(config, priced(config))),
        "warnings": "\n".join(
            text for code, text in warnings(config).items() if code != "delta_above_customary"
        ),
        "start": "\n".join(_stated(config)),
        "utility": covers(request.param),
    }


def test_page_and_card_contain_the_standard_sentence_of_the_unit(unit_texts):
    unit, texts = unit_texts
    for name in ("page", "card"):
        assert UNITS[unit].covered in re.sub(r"\s+", " ", texts[name]), name


def test_reports_name_only_their_own_unit(unit_texts):
    unit, texts = unit_texts
    for name, text in texts.items():
        rest = text.replace(UNITS[unit].covered, "")
        found = re.search(rf".{{0,40}}({OTHER[unit]}).{{0,40}}", rest)
        assert not found, (name, found)


# ---- The model card has the sections of a card on the Hugging Face Hub ----


@pytest.fixture(scope="module")
def card_of(tmp_path_factory):
    """Writes the card of a run with the subgroups of its held-out users."""
    run = honest_run.start(tmp_path_factory.mktemp("card")).until_gate()
    evidence, signed = read_evidence(run.config, run.artifacts), read(run.report, PrivacyReport)

    def write(subgroups):
        body = evidence.utility.body.model_copy(update={"subgroups": subgroups})
        measured = replace(evidence, utility=replace(evidence.utility, body=body))
        return model_card(measured, signed, run.ledger(), (), ("glyphs", "1.0"))

    return write


def test_card_states_use_training_data_and_limits(card_of):
    card = card_of(None)
    found = re.findall(r"^## (.+)$", card, re.MULTILINE)
    assert found == [
        *("Intended use", "Training data", "Privacy", "Utility", "Limits and fairness"),
        *("Use", "Licence", "Verify"),
    ]
    assert "Differences between groups were not measured" in card
    assert "data.source.columns.subgroup" in card
    assert "\n\n\n" not in card.replace("\n\n\n## Privacy", "")


def test_card_shows_each_group_at_the_common_threshold(card_of):
    low, high = (Interval(value=v, low=v - 0.1, high=v + 0.1) for v in (0.3, 0.6))
    groups = [
        Subgroup(
            name=name,
            images=40,
            identities=20,
            recall_at_own_threshold=high,
            recall_at_common_threshold=common,
            false_accept_rate_at_common_threshold=None,
        )
        for name, common in (("a_b", low), ("c", high))
    ]
    card = card_of(Subgroups(measured=groups, too_small=1))
    own = "60.0 % [50.0, 70.0]"
    assert rf"| a\_b | 20 | {own} | 30.0 % [20.0, 40.0] | - |" in card
    assert f"| c | 20 | {own} | {own} | - |" in card
    assert "were not measured" not in card
    assert "every group is too small" in card_of(Subgroups(measured=[], too_small=2))
