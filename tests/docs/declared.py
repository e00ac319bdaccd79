"""Files of the checkout that are made of the declarations of the steps, see `generate`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import yaml

from fedemb.pipelines.steps import SIGNING_CLAIM, all_steps, key_claims

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


def generated(repository: Path) -> dict[Path, str]:
    """The files of a checkout that are made of the declarations, and what they must hold."""
    return {
        repository / "infra" / "rights.yaml": rights_file(),
        repository / "infra/kustomize/overlays/s3/keys.yaml": keys_file(),
    }
