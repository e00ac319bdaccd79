"""Backbones by name. To add a backbone, add a module to this folder that registers it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache

from fedemb.config import ModelConfig
from fedemb.models.arrays import Node

Build = Callable[[Node, ModelConfig], Node]
"""Function from input tensor and settings to output tensor: the layers of a backbone."""

_FOUND: dict[str, Build] = {}
_MIRRORING: set[str] = set()


def backbone(name: str, *, mirrors: bool = False) -> Callable[[Build], Build]:
    """Registers the decorated function under a name of the configuration.

    Args:
      name: name of the backbone.
      mirrors: whether the backbone supports `model.mirrored`.
    """

    def register(build: Build) -> Build:
        if name in _FOUND:
            raise ValueError(f"two backbones are called {name}; give one another name")
        _FOUND[name] = build
        _MIRRORING.update({name} if mirrors else ())
        return build

    return register


@cache
def backbones() -> dict[str, Build]:
    """Returns all backbones of the modules in this folder, by name, ascending."""
    package = __package__ or ""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
    return dict(sorted(_FOUND.items()))


def mirroring() -> list[str]:
    """Returns the names of the backbones that support `model.mirrored`."""
    return [name for name in backbones() if name in _MIRRORING]
