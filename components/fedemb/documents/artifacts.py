"""The three kinds of artifacts.

`Raw` is private data and everything computed from it without noise. `Noised` is output of the
mechanism. `Public` is everything else. The kinds are types: a function that publishes takes
`Noised | Public`, so that a type checker and `require_publishable` refuse a `Raw` artifact.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedemb.errors import Refused


@dataclass(frozen=True)
class Artifact:
    """File or folder written by one step."""

    path: Path


@dataclass(frozen=True)
class Raw(Artifact):
    """Private: stored below the private root, never in the pipeline UI, never in a bundle."""


@dataclass(frozen=True)
class Noised(Artifact):
    """Output of the mechanism: may be published after the gate allows it."""


@dataclass(frozen=True)
class Public(Artifact):
    """Computed only from public constants and noised outputs."""


def require_publishable(*artifacts: Artifact) -> None:
    """Refuses anything that is not `Noised` or `Public`.

    Raises:
      Refused: an artifact is raw.
    """
    for artifact in artifacts:
        if not isinstance(artifact, Noised | Public):
            raise Refused(
                f"{artifact.path.name} is {type(artifact).__name__}, and only Noised or Public "
                "artifacts may be published; leave it out"
            )
