"""Pages and metadata of components and pipelines, in the form of kubeflow/pipelines-components.

Everything in them is in the declarations; see `fedemb.pipelines.steps`, which writes them. Text
below the marker `CUSTOM` of a page is written by hand and kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import yaml

from fedemb.config.parameters import PARAMETERS
from fedemb.pipelines.graph import Pipeline
from fedemb.runtime.step import Rights, Step

STABILITY = "alpha"
KUBEFLOW_VERSION = "2.17.0"
"""Oldest release of Kubeflow Pipelines that ran the compiled pipelines; the SDK may be newer."""
LAST_VERIFIED = "2026-11-22T00:00:00Z"
"""When all tests last ran on these components; with each release, at least once a year."""
CATEGORIES = {
    "partition": "data_processing",
    "pretrain": "training",
    "train": "training",
    "evaluate": "evaluation",
    "audit": "evaluation",
    "release": "deployment",
}
"""First word of a step's name -> its category; other steps plan, price and decide."""
CUSTOM = "<!-- custom-content -->\n"
TYPES = {"String": "str", "Integer": "int", "Float": "float", "Boolean": "bool", "List": "list"}
"""As kfp calls them -> as Python does."""


def metadata(name: str, group: str, description: str) -> str:
    """The text of `metadata.yaml`."""
    body = {
        "name": name,
        "description": description,
        "stability": STABILITY,
        "dependencies": {"kubeflow": [{"name": "Pipelines", "version": f">={KUBEFLOW_VERSION}"}]},
        "tags": _tags(group),
        "lastVerified": LAST_VERIFIED,
    }
    return "---\n" + yaml.safe_dump(body, sort_keys=False, width=999)


def _tags(group: str) -> list[str]:
    return ["differential-privacy", CATEGORIES.get(group, "governance")]


def component_page(step: Step, by_hand: str) -> str:
    """The text of a component's README.md; `by_hand` follows the marker."""
    assert step.component is not None  # kfp is whole here
    spec = step.component.component_spec
    taken = [
        (name, _type(str(item.type), "Input"), None, item.description or "")
        for name, item in (spec.inputs or {}).items()
    ]
    given = [
        (name, _type(str(item.type), "Output"), item.description or "")
        for name, item in (spec.outputs or {}).items()
    ]
    kinds = ", ".join(f"`{name}` is {kind.__name__}" for name, kind in step.outputs.items())
    lines = [
        f"# {step.title}",
        "",
        *_stability(),
        "## Overview",
        "",
        step.summary,
        "",
        f"Image `{step.image}`; resources `{step.resources}` of the profile. {_care(step)}",
        "",
        *_table("Inputs", ("Parameter", "Type", "Default", "Description"), taken),
        *_table("Outputs", ("Name", "Type", "Description"), given),
        f"Kinds of artifacts: {kinds}.",
        "",
        "## Rights",
        "",
        *_rights(step.rights),
        "## Metadata",
        "",
        f"- **Name**: {step.name}",
        f"- **Stability**: {STABILITY}",
        f"- **Dependencies**: Kubeflow Pipelines >={KUBEFLOW_VERSION}",
        f"- **Tags**: {', '.join(_tags(step.group))}",
        f"- **Last Verified**: {LAST_VERIFIED}",
        "",
        CUSTOM,
    ]
    return "\n".join(lines) + by_hand


def pipeline_page(pipelines: Sequence[Pipeline], by_hand: str) -> str:
    """The text of the pipelines' README.md: the parameters they share, and the steps of each."""
    rows = [
        (name, item.type.__name__, _default(item.default), item.description)
        for name, item in PARAMETERS.items()
    ]
    lines = ["The pipelines take the same parameters: a configuration in pieces, each once.", ""]
    lines += _table("Inputs", ("Parameter", "Type", "Default", "Description"), rows)
    for pipeline in pipelines:
        lines += [f"## {pipeline.name}", "", f"{pipeline.description}.", ""]
        for step in pipeline.declared():
            lines.append(f"- [{step.title}](../components/{step.name}): {step.summary}")
        lines.append("")
    return "\n".join(["# Pipelines", "", *_stability(), *lines, CUSTOM]) + by_hand


def _stability() -> list[str]:
    return [f"> **Stability: {STABILITY}** - it may still change.", ""]


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    if not rows:
        return [f"## {title}", "", "None.", ""]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, *cells in rows:
        shown = ["" if cell is None else str(cell).replace("|", "\\|") for cell in cells]
        lines.append(f"| `{name}` | {' | '.join(shown)} |")
    return [f"## {title}", "", *lines, ""]


def _type(kind: str, way: str) -> str:
    if "@" in kind:
        return f"`dsl.{way}[dsl.{kind.partition('@')[0].removeprefix('system.')}]`"
    return f"`{TYPES.get(kind, kind)}`"


def _default(value: object) -> str | None:
    if value is None:
        return None
    return f"`{value}`" if value != "" else "empty"


def _care(step: Step) -> str:
    if step.cached:
        return "It sees nothing private, so its result may be taken from a cache."
    once = " A resumed run takes its finished result over." if step.once else ""
    private = " Private data is in its process, so its log is a closed set of lines."
    return f"Never cached, never retried.{once}{private if step.private else ''}"


def _rights(rights: Rights) -> list[str]:
    found: list[str] = []
    for item in fields(rights):
        value = getattr(rights, item.name)
        if isinstance(value, Mapping):
            value = ", ".join(f"{right} `{folder}`" for folder, right in value.items())
        elif isinstance(value, tuple):
            value = ", ".join(value)
        if value and value != "none":
            found.append(f"- {item.name}: {value}")
    return [*(found or ["None."]), ""]


def generated_pages(
    repository: Path, steps: Mapping[str, Step], pipelines: Sequence[Pipeline]
) -> dict[Path, str]:
    """File -> text of all pages and metadata."""
    found: dict[Path, str] = {}
    for step in steps.values():
        folder = repository / "components" / step.name
        found[folder / "README.md"] = component_page(step, _by_hand(folder / "README.md"))
        found[folder / "metadata.yaml"] = metadata(step.name, step.group, step.summary)
    page = repository / "pipelines" / "README.md"
    found[page] = pipeline_page(pipelines, _by_hand(page))
    return found


def _by_hand(page: Path) -> str:
    return page.read_text().partition(CUSTOM)[2] if page.is_file() else ""
