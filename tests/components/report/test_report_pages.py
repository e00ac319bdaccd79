"""Pages and charts: self-contained, deterministic, escaped, legible."""

import re

import pytest

from fedemb.documents.fields import Interval
from fedemb.errors import ArtifactError
from fedemb.reports import charts, report
from fedemb.reports.charts import Line
from fedemb.reports.headline import RunFacts, headline

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


def test_texts_are_escaped():
    assert "<script>" not in index(run_id="<script>alert(1)</script>")
    chart = charts.bar_chart([("<b>&", SHARE)], x_label="<i>", alt='"><script>')
    assert not re.search(r"<(b|i|script)>", chart)


def test_a_page_names_no_address_and_no_script():
    for page in (index(), *example_charts()):
        text = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
        assert not re.search(r"https?:|//\w|@import|<script|src=|url\((?!#)", text)


def test_a_value_the_template_misses_is_an_error():
    with pytest.raises(ArtifactError, match=r"run_index\.html"):
        report.render("run_index.html", tone="plain")
