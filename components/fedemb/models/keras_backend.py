"""The Keras backend of this process, TensorFlow or JAX, and its accelerators."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias, TypeVar, cast

from jaxtyping import Float32, Num

from fedemb.errors import ConfigError
from fedemb.foundation.cores import available_cores
from fedemb.foundation.environment import ACCELERATOR, light_import, require_backend

_LOG = logging.getLogger(__name__)
ACCELERATOR_FILES = ("/dev/nvidia0", "/dev/accel0", "/dev/vfio/0")
"""Device files of accelerators in a container: one of NVIDIA, two of Google."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""Version file of NVIDIA's driver."""
_SAME_BITS = "--xla_gpu_deterministic_ops=true --xla_gpu_shard_autotuning=false"
"""XLA flags for bit-exact repeatable results on GPUs, without kernel autotuning across hosts."""
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_KINDS = {"jax-cuda12-plugin": "jax[cuda12]", "libtpu": "jax[tpu]"}
"""Distributions that add an accelerator to JAX, and the extras that install them."""


def use_backend(name: str) -> None:
    """Selects the Keras backend of this process, before Keras is loaded.

    Args:
      name: `tensorflow` or `jax`.

    Raises:
      ConfigError: Keras is already loaded with another backend, or the backend is not installed.
    """
    require_backend(name)
    if name == "tensorflow" and find_spec("tensorflow") is None:
        raise ConfigError(
            "training.backend is tensorflow, which is not installed here; set training.backend: "
            "jax, or use the image cpu"
        )
    if "keras" in sys.modules:
        import keras

        found = keras.backend.backend()
        if found != name:
            raise ConfigError(
                f"Keras runs on {found} in this process, and training.backend is {name}; train in "
                "a process of its own, which imports Keras after fedemb"
            )
    os.environ["KERAS_BACKEND"] = name
    flags = os.environ.get("XLA_FLAGS", "")
    if name == "jax" and "xla_gpu_deterministic_ops" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_SAME_BITS}".strip()


def load_keras() -> None:
    """Imports Keras with its backend, in three fifths of the processor time that `import` takes.

    No garbage is collected meanwhile. Keras also imports scikit-learn, and TensorFlow Lite imports
    JAX, wherever they are installed; both are optional, the images lack them, and no step uses what
    they add. They can be imported afterwards.
    """
    if "keras" in sys.modules or "tensorflow" in sys.modules:
        return
    with_tensorflow = _backend_of_keras() == "tensorflow"
    with light_import("sklearn", *(("jax",) if with_tensorflow else ())):
        import keras  # noqa: F401  # pyright: ignore[reportUnusedImport]


def _backend_of_keras() -> str:
    """Returns the backend that Keras will load: that of the environment, else of its settings."""
    if name := os.environ.get("KERAS_BACKEND"):
        return name
    settings = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras") / "keras.json"
    try:
        return str(json.loads(settings.read_text()).get("backend", "tensorflow"))
    except (OSError, ValueError, AttributeError):
        return "tensorflow"


def keras_ops() -> ModuleType:
    """Returns `keras.ops`; imports Keras only when needed."""
    import keras

    return keras.ops


def keras_layers() -> ModuleType:
    """Returns `keras.layers`; imports Keras only when needed."""
    import keras

    return keras.layers


def input_node(shape: tuple[int, ...], name: str | None = None) -> Node:
    """Returns the input of a model for examples of a shape."""
    import keras

    return cast("Node", keras.Input(shape, name=name))  # a list only for a list of shapes


def all_layers(model: Model, *, include_self: bool = True) -> list[Layer]:
    """Returns the layers of a model and of all models in it; with the models themselves."""
    return [*model._flatten_layers(include_self=include_self)]  # pyright: ignore[reportPrivateUsage]


def exact_numbers() -> AbstractContextManager[None]:
    """Enables 64-bit computation in JAX while entered; TensorFlow always supports it."""
    import keras

    if keras.backend.backend() != "jax":
        return nullcontext()
    import jax

    return jax.enable_x64(True)


def traced(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Compiles a function of tensors for the backend."""
    import keras

    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function, autograph=False, reduce_retracing=True)


def jax_devices() -> list[JaxDevice]:
    """Returns the devices that JAX finds in this process.

    Raises:
      ConfigError: the step has an accelerator that JAX does not find, or JAX was installed for two
          kinds of accelerators.
    """
    from importlib.metadata import distributions

    found = {item.metadata["Name"].lower() for item in distributions()} & _KINDS.keys()
    if len(found) > 1:
        raise ConfigError(
            f"JAX is installed for two kinds of accelerator ({', '.join(sorted(found))}) and may "
            f"take either; keep one of {' and '.join(sorted(_KINDS.values()))} in this environment"
        )
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:  # set in JAX_PLATFORMS, but not available
        raise ConfigError(_unseen(str(error).splitlines()[0])) from error
    seen = [name for name in ACCELERATOR_FILES if Path(name).exists()]
    wanted = os.environ.get(ACCELERATOR) or (seen[0] if seen else None)
    if wanted and devices[0].platform == "cpu":
        raise ConfigError(_unseen(f"this step is to have {wanted}"))
    return devices


def _unseen(why: str) -> str:
    try:
        driver = f"the driver is {DRIVER_FILE.read_text().splitlines()[0]!r}, and CUDA 12 needs 525"
    except (OSError, IndexError):
        driver = "no NVIDIA driver found"
    return (
        f"{why}, but JAX finds only the CPU ({driver}). Use the image gpu or tpu on a node with a "
        "matching driver, or a profile without accelerators."
    )


# Types of arrays and models that cross packages.
#
# No framework is imported at run time: the names then mean any type, and tests check shapes.


if TYPE_CHECKING:
    from collections.abc import Callable

    import jax
    import keras
    import numpy as np
    import tensorflow as tf

    TfTensor: TypeAlias = tf.Tensor
    TfVariable: TypeAlias = tf.Variable
    JaxArray: TypeAlias = jax.Array

    Tensor: TypeAlias = tf.Tensor | jax.Array | np.ndarray
    """Array of a training backend, concrete or traced."""
    AnyTensor = TypeVar("AnyTensor", tf.Tensor, jax.Array, np.ndarray)
    """Array of one backend, the same in a whole signature."""
    Model: TypeAlias = keras.Model
    """Backbone or classifier."""
    Layer: TypeAlias = keras.layers.Layer
    """Layer of a model."""
    LayerMaker: TypeAlias = Callable[..., keras.layers.Layer]
    """Class of a layer, called with the settings of the layer."""
    Node: TypeAlias = keras.KerasTensor
    """Output of a layer while a model is built."""
    Variable: TypeAlias = keras.Variable
    """Variable of a model."""
else:
    AnyTensor = TypeVar("AnyTensor")
    TfTensor = TfVariable = JaxArray = Tensor = Model = Layer = LayerMaker = Node = Variable = Any


Part = TypeVar("Part")
"""Array of a named tuple: of NumPy on the host, or a tensor of a graph, or its specification."""


class JaxDevice(Protocol):
    """Device of JAX."""

    @property
    def platform(self) -> str:
        """Platform, such as `cpu` or `gpu`."""
        ...


# Scales pixels to a backbone's input range; `data/photos.py` decodes the pixels.


def preprocess(
    images: Num[Tensor, "*batch height width channels"],
) -> Float32[Tensor, "*batch height width channels"]:
    """Scales pixels to the range the backbones are trained on: `x / 128 - 1`.

    Args:
      images: uint8 (or any number) `[..., height, width, channels]` in 0..255.

    Returns:
      float32 of the same shape in [-1, 0.992].
    """
    ops = keras_ops()
    return ops.cast(images, "float32") * (1.0 / 128.0) - 1.0


def input_of(model: Model, examples: Tensor) -> Tensor:
    """Returns a model's input: scaled pixels, or the features of its trunk if it has been cut."""
    return preprocess(examples) if len(model.input_shape) == 4 else examples


# Threads and devices, configured once per process before TensorFlow starts.


def configure_threads(parallel_clients: int = 0) -> int:
    """Configures one thread per virtual client; returns the number of parallel clients.

    The intra-op threads of the process cannot be changed after TensorFlow has started. Parallel
    clients with one thread each are faster than one client with many threads, and the bits of a
    client then do not depend on the number of parallel clients.

    Args:
      parallel_clients: number from the configuration; 0: one per core, or per accelerator.
    """
    import tensorflow as tf

    workers = parallel_clients or len(tf.config.list_physical_devices("GPU")) or available_cores()
    try:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, workers))
    except RuntimeError:
        if tf.config.threading.get_intra_op_parallelism_threads() != 1:
            _LOG.info("TensorFlow has already started; its thread settings are unchanged")
    return workers


def accelerators() -> list[str] | None:
    """Returns the names of accelerators for clients; None on a machine without accelerators."""
    import tensorflow as tf

    return [device.name for device in tf.config.list_logical_devices("GPU")] or None
