"""A run whose noise was lost by a careless change is refused by the gate, in a whole pipeline.

The change is made to a copy of the product, and the evidence of the run refuses it.
"""

import os
import subprocess

import pytest

from fedemb.pipelines.run.directory import RunDirectory
from tests.kit.pipeline_runs.whole_run import run_command
from tests.planted_bugs.runner import mutants, patched, planted


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("change", "codes"),
    [
        ("trainer_steps_with_the_raw_mean", {"fold_differs"}),
        ("noise_forgotten", {"noise_receipt_failed"}),
    ],
)
def test_run_without_its_noise_is_refused_in_words_that_say_which(tmp_path, change, codes):
    (mutant,) = [mutant for mutant in mutants() if mutant.name == change]
    copy = planted(patched(mutant), tmp_path / "copy")
    environment = {**os.environ, "PYTHONPATH": str(copy / "components")}
    done = subprocess.run(
        run_command(tmp_path / "runs", "--run-id", "only"),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    verdict = RunDirectory(tmp_path / "runs" / "only").document("verdict")
    assert not verdict["allow"]
    assert codes <= set(verdict["reasons"])
