"""Puts planned numbers into a configuration file and leaves the rest of it, comments too, alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from fedemb.config import RunConfig
from fedemb.errors import ConfigError
from fedemb.foundation.files import write_bytes
from fedemb.pipelines.run.load_config import load_config


def write_mechanism(path: Path, config: RunConfig) -> None:
    """Writes the mechanism of a configuration into a YAML file; writes a new file whole.

    Raises:
      ConfigError: the file says something else beside its mechanism.
    """
    if not path.exists():
        tree = config.model_dump(mode="json", exclude_defaults=True)
        write_bytes(path, yaml.safe_dump(tree, sort_keys=False).encode())
        return
    text = path.read_text()
    changed = text
    for name, value in config.mechanism.model_dump(mode="json").items():
        if value != getattr(load_config(path).mechanism, name, None):
            changed = _replaced(changed, name, value)
    write_bytes(path, changed.encode())
    if load_config(path) != config:
        write_bytes(path, text.encode())
        raise ConfigError(
            f"{path} differs from what was planned beside its mechanism too; plan with "
            f"--config {path}, or write to a new file"
        )


def _replaced(text: str, name: str, value: Any) -> str:
    """The text with one line of its block `mechanism:` replaced, or added as its first."""
    head, block, rest = _block(text)
    line = f"  {name}: {yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}"
    known = re.compile(rf"^ +{name}:[^#\n]*?(?P<comment>\s+#.*)?$", re.MULTILINE)
    if known.search(block):
        block = known.sub(lambda found: line + (found["comment"] or ""), block, count=1)
    else:
        block = f"{line}\n{block}"
    return head + block + rest


def _block(text: str) -> tuple[str, str, str]:
    found = re.search(r"^mechanism:[^\n]*\n", text, re.MULTILINE)
    if found is None:
        return f"{text.rstrip()}\n\nmechanism:\n", "", ""
    end = re.search(r"^\S", text[found.end() :], re.MULTILINE)
    stop = found.end() + end.start() if end else len(text)
    return text[: found.end()], text[found.end() : stop], text[stop:]
