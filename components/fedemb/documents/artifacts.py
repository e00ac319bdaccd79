"""Artifacts: canonical JSON, digests, and the three kinds that never mix.

`Raw` is private data and anything un-noised computed from it; `Noised` is output of the mechanism;
`Public` is everything else. The kinds are types, so that a function which publishes can take
`Noised | Public` and a type checker, as well as `require_publishable`, refuses a `Raw`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedemb.errors import Refused


@dataclass(frozen=True)
class Artifact:
    """A file or folder written by one step."""

    path: Path


@dataclass(frozen=True)
class Raw(Artifact):
    """Private: lives below the private root, never in the pipeline UI, never in a bundle."""


@dataclass(frozen=True)
class Noised(Artifact):
    """Output of the mechanism: may be published once the gate allows it."""


@dataclass(frozen=True)
class Public(Artifact):
    """Computed from public constants and noised outputs alone."""


def require_publishable(*artifacts: Artifact) -> None:
    """Refuses anything that is not `Noised` or `Public`.

    Raises:
      Refused: one of them is raw.
    """
    for artifact in artifacts:
        if not isinstance(artifact, Noised | Public):
            raise Refused(
                f"{artifact.path.name} is {type(artifact).__name__}, and only Noised or Public "
                "artifacts may be published; leave it out"
            )
