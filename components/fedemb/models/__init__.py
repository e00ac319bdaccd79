"""Networks: backbones, layers, losses, import, loading, inference."""

import os
from importlib.util import find_spec

if "KERAS_BACKEND" not in os.environ and find_spec("tensorflow") is None:
    os.environ["KERAS_BACKEND"] = "jax"  # the images gpu and tpu have no TensorFlow
