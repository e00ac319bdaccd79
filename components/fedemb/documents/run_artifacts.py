"""Paths of the artifacts of one run, by name."""

from __future__ import annotations

from pathlib import Path

from fedemb.errors import ArtifactError

DESCRIPTIONS = {
    "audit_page": "The audit as a page.",
    "audit_report": "What an attack on the model found; signed.",
    "averages": "Other averages of the noised weights, measured and never released; signed.",
    "deleted": "Expired data by run and folder, and whether it was deleted; JSON.",
    "lineage": "What was made of what, as OpenLineage events.",
    "metrics": "Figures that runs are compared by.",
    "model": "The noised model, its card and its public round log; signed.",
    "outcome": "How the run ended: verdict, figures, reasons, reports and lineage.",
    "pretrained": "Public backbone; signed.",
    "privacy_page": "The privacy report as a page.",
    "privacy_plan": "What the mechanism will do and cost; signed before anything runs.",
    "privacy_report": "What ran and what it cost, this run and all of its policy; signed.",
    "release": "Where the signed bundle lies, if there is one.",
    "reservation": "The record of the ledger that charged this run.",
    "roc": "Verification on people who never trained, as a curve.",
    "summary": "How the run ended in short, with links, in Markdown.",
    "users": "Manifest of the partition; the users themselves stay below the private root.",
    "utility_page": "The utility report as a page.",
    "utility_report": "Exact figures on held-out people, who are not covered by the guarantee.",
    "verdict": "Whether the release is allowed, and by which rules not; signed.",
    "verdict_page": "Every rule of the gate with value, threshold and outcome, in Markdown.",
}
"""Name -> description of each artifact."""


class RunArtifacts:
    """Paths of artifacts by the names that the steps give them: `artifacts.privacy_plan`.

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
