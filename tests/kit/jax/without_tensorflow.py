"""A process in which TensorFlow cannot be imported and Keras runs on JAX.

`python -m tests.kit.jax.without_tensorflow FOLDER` trains nothing: it imports the
core, builds each backbone, and loads what TensorFlow saved in the folder.
"""

import json
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

from tests.kit.process import python


class NoTensorFlow(MetaPathFinder):
    """Refuses to import TensorFlow and packages that need it."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".", maxsplit=1)[0] in ("tensorflow", "tensorflow_io"):
            raise ImportError(f"{name} is not installed here")


def forbid(devices=1):
    """From here on nothing imports TensorFlow, and Keras, not loaded yet, runs on JAX.

    A processor is made into so many devices. Programs are compiled as they are, not fast: each runs
    a few times here, and compiling them is most of what these tests take.
    """
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=1"
    )
    sys.meta_path.insert(0, NoTensorFlow())


def said_on_jax(module, *arguments):
    """The JSON that a module beside this one prints last, in a process of its own."""
    return json.loads(python("-m", f"tests.kit.jax.{module}", *arguments).splitlines()[-1])


def main(folder):
    """Prints what was built; raises where TensorFlow is asked for."""
    import numpy as np

    import fedemb.training.attempt
    import fedemb.training.rounds
    import fedemb.training.trainer
    import fedemb.training.units  # noqa: F401
    from fedemb.config import ModelConfig
    from fedemb.models.backbone_files import load_backbone
    from fedemb.models.backbones import build_backbone
    from fedemb.models.inference import embed
    from fedemb.models.networks import NETWORKS

    for name in NETWORKS:
        model = ModelConfig(backbone=name, image_size=32, channels=3, projection=True)
        build_backbone(model, 0)
        print("built", name, flush=True)  # noqa: T201
    for file in sorted(folder.glob("*.keras")):
        model = ModelConfig.model_validate_json(file.with_suffix(".json").read_text())
        found = embed(load_backbone(file, model), np.load(file.with_suffix(".images.npy")), 4)
        wanted = np.load(file.with_suffix(".embeddings.npy"))
        print("loaded", file.stem, float(np.abs(found - wanted).max()), flush=True)  # noqa: T201


if __name__ == "__main__":
    forbid()
    main(Path(sys.argv[1]))
