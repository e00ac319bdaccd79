"""Preparing a run writes all or nothing, and data on the command line reaches every source."""

import subprocess
import time

import pytest

from fedemb.errors import ConfigError, InputError
from fedemb.pipelines.run import local
from fedemb.pipelines.run.command import prepare
from fedemb.pipelines.run.load_config import PolicyPlaces, load_config, with_policy
from fedemb.pipelines.run.local import EVENT, ROUND

POLICY = ["storage.ledger=/policy/ledger", "storage.keys=/policy/keys"]


def test_invalid_configuration_creates_no_run_folder(tmp_path):
    with pytest.raises(ConfigError):
        prepare("quickstart", ["mechanism.rounds=-1"], tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_existing_run_id_is_refused(tmp_path):
    prepare("omniglot_identities", POLICY, tmp_path, "one", data="/data/x.parquet")
    with pytest.raises(InputError, match="--resume"):
        prepare("omniglot_identities", POLICY, tmp_path, "one", data="/data/x.parquet")


def test_private_root_is_closed_to_others(tmp_path):
    run = prepare("omniglot_identities", POLICY, tmp_path, data="/data/x.parquet")
    assert run.private.stat().st_mode & 0o077 == 0


def test_events_and_rounds_are_parsed_from_indented_kfp_output():
    line = '    fedemb-event: {"kind": "step_started", "step": "plan_privacy", "pid": 7}\n'
    assert EVENT.search(line).group(1).startswith('{"kind"')
    line = "    INFO fedemb.training.trainer: round 3/60\n"
    assert ROUND.search(line).groups() == ("3", "60")


def test_step_without_rounds_says_how_long_it_has_been_running(monkeypatch):
    monkeypatch.setattr(local, "HEARTBEAT", 0.04)
    said, child = [], subprocess.Popen(["true"])
    view, stop = local.View(said.append), local._StopOnInterrupt(child)
    stop.pid, stop.step, stop.since = child.pid, "train_model", time.monotonic() - 120
    with local._beating(view, stop):
        while not said:
            time.sleep(0.01)
    assert said[0] == "train_model: running for 2 min"
    stop.pid = None
    said.clear()
    with local._beating(view, stop):
        time.sleep(0.2)
    assert not said
    child.wait()


def test_fedemb_policy_applies_only_without_a_configured_ledger(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDEMB_POLICY", str(tmp_path / "mine"))
    config = load_config("quickstart")
    assert with_policy(config, None).storage.keys == f"{tmp_path}/mine/keys"
    other = config.updated({"storage.ledger": "gs://other"})
    assert with_policy(other, None) == other
    assert PolicyPlaces(keys="k").in_folder(None) == (None, "k", None)
    with pytest.raises(ConfigError, match="two ledgers for the same users"):
        with_policy(other, tmp_path)
