"""What is protected is said in one way: no text of a guarantee for images speaks of users."""

import html
import re

import pytest

from fedemb.config import RunConfig
from fedemb.documents.evidence import read_evidence
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.foundation.document import read
from fedemb.pipelines.cli.planned import lines, priced
from fedemb.pipelines.run.command import _stated
from fedemb.privacy.section import UNITS
from fedemb.release.model_card import model_card
from fedemb.reports.measured_words import covers
from fedemb.training.noise_warnings import warnings
from tests.kit.pipeline_runs import honest_run

ALONE = {
    "kind": "poisson_gaussian",
    "rounds": 6,
    "sampling_probability": 0.05,
    "noise_multiplier": 2.0,
    "units_per_round": 900,
}
OTHER = {"user": r"\b(one|every|each|any one) image\b", "image": r"\busers?\b|\bpeople\b"}


def _config(unit):
    tree = honest_run.config().model_dump(mode="json") | {"mechanism": ALONE}
    if unit == "image":
        tree["policy"]["unit"] = "image"
        tree["data"]["source"]["columns"]["user_id"] = None
    return RunConfig.model_validate(tree)


@pytest.fixture(scope="module", params=UNITS)
def said(request, tmp_path_factory):
    """A unit, and every text about it; the audit has words of its own."""
    config = _config(request.param)
    run = honest_run.start(tmp_path_factory.mktemp(request.param))
    run.config = config
    run.until_gate()
    page = re.sub(r"<(style|svg).*?</\1>", "", run.page.read_text(), flags=re.DOTALL)
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


def test_page_and_card_name_the_unit_in_its_one_sentence(said):
    unit, texts = said
    for name in ("page", "card"):
        assert UNITS[unit].covered in re.sub(r"\s+", " ", texts[name]), name


def test_no_text_speaks_of_the_other_unit(said):
    unit, texts = said
    for name, text in texts.items():
        rest = text.replace(UNITS[unit].covered, "")
        found = re.search(rf".{{0,40}}({OTHER[unit]}).{{0,40}}", rest)
        assert not found, (name, found)
