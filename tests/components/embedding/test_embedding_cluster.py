"""Several processes over gRPC: the same integers as one, and nothing committed when one is lost."""

import json
import os
import socket
import subprocess
import sys

import pytest

from fedemb.embedding import cluster
from fedemb.errors import ConfigError
from tests.conftest import REPOSITORY

SCRIPT = """
import numpy as np
from fedemb.embedding.cluster import training_devices
workers, devices = training_devices(1)
import tensorflow as tf
from fedemb.config import LocalTrainingConfig, ModelConfig
from fedemb.embedding import ClientExamples, RoundFunction, build_backbone
from fedemb.embedding import trainable_variables
from fedemb.errors import StorageError
from fedemb.privacy.mechanisms.not_private import NotPrivate
from fedemb.privacy.queries import build_mechanism

plan = NotPrivate(rounds=1, l2_norm_clip=0.1, noise_multiplier=0.0,
                  virtual_clients=9, groupings=1, sampling_probability=1.0)
random = np.random.default_rng(0)
clients = [
    ClientExamples(0, group, random.integers(0, 256, (5 + group, 12, 12, 1), np.uint8),
                   random.integers(0, 3, 5 + group))
    for group in range(9)
]

def round_on(workers, devices):
    mechanism = build_mechanism(plan, bytes(32), "run", 1, "0" * 64)
    backbone = build_backbone(ModelConfig(backbone="tiny", image_size=12, embedding_dim=8), 0)
    function = RoundFunction(backbone, mechanism, LocalTrainingConfig(batch_size=4), seed=1,
                             variables=trainable_variables(backbone, "last_block"),
                             workers=workers, devices=devices)
    def act():
        sums = function(function.initial_weights(), clients, 0)
        return mechanism.aggregate(0, sums.sample_state).sums_sha
    return act, {worker.head.device for worker in function._workers}

one, _ = round_on(1, None if devices is None else devices[:1])
many, places = round_on(workers, devices)
print("sums", workers, len(places), one(), many(), flush=True)
input()
try:
    many()
except StorageError:
    print("lost", flush=True)
"""


PAIR = {"chief": ["a:1"], "worker": ["b:1"]}


def _task(addresses, kind, index):
    hosts = {"chief": addresses[:1], "worker": addresses[1:]}
    task = {"type": kind, "index": index}
    return {**os.environ, "TF_CONFIG": json.dumps({"cluster": hosts, "task": task})}


def _addresses(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return [f"127.0.0.1:{port}" for port in ports]


def test_two_processes_give_the_same_sum_as_one_and_a_lost_one_is_noticed():
    addresses = _addresses(2)
    serve = [sys.executable, "-m", "fedemb.embedding.cluster"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    other = subprocess.Popen(
        serve, cwd=REPOSITORY, env=_task(addresses, "worker", 0), stderr=subprocess.DEVNULL
    )
    chief = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=REPOSITORY,
        env=_task(addresses, "chief", 0),
        text=True,
        **pipes,
    )
    try:
        lines = iter(chief.stdout.readline, "")
        found = next((line.split() for line in lines if line.startswith("sums")), None)
        assert found is not None, chief.stderr.read()[-2000:]
        assert found[1:3] == ["2", "2"]  # two workers, in two places
        assert found[3] == found[4]
        other.kill()
        other.wait()
        said, errors = chief.communicate("\n", timeout=120)
        assert "lost" in said, errors[-2000:]
    finally:
        for process in (chief, other):
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


@pytest.mark.parametrize(
    "described",
    [
        "{",
        '{"cluster": {"worker": ["a:1"]}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}',
        json.dumps({"cluster": PAIR, "task": {"type": "worker", "index": 3}}),
        json.dumps({"cluster": PAIR, "task": {"type": "worker", "index": 0}}),
    ],
    ids=["no-json", "no-task", "no-chief", "no-such-host", "not-the-chief"],
)
def test_cluster_that_cannot_train_is_refused_in_a_sentence(monkeypatch, described):
    monkeypatch.setenv("TF_CONFIG", described)
    with pytest.raises(ConfigError, match="TF_CONFIG"):
        cluster.connect()


def test_a_job_of_one_host_needs_no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert cluster.connect() is None
    alone = {"cluster": {"chief": ["a:1"]}, "task": {"type": "chief", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(alone))
    assert cluster.connect() is None
    with pytest.raises(ConfigError, match="must say that this process is a worker"):
        cluster.serve()
