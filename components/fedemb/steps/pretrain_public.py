"""The public backbone: trained on public images, imported, or drawn from the seed.

This step reads no private data and costs no privacy budget. Provenance and licence are set in the
configuration, and shown in report and model card.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from kfp import dsl

from fedemb.config import BackboneConfig, ModelConfig, PretrainingConfig
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
    images = classes = constant_images = 0
    loss: float | None = None
    if pretraining.kind == "import":
        backbone, constant_images = _imported(start)
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
        images, classes, loss = _train(backbone, model, pretraining, seed)
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
    }
    card = Pretrained.of_fields(fields)
    signer = Signer.newest(keys, "pretrain")
    return write_signed(output_dir / "pretrained.json", card, signer).json


def _imported(start: BackboneConfig) -> tuple[Model, int]:
    """Returns the imported backbone, and the number of public images of its constants."""
    from fedemb.data.photos import PhotoReader
    from fedemb.data.sources import read_some_public_images

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
        public = read_some_public_images(
            pretraining.source, PhotoReader(*model.photo), pretraining.constant_images, start.seed
        )
        constant_images = fit_features(backbone, public)
    return with_head(backbone, model) if model.classes else backbone, constant_images


def _train(
    backbone: Model, model: ModelConfig, pretraining: PretrainingConfig, seed: int
) -> tuple[int, int, float]:
    """Trains on the public source; returns its images, classes and the last epoch's loss."""
    from fedemb.data.photos import PhotoReader
    from fedemb.data.sources import read_public_images

    if pretraining.source is None:
        raise InputError("pretraining.source is missing; name the public images")
    images, labels = read_public_images(pretraining.source, PhotoReader(*model.photo))
    classes = len(np.unique(labels))
    if classes < 2:
        raise InputError(
            f"the public source holds {len(images)} images of {classes} classes, wanted at least 2 "
            "classes; name a larger one, or pretraining.kind: none"
        )
    _LOG.info("pretraining on %d public images", len(images))
    if model.classes:  # public classes differ, so the head is added later
        backbone = without_head(backbone)
    loss = 0.0
    if backbone.trainable_variables:
        loss = pretrain(backbone, images, labels, pretraining, seed=seed)
    fit_constants(backbone, images[: pretraining.constant_images])
    if not np.isfinite(loss):
        raise InputError(
            f"public pretraining ended with loss {loss}; lower pretraining.learning_rate"
        )
    return len(images), classes, loss
