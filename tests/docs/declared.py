"""Files of the checkout that are made of the declarations of the steps, see `generate`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import yaml
from jinja2 import Template

from fedemb.pipelines.steps import PIPELINE, SIGNING_CLAIM, all_steps, key_claims
from fedemb.runtime.step import Step

OWNER_CLAIMS = (f"{SIGNING_CLAIM}-policy",)
"""The owner's own signing key, which no step holds."""
KEYS_HEAD = """\
# The key store on a cluster without Secret Manager: volumes apart from every bucket, of a class
# without snapshots and backups, so that a destroyed key is gone. Each kind of key has a volume, and
# each role a volume for its signing key (`fedemb-keys-ROLE`). A profile's `key_volumes` mounts to a
# step what its rights name, and ../../base/pods.yaml refuses it the others. Made of the steps'
# declarations by `make docs-reference`; do not edit it here.
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
# Rights of each step: the source of service accounts, Terraform and the S3 policies.
# Generated from the declarations of the steps by `make docs-reference`; do not edit.
# `Rights` in components/fedemb/runtime/step.py explains the terms. Tests compare everything else
# with this file and run the real steps (tests/integration/test_infra_manifests.py): a missing right
# stops a step there, and so does an unused one.
"""


def keys_file() -> str:
    """The text of `infra/kustomize/overlays/s3/keys.yaml`: a claim for each role, and the owner."""
    held = [key_claims(step.rights) for step in all_steps().values()]
    names = sorted({*OWNER_CLAIMS, *(name for claims in held for name in claims)})
    claims = "".join(KEYS_VOLUME.format(name=name) for name in names)
    return f"{KEYS_HEAD}{claims}{KEYS_OWNER}"


def rights_file() -> str:
    """Returns the text of `infra/rights.yaml`, one line per step."""
    lines = ""
    for step in all_steps().values():
        row = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(step.rights).items()
        }
        row = {"step": step.name, **row}
        text = yaml.safe_dump(row, default_flow_style=True, sort_keys=False, width=999)
        lines += f"  {step.group}: {text}"
    return f"{RIGHTS_HEAD}groups:\n{lines}"


def rights_of(step: Step) -> str:
    """Returns what a step may do with private data, the ledger and releases."""
    private = step.rights.private.values()
    rights = {
        "private": "write" if "write" in private else "read" if step.private else "none",
        "ledger": step.rights.ledger,
        "releases": step.rights.releases if step.rights.releases == "create" else "none",
    }
    named = ", ".join(f"{name}: {right}" for name, right in rights.items() if right != "none")
    return named or ("always last" if step.at_exit else "public data only")


def pipeline_picture() -> str:
    """Returns the SVG of the steps: a row for each level, an arrow for each direct dependency."""
    after = {**PIPELINE.after(), PIPELINE.at_exit: ()}
    row: dict[str, int] = {}
    for name, before in after.items():
        row[name] = max((row[other] + 1 for other in before), default=0)
    row[PIPELINE.at_exit] = max(row.values()) + 1
    boxes = []
    for name, step in all_steps().items():
        beside = [other for other in after if row[other] == row[name]]
        x = 240 * (2 * beside.index(name) + 1) // len(beside)
        box = {"step": step, "after": after[name], "rights": rights_of(step), "x": x}
        boxes.append(box | {"y": 10 + 68 * row[name]})
    template = Template((Path(__file__).parent / "pipeline.svg.jinja").read_text(), autoescape=True)
    return template.render(boxes=boxes, height=68 * (row[PIPELINE.at_exit] + 1)) + "\n"


def generated(repository: Path) -> dict[Path, str]:
    """The files of a checkout that are made of the declarations, and what they must hold."""
    return {
        repository / "infra" / "rights.yaml": rights_file(),
        repository / "infra/kustomize/overlays/s3/keys.yaml": keys_file(),
        repository / "docs/images/pipeline.svg": pipeline_picture(),
    }
