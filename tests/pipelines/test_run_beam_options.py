"""`fedemb run --beam`: the options reach the engine, and a resumed run may take others."""

import subprocess
import sys

import pytest

from fedemb.pipelines.run.directory import RunDirectory

SMALL = [
    "data.builtin.users=100",
    "data.builtin.images_per_user=2",
    "data.builtin.public_classes=2",
    "data.builtin.public_images_per_class=2",
    "partition.virtual_clients=5",
    "policy.users_lower_bound=50",
    "policy.delta=1e-2",
    "pretraining.epochs=1",
    "release.train_despite_noise=the run is small",
    "release.min_gain_over_public=null",  # three rounds of a few hundred people gain nothing
]


def test_options_are_kept_beside_the_configuration_and_replaced_as_a_whole(tmp_path):
    run = RunDirectory(tmp_path)
    assert run.beam_options() == ()
    run.set_beam_options(["--runner=FlinkRunner", "--parallelism=2"])
    assert RunDirectory(tmp_path).beam_options() == ("--runner=FlinkRunner", "--parallelism=2")
    run.set_beam_options(["--runner=DirectRunner"])
    assert run.beam_options() == ("--runner=DirectRunner",)


@pytest.mark.slow
def test_an_engine_that_does_not_exist_stops_the_partition_in_a_sentence(tmp_path):
    command = [sys.executable, "-m", "fedemb", "run", "--runs", str(tmp_path)]
    command += [part for item in SMALL for part in ("--set", item)]
    done = subprocess.run(
        [*command, "--run-id", "first", "--beam=--runner=NoSuchRunner"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "NoSuchRunner" in done.stdout
