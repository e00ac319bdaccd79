"""Clients spread over devices: any number of them gives the same integer sum, bit for bit."""

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

SCRIPT = """
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
from fedemb.config import LocalTrainingConfig, ModelConfig
from fedemb.training import ClientExamples, RoundFunction, build_backbone
from fedemb.training import configure_threads
from fedemb.privacy.group_mechanisms import GroupPoissonGaussian
from fedemb.privacy.running import build_mechanism

configure_threads(4)
names = [device.name for device in tf.config.list_logical_devices("CPU")]
plan = GroupPoissonGaussian(rounds=1, l2_norm_clip=0.1, noise_multiplier=0.0,
                  virtual_clients=9, groupings=1, sampling_probability=1.0)
random = np.random.default_rng(0)
clients = [
    ClientExamples(0, group, random.integers(0, 256, (5 + group, 12, 12, 1), np.uint8),
                   random.integers(0, 3, 5 + group))
    for group in range(9)
]
for count in (1, 2, 4):
    mechanism = build_mechanism(plan, bytes(32), "run", 1, "0" * 64)
    backbone = build_backbone(ModelConfig(backbone="tiny", image_size=12, embedding_dim=8), 0)
    function = RoundFunction(backbone, mechanism, LocalTrainingConfig(batch_size=4), seed=1,
                             workers=count, devices=names[:count])
    used = {worker.weights[0].device for worker in function._workers}
    sums = function(function.initial_weights(), clients, 0)
    digest = mechanism.aggregate(0, sums.total).sums_sha
    print("devices", len(used), digest)
"""


@pytest.mark.slow
def test_one_two_and_four_devices_give_the_same_sum():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("devices")]
    assert [line[1] for line in lines] == ["1", "2", "4"]
    assert len({line[2] for line in lines}) == 1
