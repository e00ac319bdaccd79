"""Text of configurations: settings with their meanings, and planned numbers put into a file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fedemb.config import RunConfig
from fedemb.errors import ConfigError
from fedemb.foundation.files import write_bytes
from fedemb.pipelines.run.load_config import load_config


def describe(section: str | None = None) -> Iterator[str]:
    """Yields one line per setting, as `path (type, default): meaning`.

    Raises:
      ConfigError: the section does not exist.
    """
    schema = RunConfig.model_json_schema()
    properties = schema["properties"]
    if section is not None and section not in properties:
        raise ConfigError(f"Unknown section {section}. Pass one of {', '.join(properties)}.")
    for name, field in properties.items():
        if section in (None, name):
            yield from _lines(name, field, schema["$defs"])


def _lines(path: str, field: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    variants = [_resolve(item, definitions) for item in field.get("oneOf", field.get("anyOf", []))]
    models = [item for item in (*variants, _resolve(field, definitions)) if "properties" in item]
    words = _words(field) or _words(_resolve(field, definitions))
    yield f"{path} ({_type(field, definitions)}{_default(field)}): {words}"
    for model in models:
        tag = f"[{_tag(model)}]" if len(models) > 1 else ""
        for name, inner in model["properties"].items():
            if "const" in inner:  # the tag, already shown in brackets
                continue
            yield from _lines(f"{path}{tag}.{name}", inner, definitions)


def _resolve(field: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    reference = field.get("$ref")
    return definitions[reference.rsplit("/", 1)[1]] if reference else field


def _tag(model: dict[str, Any]) -> str:
    constants = [inner["const"] for inner in model["properties"].values() if "const" in inner]
    return str(constants[0]) if constants else model.get("title", "")


def _type(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "const" in field:
        return repr(field["const"])
    if "enum" in field:
        return " | ".join(map(str, field["enum"]))
    if "anyOf" in field or "oneOf" in field:
        parts = field.get("anyOf", field.get("oneOf", []))
        return " | ".join(_type(_resolve(part, definitions), definitions) for part in parts)
    bounds = {
        "exclusiveMinimum": "> {}",
        "minimum": ">= {}",
        "exclusiveMaximum": "< {}",
        "maximum": "<= {}",
    }
    limits = [text.format(field[key]) for key, text in bounds.items() if key in field]
    resolved = _resolve(field, definitions)
    name = _tag(resolved) if "properties" in resolved else resolved.get("type", "any")
    return " ".join([str(name), ", ".join(limits)]).strip()


def _default(field: dict[str, Any]) -> str:
    if "default" not in field or isinstance(field["default"], dict):
        return ""
    return f", default {field['default']}"


def _words(field: dict[str, Any]) -> str:
    return " ".join(str(field.get("description", "")).split())


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
