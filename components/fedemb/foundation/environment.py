"""The Python environment of a process: optional and deferred packages, backend, garbage."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

from fedemb.errors import ConfigError

_EXTRAS = {
    "train": {
        "array_record": "ArrayRecord",
        "keras": "Keras",
        "matplotlib": "Matplotlib",
        "PIL": "Pillow",
        "pillow_heif": "pillow-heif",
        "pyarrow": "PyArrow",
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


_loading = threading.RLock()


def defer_package(name: str) -> None:
    """Makes `import name.submodule` skip the `__init__` of the top-level package `name`.

    The `__init__` runs when a name that is not a submodule is first read from the package, so every
    import still works. A package that is already imported, or not installed, stays as it is.
    """
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None or spec.submodule_search_locations is None:
        return
    package = importlib.util.module_from_spec(spec)
    package.__class__ = _DeferredPackage
    sys.modules[name] = package


class _DeferredPackage(ModuleType):
    """A package whose `__init__` has not run yet."""

    def __getattr__(self, name: str) -> Any:
        with _loading:
            if type(self) is _DeferredPackage:
                submodule = f"{self.__name__}.{name}"
                if not name.startswith("__") and importlib.util.find_spec(submodule):
                    return importlib.import_module(submodule)
                object.__setattr__(self, "__class__", ModuleType)
                _run_init(self)
        return getattr(self, name)


def _run_init(package: ModuleType) -> None:
    assert package.__spec__ is not None
    assert package.__spec__.loader is not None
    package.__spec__.loader.exec_module(package)


Backend = Literal["tensorflow", "jax"]
"""Keras backend of a trainer."""
BACKEND = "FEDEMB_BACKEND"
"""Variable with the only backend that the profile's trainers have."""
ACCELERATOR = "FEDEMB_ACCELERATOR"
"""Variable with the kind of accelerator that the profile assigns to the step."""


def require_backend(name: str) -> None:
    """Refuses a `training.backend` that is not available in the trainer.

    Raises:
      ConfigError: the profile has only the other backend.
    """
    only = os.environ.get(BACKEND, name)
    if only != name:
        raise ConfigError(
            f"training.backend is {name}, and the images of this pipeline train on {only}; set "
            f"training.backend: {only}, or submit to a pipeline that was compiled for the other one"
        )


@contextmanager
def light_import(*optional: str) -> Generator[None]:
    """Imports packages without collecting garbage, and without optional modules.

    The optional modules, which a package only tries to load, can be imported afterwards.
    """
    absent = set(optional) - sys.modules.keys()
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: not importable
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()  # later collections never walk what the imports made
    finally:
        for name in absent:
            sys.modules.pop(name, None)
        if enabled:
            gc.enable()
