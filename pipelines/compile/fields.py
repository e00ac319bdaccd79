"""Reads parsed YAML and JSON of Kubernetes and Kubeflow by path; absent fields are empty.

A field of another type than expected raises a TypeError, so a malformed file is never taken for
one without the field.
"""

from __future__ import annotations

from typing import TypeVar

from fedemb.foundation.canonical_json import Json, JsonObject

T = TypeVar("T", JsonObject, list[Json], str)


def value_at(tree: Json, *path: str) -> Json:
    """Returns the value at a path of names; None if it is absent or null."""
    for name in path:
        if tree is None:
            return None
        tree = _checked(tree, dict[str, Json]()).get(name)
    return tree


def object_at(tree: Json, *path: str) -> JsonObject:
    """Returns the object at a path; changes to an existing one change the tree."""
    return _checked(value_at(tree, *path), {})


def list_at(tree: Json, *path: str) -> list[Json]:
    """Returns the list at a path."""
    return _checked(value_at(tree, *path), [])


def objects_at(tree: Json, *path: str) -> list[JsonObject]:
    """Returns the objects of the list at a path."""
    return [_checked(item, {}) for item in list_at(tree, *path)]


def objects_of(fields: JsonObject) -> list[tuple[str, JsonObject]]:
    """Returns name and object of each field."""
    return [(name, _checked(item, {})) for name, item in fields.items()]


def text_at(tree: Json, *path: str) -> str:
    """Returns the text at a path."""
    return _checked(value_at(tree, *path), "")


def _checked(value: Json, empty: T) -> T:
    if value is None:
        return empty
    if not isinstance(value, type(empty)):
        raise TypeError(f"{value!r:.80} is not a {type(empty).__name__}")
    return value
