"""Pages and charts: self-contained, deterministic, escaped, legible."""

import re

import pytest
from jinja2 import Environment

from fedemb.documents.fields import Interval
from fedemb.errors import ArtifactError
from fedemb.reports import charts, formats, report
from fedemb.reports.charts import Line
from fedemb.reports.headline import Failure, RunFacts, headline

SHARE = Interval(value=0.3, low=0.2, high=0.4)
STEPS = [
    ("plan_privacy", "done", 1.2, None),
    ("train_dp_fedemb", "failed", 95.0, None),
    ("gate_release", "skipped", None, None),
]


def index(**overrides):
    context = {
        "run_id": "run-1",
        "purpose": "release",
        "headline": headline(RunFacts(released=True)),
        "guarantee": "epsilon 7.3",
        "utility": "recall 0.4",
        "release": "releases/run-1",
        "steps": STEPS,
        "seconds": 104.5,
        "verdict": None,
        "time": None,
        "facts": (),
        "reports": [("Privacy", "privacy.html", "A sentence.")],
        "budget": {
            "label": "fullest block",
            "spent_before": 2.0,
            "spent_now": 3.0,
            "cap": 8.0,
            "filtered": True,
        },
        "artifacts": [
            {
                "name": "users",
                "kind": "Raw",
                "step": "partition_users",
                "path": None,
                "digest": None,
            },
            {"name": "model", "kind": "Noised", "step": "train", "path": None, "digest": "ab" * 32},
        ],
    }
    return report.render("run_index.html", **(context | overrides))


def example_charts():
    lines = [Line("a", [1e-4, 1e-2, 1], [0.1, 0.5, 1], ([0, 0.4, 1], [0.2, 0.6, 1]))]
    return [
        charts.line_chart(
            lines,
            x=charts.Axis("x", log=True),
            y=charts.Axis("y"),
            alt="curve",
            diagonal="chance",
        ),
        charts.bar_chart([("a", SHARE), ("b", SHARE)], x_label="x", alt="bars"),
        charts.bar_chart([("a", SHARE)], x_label="x", alt="dots", reference=0.5),
    ]


def test_index_shows_the_closing_lines_steps_and_digests():
    page = index()
    for words in (
        "epsilon 7.3",
        "recall 0.4",
        "releases/run-1",
        "took 1 min",
        "abababababab",
    ):
        assert words in page
    assert "5 of 8" in page
    assert "skipped" in page


def test_a_refused_run_and_a_simulation_look_like_it():
    refused = headline(RunFacts(failures=[Failure("reserve_budget", 3, "BudgetExceeded")]))
    assert 'class="verdict bad"' in index(headline=refused)
    assert "can never be released" in index(purpose="simulation", release="none (simulation)")


def test_texts_are_escaped():
    assert "<script>" not in index(run_id="<script>alert(1)</script>")
    chart = charts.bar_chart([("<b>&", SHARE)], x_label="<i>", alt='"><script>')
    assert not re.search(r"<(b|i|script)>", chart)


def test_a_page_names_no_address_and_no_script():
    for page in (index(), *example_charts()):
        text = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
        assert not re.search(r"https?:|//\w|@import|<script|src=|url\((?!#)", text)


def test_charts_are_the_same_every_time_and_carry_no_date():
    one, two = example_charts(), example_charts()
    assert one == two
    assert not any("metadata" in chart or "Matplotlib" in chart for chart in one)


def test_charts_on_one_page_share_no_id():
    ids = [found for chart in example_charts() for found in re.findall(r'\bid="([^"]+)"', chart)]
    assert len(ids) == len(set(ids)) > 0
    for chart in example_charts():
        own = set(re.findall(r'\bid="([^"]+)"', chart))
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', chart)) <= own


def test_charts_take_their_colours_from_the_page():
    for chart in example_charts():
        colours = set(
            re.findall(r"#[0-9a-f]{6}\b", re.sub(r"var\([^)]*\)|url\([^)]*\)", "", chart))
        )
        assert not colours
        assert "currentColor" in chart
        assert 'role="img"' in chart


def test_a_value_the_template_misses_is_an_error():
    with pytest.raises(ArtifactError, match=r"run_index\.html"):
        report.render("run_index.html", tone="plain")


def test_page_has_contents_that_lead_to_its_sections():
    body = "<h2>One</h2><h2>Two &amp; more</h2><h2>Three</h2><h2>Four</h2>"
    page = report.with_contents(body)
    anchors = re.findall(r'<h2 id="([^"]+)">', page)
    assert anchors == re.findall(r'href="#([^"]+)"', page)
    assert len(set(anchors)) == 4
    assert "contents" not in report.with_contents("<h2>One</h2>")


def test_numbers_stay_on_one_line_and_pictures_as_they_are():
    kept = '<span class="number">1e-05</span>'
    assert report.unbroken("<p>at 1e-05 it</p>") == f"<p>at {kept} it</p>"
    assert report.unbroken("<b>[0.1, 0.2]</b>") == '<b><span class="number">[0.1, 0.2]</span></b>'
    assert report.unbroken("<p>sign `fedemb x`</p>") == "<p>sign <code>fedemb x</code></p>"
    for untouched in ("<svg><text>1e-05</text></svg>", '<p title="1e-05">x</p>', "<p>[a, b]</p>"):
        assert report.unbroken(untouched) == untouched


def test_index_without_a_certain_gain_is_not_green():
    assert 'class="verdict good"' in index()
    waiting = headline(RunFacts(failures=[Failure("gate_release", 6, "AwaitingApproval")]))
    assert 'class="verdict plain"' in index(headline=waiting)


def test_ticks_of_a_chart_are_those_it_is_given():
    line = Line("spent", [0, 1, 3], [0, 5, 5])
    ticks = [(1, "1\n22 Nov"), (3, "3\n23 Nov")]
    chart = charts.line_chart(
        [line],
        x=charts.Axis("record", ticks=ticks),
        y=charts.Axis("epsilon"),
        alt="a",
        steps=True,
    )
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", chart)
    assert "22 Nov" in texts
    assert "1.5" not in texts


def test_numbers_are_written_for_people():
    cases = {0.00123456: "0.00123", 123456.7: "123,457", 8.0: "8", 1e-7: "1e-07", None: "-"}
    assert {value: formats.significant(value) for value in cases} == cases
    assert formats.percent(0.1234) == "12.3 %"
    assert [formats.seconds(s) for s in (0.21, 75, 3700)] == ["0.2 s", "1 min 15 s", "1 h 1 min"]


# ---- colours ------------------------------------------------------------------------------------


def palettes():
    css = (report.TEMPLATES / "style.css").read_text()
    blocks = re.findall(r":root \{([^}]*)\}", css)
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks[:2]]


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_and_curves_have_contrast(scheme):
    palette = palettes()[scheme]
    for ground in ("paper", "card"):
        for name in ("ink", "soft", "accent", "good", "bad", "warn"):
            assert contrast(palette[name], palette[ground]) >= 4.5, (name, ground)
        for series in range(1, 5):
            assert contrast(palette[f"series-{series}"], palette[ground]) >= 3, (series, ground)


def test_every_stand_in_colour_has_a_css_colour():
    assert {charts.INK, charts.SOFT, charts.LINE, *charts.SERIES} == set(charts._CSS)


def test_templates_are_compiled_once(monkeypatch):
    index()
    monkeypatch.setattr(Environment, "compile", None)
    assert "Run run-1" in index()
