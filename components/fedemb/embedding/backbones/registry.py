"""Backbones by name. A module of this folder that registers one is all it takes to add one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any

from fedemb.config import ModelConfig

Build = Callable[[Any, ModelConfig], Any]
"""Input tensor and settings to output tensor: the layers of a backbone."""

_FOUND: dict[str, Build] = {}


def backbone(name: str) -> Callable[[Build], Build]:
    """Registers the decorated function under a name of the configuration."""

    def register(build: Build) -> Build:
        if name in _FOUND:
            raise ValueError(f"two backbones are called {name}; give one another name")
        _FOUND[name] = build
        return build

    return register


@cache
def backbones() -> dict[str, Build]:
    """All backbones of the modules in this folder, by name, ascending."""
    package = __package__ or ""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
    return dict(sorted(_FOUND.items()))
