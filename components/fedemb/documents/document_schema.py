"""Words to write JSON schemas with: closed objects, bounded texts, integers that are none else."""

from __future__ import annotations

from typing import Any

_LONGEST = 8192
"""Characters of a text: sentences and addresses fit, tables of numbers do not."""
TEXT: dict[str, Any] = {"type": "string", "maxLength": _LONGEST}
NAME: dict[str, Any] = {"type": "string", "maxLength": 256}
SHA: dict[str, Any] = {"type": "string", "pattern": "^[0-9a-f]{64}$", "maxLength": 64}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
NUMBER: dict[str, Any] = {"type": "number"}
FLAG: dict[str, Any] = {"type": "boolean"}
DELTA: dict[str, Any] = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""For what is compared as a whole with something recomputed."""
SHAS: dict[str, Any] = {"type": "object", "additionalProperties": SHA}


def closed(**fields: dict[str, Any]) -> dict[str, Any]:
    """An object with exactly these fields."""
    return {
        "type": "object",
        "properties": fields,
        "required": sorted(fields),
        "additionalProperties": False,
    }


def by_name(names: str, schema: dict[str, Any]) -> dict[str, Any]:
    """An object whose field names match a pattern as a whole."""
    return {
        "type": "object",
        "patternProperties": {f"^({names})$": schema},
        "additionalProperties": False,
    }


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A value, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def list_of(schema: dict[str, Any]) -> dict[str, Any]:
    """A list of values of one kind."""
    return {"type": "array", "items": schema}


SIGNATURE = closed(key_id=NAME, algorithm={"const": "ed25519"}, value=NAME)
EPSILON = or_null({"type": "number", "minimum": 0})
GUARANTEE = closed(
    epsilon=EPSILON,
    delta=DELTA,
    relation=TEXT,
    accountant=TEXT,
    rounds=or_null(COUNT),
    sampler_delta=NUMBER,
    unit={"const": "user"},
    sentence=TEXT,
)
"""`PrivacyGuarantee.to_json()`."""
PLANTED_BUG_SUITE = closed(passed=COUNT, total=COUNT, code_sha=SHA)
"""`planted_bug_suite.read_record()`."""


def checker(schema: dict[str, Any]) -> Any:
    """A `jsonschema` validator to whom 6.0 is no integer; see `first_problem`."""
    from jsonschema import Draft202012Validator, validators

    types = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, v: type(v) is int)
    return validators.extend(Draft202012Validator, type_checker=types)(schema)


def first_problem(validator: Any, document: Any) -> str | None:
    """Where a document is not of a schema, by names the schema knows; None if it is.

    What is there and should not be is never named: it may be anything.
    """
    for error in validator.iter_errors(document):
        place = ".".join(str(part) for part in error.absolute_path)
        if error.validator == "required":
            missing = sorted(set(error.validator_value) - set(error.instance))
            return ", ".join(f"{place}.{name}".lstrip(".") for name in missing)
        return place or "a field of its own"
    return None
