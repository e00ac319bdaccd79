"""Settings with their meanings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fedemb.config import RunConfig
from fedemb.errors import ConfigError


def describe(section: str | None = None) -> Iterator[str]:
    """Yields one line per setting of a section, or the one, as `path (type, default): meaning`.

    Raises:
      ConfigError: the section does not exist.
    """
    schema = RunConfig.model_json_schema()
    properties = schema["properties"]
    wanted = section or ""
    lines = [
        line for name in properties for line in _lines(name, properties[name], schema["$defs"])
    ]
    found = [line for line in lines if re.match(rf"{re.escape(wanted)}(\W|$)", line) or not wanted]
    if not found:
        raise ConfigError(f"Unknown section {section}. Pass one of {', '.join(properties)}.")
    yield from found


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
