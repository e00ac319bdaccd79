"""Where the artifacts of one run lie, by name."""

from __future__ import annotations

from pathlib import Path

from fedemb.errors import ArtifactError


class RunArtifacts:
    """Paths of artifacts by the names that the steps give them: `artifacts.privacy_plan`.

    A name is that of an input or output in the signature of a step's component. Documents and pages
    are files; `model` and `pretrained` are folders. Users and everything else Raw is not among
    them: it lies below the private root, see `StepContext.private`.

    Raises:
      ArtifactError: on a name that was not given.
    """

    def __init__(self, **paths: Path) -> None:
        self._paths = paths

    def __getattr__(self, name: str) -> Path:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._paths[name]
        except KeyError:
            raise ArtifactError(
                f"this step was given no artifact {name}, but {', '.join(sorted(self._paths))}; "
                "name it in the signature of its component"
            ) from None
