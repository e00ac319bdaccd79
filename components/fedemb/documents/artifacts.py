"""Artifacts that steps exchange: their names, and whether they are raw, noised or public."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedemb.errors import ArtifactError, Refused


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


DESCRIPTIONS = {
    "audit_page": "The audit as a page.",
    "audit_report": "Result of an attack on the model; signed.",
    "lineage": "Inputs and outputs of every step, as OpenLineage events.",
    "metrics": "Figures for the comparison of runs.",
    "model": "The noised model, its card and its public round log; signed.",
    "outcome": "Outcome of the run: verdict, figures, reasons and reports.",
    "pretrained": "Public backbone; signed.",
    "privacy_page": "The privacy report as a page.",
    "privacy_plan": "Mechanism of the run and its price; signed before the first private step.",
    "privacy_report": "Mechanism that ran, its price, and the price of all runs; signed.",
    "release": "Signed marker of the bundle, if one was released.",
    "reservation": "Ledger record that charged this run.",
    "roc": "Verification on held-out users, as a curve.",
    "summary": "Short outcome of the run with links, in Markdown.",
    "users": "Manifest of the partition; the users themselves stay below the private root.",
    "utility_page": "The utility report as a page.",
    "utility_report": "Exact figures on held-out users, who are not covered by the guarantee.",
    "verdict": "Decision of the gate with the rules that deny; signed.",
    "verdict_page": "Every rule of the gate with value, threshold and outcome, in Markdown.",
}
"""Name -> description of each artifact."""


class RunArtifacts:
    """Paths of artifacts by the names that the steps use: `artifacts.privacy_plan`.

    A name is that of an input or output in the signature of a step's component. Documents and pages
    are files; `model` and `pretrained` are folders. Users and other Raw artifacts are not included:
    they are stored below the private root, see `StepContext.private`.

    Raises:
      ArtifactError: a requested name was not passed.
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
