"""Preparing a run writes all or nothing, and data on the command line reaches every source."""

from types import SimpleNamespace

import pytest

from fedemb.errors import ConfigError, InputError
from fedemb.foundation.step_logging import FEATURES
from fedemb.pipelines.run import local
from fedemb.pipelines.run.command import prepare
from fedemb.pipelines.run.directory import RunDirectory, RunState
from fedemb.pipelines.run.local import EVENT, ROUND, Pace, iter_runs

POLICY = ["storage.ledger=/policy/ledger", "storage.keys=/policy/keys"]


def test_wrong_configuration_leaves_no_run_behind(tmp_path):
    with pytest.raises(ConfigError):
        prepare("quickstart", ["mechanism.rounds=-1"], tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_people_s_images_need_a_ledger_that_outlasts_the_run(tmp_path):
    """Each run with a ledger of its own would claim the epsilon of a first run."""
    with pytest.raises(ConfigError, match="--policy"):
        prepare("omniglot_identities", [], tmp_path / "runs", data="/data/x.parquet")
    assert not (tmp_path / "runs").exists()


def test_run_of_the_same_name_is_refused(tmp_path):
    prepare("omniglot_identities", POLICY, tmp_path, "one", data="/data/x.parquet")
    with pytest.raises(InputError, match="--resume"):
        prepare("omniglot_identities", POLICY, tmp_path, "one", data="/data/x.parquet")


@pytest.mark.parametrize("name", ["../x", "a/b", "a b", "", ".hidden", "x" * 101])
def test_name_that_is_no_folder_of_its_own_is_refused(tmp_path, name):
    with pytest.raises(InputError, match="--run-id"):
        prepare("omniglot_identities", POLICY, tmp_path / "runs", name, data="/data/x.parquet")
    assert not (tmp_path / "runs").exists()


def test_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="--runs"):
        prepare("omniglot_identities", POLICY, tmp_path / "file", "one", data="/data/x.parquet")


def test_data_replaces_the_public_source_of_the_same_file(tmp_path):
    run = prepare("omniglot_identities", POLICY, tmp_path, data="/data/x.parquet")
    config = run.config()
    assert config.data.source.uri == "/data/x.parquet"
    assert config.pretraining.source.uri == "/data/x.parquet"


def test_private_root_is_closed_to_others(tmp_path):
    run = prepare("omniglot_identities", POLICY, tmp_path, data="/data/x.parquet")
    assert run.private.stat().st_mode & 0o077 == 0


def test_opening_a_folder_that_is_no_run_says_so(tmp_path):
    with pytest.raises(InputError, match="No run at"):
        RunDirectory.open(tmp_path)


def test_runs_are_listed_newest_first(tmp_path):
    for name in ("a", "b"):
        prepare("omniglot_identities", POLICY, tmp_path, name, data="/data/x.parquet")
    assert {run.run_id for run in iter_runs(tmp_path)} == {"a", "b"}


def test_events_and_rounds_are_found_behind_the_indentation_of_kfp():
    line = '    fedemb-event: {"kind": "step_started", "step": "plan_privacy", "pid": 7}\n'
    assert EVENT.search(line).group(1).startswith('{"kind"')
    line = "    INFO fedemb.training.trainer: round 3/60\n"
    assert ROUND.search(line).groups() == ("3", "60")


def test_time_left_is_told_by_who_watches_from_recent_rounds(monkeypatch):
    """The first rounds compile: after `RECENT` others they count no more."""
    now = [0.0]
    monkeypatch.setattr(local.time, "monotonic", lambda: now[0])
    pace, said = Pace(), {}
    for ended in range(1, 61):
        now[0] += 600.0 if ended == 2 else 6.0
        said[ended] = pace.left(ended, 60)
    assert said[1] == "time left unknown"
    assert said[2] == "about 580 min left"
    assert said[20] == "about 4 min left"
    assert said[50] == "about 60 s left"
    assert said[60] == "done"


def test_time_left_does_not_take_features_of_first_rounds_for_the_cost_of_a_round(monkeypatch):
    """A training of 366 rounds that takes 4 minutes, most of them for features in the first."""
    now, chance, rounds = [0.0], 0.16384, 366
    monkeypatch.setattr(local.time, "monotonic", lambda: now[0])

    def seconds(number):
        return 0.3 + 130 * chance * (1 - chance) ** number

    pace, wrong = Pace(chance), []
    for ended in range(1, rounds):
        now[0] += seconds(ended - 1) + (0.05 if ended % 2 else -0.05)
        text = pace.left(ended, rounds)
        if ended < 4:
            continue
        number, unit = text.split()[1:3]
        said = float(number) * (60 if unit == "min" else 1)
        wrong.append(abs(said - sum(map(seconds, range(ended, rounds)))))
    assert max(wrong) < 45
    plain = Pace()
    now[0] = 0.0
    for ended in range(1, 7):
        now[0] += seconds(ended - 1)
        text = plain.left(ended, rounds)
    assert int(text.split()[1]) > 60  # without the chance: an hour


def test_progress_of_features_is_shown_with_their_time_left(monkeypatch):
    now, shown = [0.0], []
    monkeypatch.setattr(local.time, "monotonic", lambda: now[0])
    view = local.PlainView(shown.append)
    pace, child = Pace(1.0), SimpleNamespace(step="train_dp_sgd", pid=1)
    for percent in (5, 10):
        now[0] += 30.0
        line = f"    INFO fedemb.engine.feature_cache: {FEATURES % percent}\n"
        local._follow(line, RunState(), view, child, pace)
    assert shown == [
        "train_dp_sgd: computing features, 5 %, time left unknown",
        "train_dp_sgd: computing features, 10 %, about 9 min left, then the rounds",
    ]
