"""Defers a package's own `__init__` to the first use of a name that the `__init__` defines.

Python runs a package's `__init__` before any of its submodules. Where the `__init__` imports much
more than the submodule needs, the submodule pays for all of it. `importlib.util.LazyLoader` does
not help: importing a submodule reads `__path__`, and its modules load on every attribute.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

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
