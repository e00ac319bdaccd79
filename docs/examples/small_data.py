"""A few hundred people: what a private projection on a frozen public backbone gives.

`python docs/examples/small_data.py signs signdigits.parquet --backbone backbone.keras`, the file of
`public_backbone.py`. A third of the users and of the classes are held out to evaluate with.
Without noise and with the noise that ten thousand such people would need, it shows what is lost.
"""

import argparse
import time

import numpy as np
import pyarrow.parquet as pq

import fedemb
from fedemb.data.photos import PhotoReader
from fedemb.engine import build_backbone, embed
from fedemb.evaluation.metrics import recall
from fedemb.models.loading import load_model
from fedemb.privacy.planning.calibration import with_target_epsilon
from fedemb.privacy.planning.plan import plan

COLUMNS = {
    "omniglot": ("character", "character"),  # a character is a person, as faces would be
    "signs": ("user_id", "user_id"),  # ten classes are too few to hold some out
    "groceries": ("user_id", "label"),
}
MANY = 10_000

parser = argparse.ArgumentParser()
parser.add_argument("name", choices=COLUMNS)
parser.add_argument("data")
parser.add_argument("--backbone", required=True)
parser.add_argument("--epsilon", type=float, default=8.0)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()

model = fedemb.ModelConfig(
    backbone="resnet8_wide", embedding_dim=64, image_size=32, channels=3, trainable="projection"
)
user, label = COLUMNS[options.name]
rows = [row for row in pq.read_table(options.data).to_pylist() if row[user] is not None]
images = np.stack([PhotoReader.of(model).read(row["image"]) for row in rows])
users, labels = (
    np.unique([str(row[column]) for row in rows], return_inverse=True)[1]
    for column in (user, label)
)
random = np.random.default_rng(options.seed)
held_out = [
    np.isin(ids, random.choice(ids.max() + 1, (ids.max() + 1) // 3, replace=False))
    for ids in ([labels] if user == label else [users, labels])
]
trains, evaluated = ~np.any(held_out, axis=0), np.all(held_out, axis=0)
people = len(np.unique(users[trains]))

frozen = load_model(options.backbone)
start = build_backbone(model, options.seed)
learned = frozen.get_weights()
start.set_weights([*learned, *start.get_weights()[len(learned) :]])


def simulation(noise_multiplier: float) -> fedemb.Simulation:
    """Eight rounds of half of the virtual clients, of six people each."""
    schedule = {"rounds": 8, "sampling_probability": 0.5}
    mechanism = (
        fedemb.GroupPoissonGaussianConfig(noise_multiplier=noise_multiplier, **schedule)
        if noise_multiplier
        else fedemb.NotPrivateConfig(**schedule)
    )
    return fedemb.Simulation(
        mechanism=mechanism,
        virtual_clients=max(1, people // 6),
        model=model,
        training=fedemb.TrainingConfig(
            local=fedemb.LocalTrainingConfig(
                epochs=3,
                max_examples_per_client=256,
                client_learning_rate=0.1,
                head_learning_rate_scale=12,
                head_init="prototypes",
                loss={"kind": "cosface", "scale": 16, "margin": 0.2},
            ),
            server={"learning_rate": 1.0, "momentum": 0.5, "ema_decay": 0.5},
        ),
    )


any_noise = simulation(1.0)
drawn = plan(any_noise.mechanism, virtual_clients=any_noise.virtual_clients)
noise = with_target_epsilon(drawn, options.epsilon, people**-1.1).noise_multiplier
print(
    f"{options.name}: {people} people and {trains.sum():,} images train, "
    f"{len(np.unique(users[evaluated]))} and {evaluated.sum():,} are held out"
)
first = recall(embed(start, images[evaluated]), labels[evaluated], 0.01)
# The projection starts at random, and noise makes another random one of it: what is gained by such
# a draw is luck, so gains are over the features before any projection.
before = recall(embed(frozen, images[evaluated]), labels[evaluated], 0.01)
print(f"public features: recall {before}, accepting 1 in 100; projected at random {first}")
for title, multiplier in (
    ("no noise, not private", 0.0),
    (f"noise as for {MANY:,} such people", noise * people / MANY),
    (f"epsilon {options.epsilon:g} at delta {people**-1.1:.1g}", noise),
):
    training_started = time.time()
    result = simulation(multiplier).train(
        images[trains], labels[trains], users[trains], start=start
    )
    after = recall(embed(result.model, images[evaluated]), labels[evaluated], 0.01)
    on_mean = multiplier / drawn.normalizer
    print(
        f"{title}: recall {after}, gain {after - before}; noise on the mean {on_mean:.2g}, "
        f"{time.time() - training_started:.0f} s"
    )
