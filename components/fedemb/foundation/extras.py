"""Optional dependencies: the extra of the package that has a module which is not installed."""

from __future__ import annotations

import importlib.util

from fedemb.errors import ConfigError

_EXTRAS = {
    "train": {
        "array_record": "ArrayRecord",
        "keras": "Keras",
        "matplotlib": "Matplotlib",
        "PIL": "Pillow",
        "pillow_heif": "pillow-heif",
        "pyarrow": "PyArrow",
        "tensorboard": "TensorBoard",
        "tensorflow": "TensorFlow",
    },
    "jax": {"jax": "JAX"},
    "beam": {
        "apache_beam": "Apache Beam",
        "tensorflow_metadata": "TensorFlow Metadata",
        "tfx_bsl": "tfx-bsl",
    },
    "kfp": {
        "kfp": "Kubeflow Pipelines",
        "kfp_server_api": "Kubeflow Pipelines",
        "kubernetes": "the Kubernetes client",
        "openlineage": "OpenLineage",
    },
    "registries": {
        "mlflow": "the client of MLflow",
        "model_registry": "the client of Kubeflow's Model Registry",
    },
    "stores": {
        "google.api_core": "the client of Google Cloud",
        "google.auth": "the client of Google Cloud",
        "google.cloud": "the client of Google Cloud",
        "google_crc32c": "google-crc32c",
        "s3fs": "s3fs",
    },
}
"""Extra -> module -> its name for users; a module of several extras is listed in one of them."""
_OWNERS = {
    module: (extra, name) for extra, names in _EXTRAS.items() for module, name in names.items()
}


def missing_extra(error: ImportError) -> ConfigError | None:
    """Returns the error that names the extra of a missing module; None: it is in no extra."""
    module = error.name or ""
    absent = isinstance(error, ModuleNotFoundError) or module == "google.cloud"
    return _absent(module) if absent and _owner(module) else None


def _owner(module: str) -> tuple[str, str] | None:
    """Returns the extra of a module, and the name of its package for users."""
    parts = module.split(".")
    return _OWNERS.get(parts[0]) or _OWNERS.get(".".join(parts[:2]))


def require_modules(*modules: str) -> None:
    """Checks that modules are installed, without importing them.

    Raises:
      ConfigError: names the missing modules and the command that installs their extras.
    """
    absent = [module for module in modules if not _is_installed(module)]
    if absent:
        raise _absent(*absent)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def _absent(*modules: str) -> ConfigError:
    owners = [owner for module in modules if (owner := _owner(module))]
    extras = sorted({extra for extra, _ in owners})
    names = _listed([name for _, name in owners])
    are, them = ("are", "them") if len(owners) > 1 else ("is", "it")
    return ConfigError(
        f"This command needs {names}, which {are} in the extra{'s' * (len(extras) > 1)} "
        f'{_listed(extras)}. Install {them}: pip install "fedemb[{",".join(extras)}]"'
    )


def _listed(words: list[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
