"""Image embedding models with user-level differential privacy.

Three tiers, each made of the one before:

building blocks  backbones and losses, a mechanism's plan and its price, queries, the round
                 function, the server's step, metrics
`Simulation`     a private training on arrays in memory; never releases
`run`            the pipeline: ledger, training, audit, gate, release

    >>> import fedemb
    >>> mechanism = fedemb.GroupPoissonGaussianConfig(
    ...     rounds=30, sampling_probability=0.1, noise_multiplier=0.83)
    >>> print(fedemb.guarantee(fedemb.plan(mechanism, virtual_clients=900), delta=1e-5))
    ... # doctest: +ELLIPSIS
    (7.553, 1e-05)-differential privacy for one user with everything they own, if ...

Names are imported when they are first used: `import fedemb` imports nothing else.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
_PLACES = {
    name.name: str(line.module)
    for line in _STUB.body
    if isinstance(line, ast.ImportFrom)
    for name in line.names
}
"""Public name -> its module; `__init__.pyi` says the same to type checkers."""

__all__ = sorted(_PLACES)  # noqa: PLE0605  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for (PEP 562)."""
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("fedemb")
    if name not in _PLACES:
        raise AttributeError(f"module 'fedemb' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
