"""An allowed verdict is for one name and version: nothing else is released with it."""

import pytest

from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.verdict import VerdictDocument
from fedemb.errors import GateDenied
from fedemb.foundation.document import read

OTHER = ({"release.version": "2"}, {"release.name": "faces"}, {"release.version": None})


def test_verdict_and_report_name_the_release(run):
    verdict = read(run.verdict, VerdictDocument).body
    report = read(run.report, PrivacyReport).body
    assert (verdict.name, verdict.version) == ("glyphs", "1.0")
    assert (report.release.name, report.release.version) == ("glyphs", "1.0")


@pytest.mark.parametrize("changes", OTHER)
def test_allowed_model_is_not_released_under_another_name(run, changes):
    run.config = run.config.updated(changes)
    with pytest.raises(GateDenied, match="the verdict does not allow the release"):
        run.do_release()
    assert not (run.root / "releases").exists()


@pytest.mark.parametrize("changes", OTHER)
def test_gate_asked_again_wants_a_report_of_the_new_name(run, changes):
    """Approvers sign the report, so a new name needs their approval again."""
    run.config = run.config.updated(changes)
    with pytest.raises(GateDenied, match=r"release\.(name|version) of the report differs"):
        run.do_gate()
    run.do("account gate release")
