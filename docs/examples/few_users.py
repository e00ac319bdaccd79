"""3,148 identities of Omniglot: how far a private projection on a frozen public backbone gets.

A character in each of its four turns is an identity, as is customary; those of every sixth alphabet
are public. `python docs/examples/few_users.py omniglot_background.parquet --noise 1.5`
"""

import argparse
import io
import time

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

import fedemb
from fedemb.config import PretrainingConfig
from fedemb.evaluation.metrics import recall
from fedemb.models.backbones import build_backbone
from fedemb.models.inference import embed
from fedemb.training.central import pretrain

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--noise", type=float, default=1.5)
options = parser.parse_args()
started = time.time()

rows = pq.read_table(options.data).to_pylist()
alphabets = sorted({row["alphabet"] for row in rows})[::6]
drawings = [Image.open(io.BytesIO(row["image"])).convert("L").resize((28, 28)) for row in rows]
images = np.concatenate([[np.asarray(d.rotate(90 * n)) for d in drawings] for n in range(4)])
images = images[..., None]
names = [f"{row['character']} {90 * n}" for n in range(4) for row in rows]
people = np.unique(names, return_inverse=True)[1]
public = np.tile([row["alphabet"] in alphabets for row in rows], 4)
private = np.unique(people[~public])
held_out = np.random.default_rng(0).choice(private, len(private) // 10, replace=False)
evaluated = np.isin(people, held_out)
trains = ~public & ~evaluated
print(f"{len(private) - len(held_out)} train, {len(held_out)} are held out")

model = fedemb.ModelConfig(backbone="tiny", embedding_dim=32, trainable="projection")
margin = {"kind": "cosface", "scale": 16, "margin": 0.2}
settings = PretrainingConfig(
    kind="supervised", source={"uri": options.data}, epochs=10, batch_size=64, loss=margin
)
start = build_backbone(model, 0)
pretrain(start, images[public], people[public], settings, seed=0)

simulation = fedemb.Simulation(
    mechanism=fedemb.GroupPoissonGaussianConfig(
        kind="group_poisson_gaussian",
        rounds=8,
        sampling_probability=0.5,
        noise_multiplier=options.noise,
    ),
    virtual_clients=500,  # of five or six people
    population=2500,
    delta=1e-4,
    model=model,
    training=fedemb.TrainingConfig(
        local=fedemb.LocalTrainingConfig(
            epochs=3,
            max_examples_per_client=256,
            client_learning_rate=0.1,
            head_learning_rate_scale=12,
            head_init="prototypes",
            loss=margin,
        ),
        server={"learning_rate": 1.0, "momentum": 0.5, "ema_decay": 0.5},
    ),
)
training_started = time.time()
result = simulation.train(images[trains], people[trains], people[trains], start=start)
print(result.guarantee)
for rate in (1e-3, 1e-2):
    before, after = (
        recall(embed(net, images[evaluated]), people[evaluated], rate)
        for net in (start, result.model)
    )
    print(f"accepting {rate:g}: start {before}, after {after}, gain {after - before}")
print(f"private training {time.time() - training_started:.0f} s, all {time.time() - started:.0f} s")
