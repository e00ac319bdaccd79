"""All steps of all pipelines, collected from where they are declared, and what follows from them.

    python -m fedemb.pipelines.steps

rewrites the files that are made of the declarations: `infra/rights.yaml`, the volumes of keys in
the overlay s3, and the table in `components/README.md`. A test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path

import yaml

from fedemb.config import RunConfig
from fedemb.errors import InputError
from fedemb.foundation.files import write_bytes
from fedemb.pipelines.dp_fedemb import DP_FEDEMB
from fedemb.pipelines.dp_sgd import DP_SGD
from fedemb.pipelines.graph import Pipeline
from fedemb.runtime.step import Rights, Step, declared

PIPELINES = (DP_FEDEMB, DP_SGD)


def pipeline_of(config: RunConfig) -> Pipeline:
    """The pipeline that runs a configuration."""
    return DP_SGD if config.task == "classification" else DP_FEDEMB


def pipeline_named(name: str) -> Pipeline:
    """The pipeline of a name.

    Raises:
      InputError: no such pipeline exists.
    """
    found = {pipeline.name: pipeline for pipeline in PIPELINES}
    if name not in found:
        raise InputError(f"Unknown pipeline {name}. Use one of {', '.join(found)}.")
    return found[name]


@cache
def all_steps() -> Mapping[str, Step]:
    """Name -> declaration of every step, in the order of the pipelines."""
    steps = [step for pipeline in PIPELINES for step in pipeline.declared()]
    steps += [declared(pipeline.at_exit) for pipeline in PIPELINES if pipeline.at_exit]
    return {step.name: step for step in steps}


def rights_of_groups() -> dict[str, Rights]:
    """Group -> the rights of its steps, which are one service account's.

    Raises:
      ValueError: two steps of one group declare different rights.
    """
    groups: dict[str, Rights] = {}
    for step in all_steps().values():
        if groups.setdefault(step.group, step.rights) != step.rights:
            raise ValueError(
                f"{step.name} shares a service account with {', '.join(_steps_of(step.group))} and "
                "must declare the same rights. Declare the same rights, or rename the step "
                "with another verb."
            )
    return groups


def _steps_of(group: str) -> list[str]:
    return [step.name for step in all_steps().values() if step.group == group]


def key_claims(rights: Rights) -> dict[str, str]:
    """Claim -> folder of the key store: the volumes a step mounts where keys lie on volumes."""
    signing = {f"{SIGNING_CLAIM}-{role}": f"signing/{role}" for role in rights.signing}
    return {KIND_CLAIMS[kind]: kind for kind in rights.keys} | signing


def keys_file() -> str:
    """The text of `infra/kustomize/overlays/s3/keys.yaml`: a claim for each role, and the owner."""
    held = [key_claims(step.rights) for step in all_steps().values()]
    names = sorted({*OWNER_CLAIMS, *(name for claims in held for name in claims)})
    claims = "".join(KEYS_VOLUME.format(name=name) for name in names)
    return f"{KEYS_HEAD}{claims}{KEYS_OWNER}"


KIND_CLAIMS = {
    "policy": "fedemb-policy-keys",
    "reservation": "fedemb-reservation-keys",
    "ledger": "fedemb-ledger-marks",
}
"""Kind of key -> its claim. A step that checks users against their commitment needs the key of the
policy, and cannot read the keys of reservations."""
SIGNING_CLAIM = "fedemb-keys"
OWNER_CLAIMS = (f"{SIGNING_CLAIM}-policy",)
"""The owner's own signing key, which no step holds."""
KEYS_HEAD = """\
# The key store on a cluster without Secret Manager: volumes apart from every bucket, of a class
# without snapshots and backups, so that a destroyed key is gone. Each kind of key has a volume, and
# each role a volume for its signing key (`fedemb-keys-ROLE`). A profile's `key_volumes` mounts to a
# step what its rights name, and ../../base/pods.yaml refuses it the others. Made of the steps'
# declarations by `python -m fedemb.pipelines.steps`; do not edit it here.
"""
KEYS_VOLUME = """\
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {name}
  namespace: fedemb
spec:
  accessModes: [ReadWriteMany]
  resources:
    requests: {{storage: 1Gi}}
---
"""
KEYS_OWNER = """\
# The data owner's: for pods that make or destroy keys (`fedemb ledger init`).
apiVersion: v1
kind: ServiceAccount
metadata:
  name: fedemb-owner
  namespace: fedemb
automountServiceAccountToken: false
"""
RIGHTS_HEAD = """\
# Rights of each group of steps: the source of service accounts, Terraform and the S3 policies.
# Generated from the declarations of the steps by `python -m fedemb.pipelines.steps`; do not edit.
# `Rights` in components/fedemb/runtime/step.py explains the terms. Tests compare everything else
# with this file and run the real steps (tests/integration/test_infra_rights.py): a missing right
# stops a step there, and so does an unused one.
"""


def rights_file() -> str:
    """Returns the text of `infra/rights.yaml`, one line per group."""
    lines = ""
    for group, rights in rights_of_groups().items():
        row = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(rights).items()
        }
        row = {"steps": _steps_of(group), **row}
        text = yaml.safe_dump(row, default_flow_style=True, sort_keys=False, width=999)
        lines += f"  {group}: {text}"
    return f"{RIGHTS_HEAD}groups:\n{lines}"


def steps_table() -> str:
    """Returns the table of all steps in Markdown."""
    rows = ["| step | purpose | image |", "|---|---|---|"]
    rows += [
        f"| [`{name}`](fedemb/steps/{name}.py) | {step.summary.rstrip('.')} | {step.image} |"
        for name, step in all_steps().items()
    ]
    return "\n".join(rows) + "\n"


START, END = "<!-- steps: made by `python -m fedemb.pipelines.steps` -->\n", "<!-- end -->\n"


def with_table(text: str) -> str:
    """Returns a page with a new table between its two markers."""
    head, _, rest = text.partition(START)
    return f"{head}{START}{steps_table()}{END}{rest.partition(END)[2]}"


def generated(repository: Path) -> dict[Path, str]:
    """The files of a checkout that are made of the declarations, and what they must hold."""
    page = repository / "components" / "README.md"
    return {
        repository / "infra" / "rights.yaml": rights_file(),
        repository / "infra/kustomize/overlays/s3/keys.yaml": keys_file(),
        page: with_table(page.read_text()),
    }


if __name__ == "__main__":
    for path, text in generated(Path.cwd()).items():
        write_bytes(path, text.encode())
