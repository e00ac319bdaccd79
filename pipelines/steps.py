"""All steps of all pipelines, collected from where they are declared, and what follows from them.

    python -m fedemb.pipelines.steps

rewrites the files that are made of the declarations: `infra/rights.yaml` and the table in
`components/README.md`. A test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fedemb.config import RunConfig
from fedemb.errors import InputError
from fedemb.pipelines.dp_fedemb import DP_FEDEMB
from fedemb.pipelines.dp_sgd import DP_SGD
from fedemb.pipelines.graph import Pipeline
from fedemb.step import Step

PIPELINES = (DP_FEDEMB, DP_SGD)


def pipeline_of(config: RunConfig) -> Pipeline:
    """The pipeline that runs a configuration."""
    return DP_SGD if config.task == "classification" else DP_FEDEMB


def pipeline_named(name: str) -> Pipeline:
    """The pipeline of a name.

    Raises:
      InputError: there is none.
    """
    found = {pipeline.name: pipeline for pipeline in PIPELINES}
    if name not in found:
        raise InputError(f"there is no pipeline {name}; there are {', '.join(found)}")
    return found[name]


@cache
def all_steps() -> Mapping[str, Step]:
    """Name -> declaration of every step, in the order of the pipelines."""
    return {step.name: step for pipeline in PIPELINES for step in pipeline.declared()}


def rights_of_groups() -> dict[str, dict[str, Any]]:
    """Group -> its steps and their rights, which are one service account's.

    Raises:
      ValueError: two steps of one group declare different rights.
    """
    groups: dict[str, dict[str, Any]] = {}
    for step in all_steps().values():
        rights = asdict(step.rights)
        rights = {k: list(v) if isinstance(v, tuple) else v for k, v in rights.items()}
        known = groups.setdefault(step.group, {"steps": [], **rights})
        if {**known, "steps": []} != {"steps": [], **rights}:
            raise ValueError(
                f"{step.name} shares a service account with {', '.join(known['steps'])} and must "
                "declare the same rights; or let its name begin with another verb"
            )
        known["steps"].append(step.name)
    return groups


RIGHTS_HEAD = """\
# Who may do what: the table behind the service accounts, Terraform and the S3 policies. Made of the
# declarations of the steps by `python -m fedemb.pipelines.steps`, where every word is explained
# (`Rights` in components/fedemb/step.py); do not edit it here.
# Tests hold everything else against it, and run the real steps behind it
# (tests/integration/test_infra_rights.py): a right too few stops a step there, and so does a right
# that no step uses.
"""


def rights_file() -> str:
    """The text of `infra/rights.yaml`: one line a group."""
    lines = [
        f"  {group}: {yaml.safe_dump(rights, default_flow_style=True, sort_keys=False, width=999)}"
        for group, rights in rights_of_groups().items()
    ]
    return f"{RIGHTS_HEAD}groups:\n{''.join(lines)}"


def steps_table() -> str:
    """The table of all steps in Markdown."""
    rows = ["| step | does | takes | gives | image |", "|---|---|---|---|---|"]
    for step in all_steps().values():
        raw = {"write": [], "read": []}
        for folder, right in step.rights.private.items():
            raw[right].append(folder)
        takes = [*(f"`{name}`" for name in step.inputs), *(f"{name} (Raw)" for name in raw["read"])]
        gives = [
            *(f"`{name}` ({kind.__name__})" for name, kind in step.outputs.items()),
            *(f"{name} (Raw)" for name in raw["write"]),
        ]
        rows.append(
            f"| [`{step.name}`]({step.name}) | {step.summary.rstrip('.')} | {', '.join(takes)} | "
            f"{', '.join(gives)} | {step.image} |"
        )
    return "\n".join(rows) + "\n"


BEGIN, END = "<!-- steps: made by `python -m fedemb.pipelines.steps` -->\n", "<!-- end -->\n"


def with_table(text: str) -> str:
    """A page with the table between its two marks made again."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}{steps_table()}{END}{rest.partition(END)[2]}"


def generated(repository: Path) -> dict[Path, str]:
    """The files of a checkout that are made of the declarations, and what they must hold."""
    page = repository / "components" / "README.md"
    return {
        repository / "infra" / "rights.yaml": rights_file(),
        page: with_table(page.read_text()),
    }


if __name__ == "__main__":
    for path, text in generated(Path.cwd()).items():
        path.write_text(text)
