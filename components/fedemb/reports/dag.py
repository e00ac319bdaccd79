"""Layout of boxes and arrows of a step graph; `ui.dag` draws them as inline SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from fedemb.errors import ArtifactError

if TYPE_CHECKING:
    from fedemb.reports.lineage import StepLineage

_GAP, _BETWEEN, _LINE, _HEAD = 16, 24, 16, 28
"""Pixels between columns, between rows, per extra line, and of a box with only its name."""


class DagStep(TypedDict):
    """A step, or another source of artifacts."""

    name: str
    after: Sequence[str]
    """Names of the preceding steps."""
    status: str
    lines: Sequence[str]
    """Texts below the name."""
    href: str | None


class Box(DagStep):
    """A step and its place, in pixels."""

    x: float
    y: int
    width: int
    height: int


class Layout(TypedDict):
    """A step graph, in pixels."""

    width: int
    height: int
    boxes: Sequence[Box]
    edges: Sequence[str]
    """SVG path data."""


def layout_dag(steps: Sequence[DagStep], box_width: int = 172) -> Layout:
    """Places steps, in execution order, on a grid, top to bottom.

    An edge that another path already implies is left out.

    Raises:
      ArtifactError: `after` names a step that is not listed earlier.
    """
    layer = _layers(steps)
    rows: dict[int, list[DagStep]] = {}
    for step in steps:
        rows.setdefault(layer[step["name"]], []).append(step)
    column = box_width + _GAP
    width = max(len(row) for row in rows.values()) * column
    boxes: list[Box] = []
    top = 4
    for _, row in sorted(rows.items()):
        left = (width - len(row) * column + _GAP) / 2
        for position, step in enumerate(row):
            height = _HEAD + _LINE * len(step["lines"])
            x = left + position * column
            boxes.append({**step, "x": x, "y": top, "width": box_width, "height": height})
        top += _HEAD + _LINE * max(len(step["lines"]) for step in row) + _BETWEEN
    edges = _edges(steps, {box["name"]: box for box in boxes}, layer)
    return {"width": width, "height": top - _BETWEEN + 4, "boxes": boxes, "edges": edges}


def lineage_dag(steps: Sequence[StepLineage]) -> Layout:
    """Lays out the steps of a lineage, each with its outputs and the start of their digests.

    An input that no step produced (images) is a separate box, without digest.
    """
    maker = {name: step.step for step in steps for name in step.outputs}
    sources = list(dict.fromkeys(name for step in steps for name in step.inputs))
    boxes: list[DagStep] = [
        {"name": name, "after": [], "status": "source", "lines": [], "href": None}
        for name in sources
        if name not in maker
    ]
    for step in steps:
        after = list(dict.fromkeys(maker.get(name, name) for name in step.inputs))
        lines = [f"{name} {sha[:8] if sha else ''}".strip() for name, sha in step.outputs.items()]
        status = "failed" if step.failed else "done"
        box: DagStep = {
            "name": step.step,
            "after": after,
            "status": status,
            "lines": lines,
            "href": None,
        }
        boxes.append(box)
    return layout_dag(boxes, box_width=208)


def _layers(steps: Sequence[DagStep]) -> dict[str, int]:
    """Returns the row of each step: as low as its successors allow."""
    layer: dict[str, int] = {}
    for step in steps:
        missing = [name for name in step["after"] if name not in layer]
        if missing:
            raise ArtifactError(
                f"step {step['name']} comes after {missing[0]}, which is not listed before it; "
                "list the steps in the order they run"
            )
        layer[step["name"]] = 1 + max((layer[name] for name in step["after"]), default=-1)
    for step in reversed(steps):
        later = [layer[other["name"]] for other in steps if step["name"] in other["after"]]
        layer[step["name"]] = min(later, default=layer[step["name"]] + 1) - 1
    return layer


def _edges(
    steps: Sequence[DagStep], place: Mapping[str, Box], layer: Mapping[str, int]
) -> list[str]:
    above: dict[str, set[str]] = {}
    for step in steps:
        above[step["name"]] = set(step["after"]).union(*(above[name] for name in step["after"]))
    edges: list[str] = []
    for step in steps:
        for name in step["after"]:
            if any(name in above[other] for other in step["after"] if other != name):
                continue
            start, end = place[name], place[step["name"]]
            x1, y1 = start["x"] + start["width"] / 2, start["y"] + start["height"]
            x2, y2 = end["x"] + end["width"] / 2, end["y"]
            near = layer[step["name"]] - layer[name] == 1
            bend = (y2 - y1) / 2 if near else _BETWEEN
            edges.append(f"M{x1:g} {y1:g}C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2:g}")
    return edges
