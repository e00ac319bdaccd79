"""The public backbone: trained on public images, imported, or drawn from the seed.

This step reads no private data and costs no privacy budget. Provenance and licence are set in the
configuration, and shown in report and model card.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from kfp import dsl

from fedemb.config import BackboneConfig
from fedemb.data.builtin import drawn_images
from fedemb.documents.artifacts import Public
from fedemb.documents.model import Pretrained
from fedemb.errors import ConfigError, InputError
from fedemb.foundation.canonical_json import JsonObject
from fedemb.keys import KeyStore
from fedemb.keys.trust import Signer, write_signed
from fedemb.models.backbone_files import require_finite, save_backbone
from fedemb.models.backbones import (
    build_backbone,
    cut,
    trainable_variables,
    with_head,
    without_head,
)
from fedemb.models.imported import import_backbone
from fedemb.models.keras_backend import Model, load_keras
from fedemb.models.public_features import (
    fit_constants,
    fit_features,
    fit_head,
    needs_public_images,
    with_public_features,
)
from fedemb.runtime.step import Rights, step
from fedemb.training.central import pretrain

_LOG = logging.getLogger(__name__)


@step(
    image="trainer",
    private=False,
    cached=True,
    resources="pretrain",
    outputs={"pretrained": Public},
    rights=Rights(input=("public",), signing=("pretrain",)),
)
def pretrain_public(
    model: str, pretraining: str, seed: int, keys: str, pretrained: dsl.Output[dsl.Model]
):
    """Trains the backbone on public images, imports one, or draws initial weights."""
    from fedemb.runtime.step import step_process

    with step_process("pretrain_public", locals()) as context:
        # Inside: what TensorFlow writes when it is loaded goes nowhere.
        from fedemb.steps.pretrain_public import run

        card = run(context.backbone_config, context.artifacts.pretrained, context.keys)
        pretrained.metadata.update(weights_sha=card["weights_sha"])


def run(start: BackboneConfig, output_dir: Path, keys: KeyStore) -> JsonObject:
    """Writes `backbone.keras` and `pretrained.json`, and returns the content of the latter.

    Raises:
      InputError: the public source is missing or too small.
      ArtifactError: the backbone to import is damaged or has layers that are not allowed, or a
        weight is NaN or infinite.
      ConfigError: the backbone is unknown or mixes the images of different users.
    """
    load_keras()
    model, pretraining, seed = start.model, start.pretraining, start.seed
    images = classes = constant_images = head_images = 0
    loss: float | None = None
    public = _public_images(start)
    if pretraining.kind == "import":
        backbone, constant_images = _imported(start, public[0])
    else:
        backbone = build_backbone(model, seed)
    trainable_variables(backbone, model.trainable)  # raises before any charge
    if model.trainable == "projection" and not model.classes:
        cut(backbone, model.trainable)
    if pretraining.kind == "none" and model.whitened_directions:
        constant_images = pretraining.constant_images
        drawn = drawn_images(constant_images, model.image_size, model.channels, seed)
        fit_constants(without_head(backbone) if model.classes else backbone, drawn)
    if pretraining.kind == "supervised":
        images, classes, loss = _train(backbone, start, *public)
    if model.classes:
        head_images = fit_head(backbone, model.classes, *public)
    backbone = with_public_features(backbone, model.keep_public_features)
    require_finite(backbone)
    fields = {
        "pretraining_kind": pretraining.kind,
        "weights_sha": save_backbone(backbone, output_dir / "backbone.keras"),
        "model": model.model_dump(mode="json"),
        "images": images,
        "classes": classes,
        "final_loss": loss,
        "seed": seed,
        "constant_images": constant_images,
        "head_images": head_images,
    }
    card = Pretrained.of_fields(fields)
    signer = Signer.newest(keys, "pretrain")
    return write_signed(output_dir / "pretrained.json", card, signer).json


def _public_images(start: BackboneConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns the public images that the backbone or its head needs, and their classes."""
    from fedemb.data.photos import PhotoReader
    from fedemb.data.sources import read_public_images

    model, pretraining = start.model, start.pretraining
    needed = model.classes or model.changes_features or pretraining.kind == "supervised"
    if pretraining.source is None or pretraining.kind == "none" or not needed:
        return np.zeros(0, np.uint8), np.zeros(0, str)
    most = pretraining.constant_images if pretraining.kind == "import" else None
    return read_public_images(pretraining.source, PhotoReader(*model.photo), most, start.seed)


def _imported(start: BackboneConfig, public: np.ndarray) -> tuple[Model, int]:
    """Returns the imported backbone, and the number of public images of its constants."""
    model, pretraining, path = start.model, start.pretraining, start.pretraining.import_path or ""
    backbone = import_backbone(Path(path), model, pixels=pretraining.import_pixels, seed=start.seed)
    constant_images = 0
    if needs_public_images(backbone):
        if pretraining.source is None:
            raise ConfigError(
                "model.whitened_directions, principal_directions and square_root take constants "
                "from public images, and pretraining.source is missing. Name public images, or set "
                "all three to 0 or false"
            )
        constant_images = fit_features(backbone, public, classifies=bool(model.classes))
    return with_head(backbone, model) if model.classes else backbone, constant_images


def _train(
    backbone: Model, start: BackboneConfig, images: np.ndarray, names: np.ndarray
) -> tuple[int, int, float]:
    """Trains on the public images with a class; returns their number, classes, last loss."""
    pretraining = start.pretraining
    images, names = images[names != ""], names[names != ""]
    classes, labels = np.unique(names, return_inverse=True)
    if len(classes) < 2:
        raise InputError(
            f"the public source holds {len(images)} images of {len(classes)} classes, wanted at "
            "least 2 classes; name columns.label or a larger one, or pretraining.kind: none"
        )
    _LOG.info("pretraining on %d public images", len(images))
    if start.model.classes:  # the public classes may be others
        backbone = without_head(backbone)
    loss = 0.0
    if backbone.trainable_variables:
        loss = pretrain(backbone, images, labels, pretraining, seed=start.seed)
    fit_constants(backbone, images[: pretraining.constant_images])
    if not np.isfinite(loss):
        raise InputError(
            f"public pretraining ended with loss {loss}; lower pretraining.learning_rate"
        )
    return len(images), len(classes), loss
