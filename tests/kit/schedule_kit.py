"""The example schedule of `infra/schedules`, changed."""

from pathlib import Path

import yaml

from fedemb.foundation.canonical_json import file_digest

SCHEDULES = Path(__file__).parents[2] / "infra" / "schedules"
IMAGE = "registry.example/fedemb@sha256:" + "a" * 64


def change_schedule(folder: Path, name: str, **changes) -> Path:
    """Writes the example schedule under a name, with other fields."""
    tree = yaml.safe_load((SCHEDULES / "example" / "weekly.yaml").read_text())
    tree["name"] = name
    pinned = folder / "fedemb.yaml.package"
    tree["package"] = {"path": pinned.name, "sha256": file_digest(pinned)}
    for key, value in changes.items():
        tree[key] = {**tree[key], **value} if value and isinstance(value, dict) else value
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
