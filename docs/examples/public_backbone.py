"""A strong public backbone for small private data: 1,280 features learned on labelled photos.

`python docs/examples/public_backbone.py tinyimagenet32.parquet -o backbone.keras`; nothing of it is
private. Keras' applications with their published weights are stronger, where they can be had.
"""

import argparse
import time

import fedemb
from fedemb.config import PretrainingConfig
from fedemb.data.photos import PhotoReader
from fedemb.data.sources import read_public_images
from fedemb.engine import build_backbone, pretrain

parser = argparse.ArgumentParser()
parser.add_argument("photos", help="Parquet with the columns image and label")
parser.add_argument("-o", "--output", default="backbone.keras")
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()
started = time.time()

model = fedemb.ModelConfig(
    backbone="resnet8_wide", projection=False, embedding_dim=1280, image_size=32, channels=3
)
columns = {"label": "label"}
settings = PretrainingConfig(
    kind="supervised",
    source={"uri": options.photos, "columns": columns, "label_scope": "global"},
    epochs=options.epochs,
    batch_size=128,
    learning_rate=0.1,
    weight_decay=5e-4,
    mixed_precision=True,
    loss={"kind": "normalized_softmax", "scale": 16},
    augmentation={"rotation_degrees": 0, "shear": 0, "flip": True},
)
images, labels = read_public_images(settings.source, PhotoReader.of(model))
backbone = build_backbone(model, seed=0)
loss = pretrain(backbone, images, labels, settings, seed=0)
backbone.save(options.output)
print(f"{len(images):,} photos, loss {loss:.2f}, {time.time() - started:.0f} s: {options.output}")
