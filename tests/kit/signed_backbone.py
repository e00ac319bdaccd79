"""A public backbone without pretraining, signed as pretrain_public signs."""

import io
import zipfile
from typing import Any

import h5py
import numpy as np

from fedemb.config.run import config_digest
from fedemb.documents.model import Pretrained, UsersManifest
from fedemb.foundation.canonical_json import file_digest
from fedemb.foundation.files import write_bytes
from fedemb.keys.trust import Signer, write_signed
from fedemb.ledger import read_reservation
from fedemb.runtime.step_context import StepContext


def keras_file(tensors: dict[str, np.ndarray]) -> bytes:
    """A `.keras` file without Keras: tensors under the names Keras gives them."""
    weights, packed = io.BytesIO(), io.BytesIO()
    with h5py.File(weights, "w") as file:
        for name, values in tensors.items():
            file[name] = values.astype(np.float32)
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in {
            "metadata.json": "{}",
            "config.json": '{"compile_config": null}',
            "model.weights.h5": weights.getvalue(),
        }.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return packed.getvalue()


def small_weights(value: float = 0.5) -> bytes:
    """A `.keras` file with one tensor."""
    return keras_file({"layers/dense/vars/0": np.full((2, 2), value)})


def sign_start(context: StepContext, **measured: Any) -> None:
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
        "head_images": 0,
        "seed": config.training.seed,
        **measured,
    }
    signer = Signer.newest(context.keys, str(Pretrained.role))
    write_signed(folder / "pretrained.json", Pretrained.of_fields(fields), signer)


def sign_users(context: StepContext, commitments: dict[str, str]) -> None:
    """Signs the manifest of the users of a run, as partition_users does."""
    config, reservation = context.config, context.artifacts.reservation
    fields = {
        "run_id": context.run_id,
        "config_sha": config_digest(config),
        "reservation_sha": file_digest(reservation),
        "virtual_clients": config.partition.virtual_clients,
        "groupings": config.partition.groupings,
        "blocks": read_reservation(reservation).blocks,
        "image_size": config.model.image_size,
        "channels": config.model.channels,
        "commitments": commitments,
    }
    signer = Signer.newest(context.keys, str(UsersManifest.role))
    write_signed(context.artifacts.users, UsersManifest.of_fields(fields), signer)


def no_rehearsal(config, plan, start) -> None:
    """Instead of `backend_rounds.rehearse`, where the backbone is only bytes of the right form."""
