"""Shapes in signatures are checked while tests run, and never in a run: jaxtyping's, by beartype.

Imported by conftest.py before any package is. In a module of `PACKAGES`, each function whose
signature names a shape is put behind a check. Others stay as they are, so that this costs little
and stand-ins of tests may have any type.
"""

import re
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from types import FunctionType, ModuleType

from beartype import beartype
from jaxtyping import jaxtyped

PACKAGES = (
    "fedemb.data",
    "fedemb.training",
    "fedemb.evaluation",
    "fedemb.models",
    "fedemb.privacy",
    "fedemb.release",
)
SHAPE = re.compile(r"\b(Float|Float32|Float64|Int|Int32|Int64|UInt8|UInt64|Bool|Num)\[")

OWN_ERRORS = "fedemb.training.simulation"
"""A module that users call: it checks shapes itself, and tests read its errors."""

UNSUPPORTED = "LocalData["
"""Start of an annotation that beartype does not support: a generic named tuple."""


def names_a_shape(function: FunctionType) -> bool:
    """Whether an argument or the result has a shape."""
    return any(SHAPE.search(str(kind)) for kind in function.__annotations__.values())


def check_shapes(module: ModuleType) -> None:
    """Puts the functions and methods of a module that name shapes behind a check."""
    own = [value for value in vars(module).values() if isinstance(value, type)]
    for place in (module, *(kind for kind in own if kind.__module__ == module.__name__)):
        for name, value in list(vars(place).items()):
            if not isinstance(value, FunctionType) or value.__module__ != module.__name__:
                continue
            if names_a_shape(value):
                for part, hint in list(value.__annotations__.items()):
                    if str(hint).startswith(UNSUPPORTED):
                        del value.__annotations__[part]
                setattr(place, name, jaxtyped(value, typechecker=beartype))


class _Loader(SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        check_shapes(module)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith(PACKAGES) or fullname == OWN_ERRORS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Checks the shapes in packages that are imported later. Idempotent."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    early = [name for name in sys.modules if name.startswith(PACKAGES)]
    assert not early, f"{early[0]} was imported before its shapes could be checked"
    sys.meta_path.insert(0, _Finder())
