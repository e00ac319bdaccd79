"""From the second run of a policy on, the price of one run is shown with that of all."""

import pytest

from fedemb.documents.privacy_report import BlockSpent, PrivacyReport
from fedemb.foundation.document import read
from fedemb.pipelines.run.directory import RunState
from fedemb.pipelines.run.local import closing_lines
from fedemb.release.verify import verify_release
from fedemb.reports.privacy_text import all_runs
from tests.kit.pipeline_runs import honest_run
from tests.kit.run_folder import run_folder


@pytest.fixture(scope="module")
def weeks(tmp_path_factory):
    """Two runs of one policy, released."""
    root = tmp_path_factory.mktemp("weeks")
    made = []
    for number, name in enumerate(("monday", "tuesday"), start=1):
        run = honest_run.start(root / name, name, made[0].policy_root if made else None)
        run.config = honest_run.config(**{"release.version": f"{number}.0"})
        run.until_release()
        made.append(run)
    return made


def test_closing_line_states_cumulative_epsilon_from_the_second_run(weeks, tmp_path):
    folders = (run_folder(run, tmp_path) for run in weeks)
    first, second = (closing_lines(folder, RunState(exit_code=0))[0] for folder in folders)
    assert "together" not in first
    spent = weeks[1].ledger().spent("all/0").epsilon
    sentence = f"all 2 charges of policy 'weekly' on these users together: epsilon {spent:.4g} of"
    assert f"{sentence} the cap 3" in second
    one = weeks[1].ledger().terms.delta
    assert f"at delta {one:g}" in second


def _with_blocks(report, *runs):
    blocks = [
        BlockSpent(block=f"all/{n}", epsilon=1.5, runs=number) for n, number in enumerate(runs)
    ]
    numbers = {"max_block_epsilon": 1.5, "policy_id": "weekly", "cap": 3.0, "delta": 1e-5}
    cumulative = report.cumulative.model_copy(update={"blocks": blocks, **numbers})
    return report.model_copy(update={"cumulative": cumulative})


def test_cumulative_epsilon_is_that_of_the_fullest_block_of_the_run(weeks):
    """A run on new users alone says nothing of those whose blocks are fuller."""
    report = read(weeks[0].report, PrivacyReport).body
    assert all_runs(_with_blocks(report, 1)) is None
    assert all_runs(_with_blocks(report, 1, 2)) == (
        "all 2 charges of policy 'weekly' on these users together: epsilon 1.5 of the cap 3 at "
        "delta 1e-05, for those of the fullest block"
    )


@pytest.mark.parametrize("number", [0, 1])
def test_verify_states_the_epsilon_of_all_runs(weeks, number):
    run = weeks[number]
    bundle = run.root / "releases" / "glyphs" / f"{number + 1}.0"
    with honest_run.stand_in_for_serving():
        found = verify_release(str(bundle), run.trust)
    assert found.problems == ()
    assert ("all_runs" in found.facts) == (number == 1)
    if number:
        assert "all 2 charges of policy 'weekly' on these users together" in found.facts["all_runs"]
