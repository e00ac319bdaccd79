"""A public backbone without pretraining: one small tensor, signed as pretrain_public signs."""

import io
import zipfile

import h5py
import numpy as np

from fedemb.documents.model import Pretrained
from fedemb.foundation.canonical_json import file_digest
from fedemb.foundation.files import write_bytes
from fedemb.keys.trust import Signer, write_signed
from fedemb.runtime.step_context import StepContext


def small_weights(value: float = 0.5) -> bytes:
    """A `.keras` file with one tensor."""
    weights = io.BytesIO()
    with h5py.File(weights, "w") as file:
        file["layers/dense/vars/0"] = np.full((2, 2), value, np.float32)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("metadata.json", "{}")
        archive.writestr("model.weights.h5", weights.getvalue())
    return buffer.getvalue()


def sign_start(context: StepContext) -> None:
    """Says of the weights in `pretrained`, made up if missing, that they fit the run."""
    folder, config = context.artifacts.pretrained, context.config
    if not (folder / "backbone.keras").exists():
        write_bytes(folder / "backbone.keras", small_weights())
    fields = {
        "pretraining_kind": config.pretraining.kind,
        "weights_sha": file_digest(folder / "backbone.keras"),
        "model": config.model.model_dump(mode="json"),
        "images": 0,
        "classes": 0,
        "final_loss": None,
        "constant_images": 0,
        "seed": config.training.seed,
    }
    signer = Signer.newest(context.keys, str(Pretrained.role))
    write_signed(folder / "pretrained.json", Pretrained.of_fields(fields), signer)
