"""The JSON schema of the privacy report, version 1: every field named, nothing else allowed.

`tests/golden/privacy_report.schema.json` pins it. The gate does not rely on it, as it rebuilds the
whole report; it is for those who read reports elsewhere.
"""

from __future__ import annotations

from typing import Any

from components.fedemb.errors import ArtifactError

_TEXT = {"type": "string"}
_SHA = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_COUNT = {"type": "integer", "minimum": 0}
_NUMBER = {"type": "number"}
_FLAG = {"type": "boolean"}
_DELTA = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
_TEXTS = {"type": "array", "items": _TEXT}
_ANY_OBJECT = {"type": "object"}
_SHAS = {"type": "object", "additionalProperties": _SHA}


def _object(**fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": sorted(fields),
        "additionalProperties": False,
    }


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


_EPSILON = _or_null({"type": "number", "minimum": 0})
_FIELDS: dict[str, dict[str, Any]] = {
    "schema": {"const": "fedemb/privacy_report/1"},
    "purpose": {"enum": ["release", "simulation"]},
    "run_id": _TEXT,
    "attempt": _COUNT,
    "time": {"type": "string", "format": "date-time"},
    "model_sha": _SHA,
    "guarantee": _object(
        epsilon=_EPSILON,
        delta=_DELTA,
        relation=_TEXT,
        accountant=_TEXT,
        rounds=_or_null(_COUNT),
        sampler_total_variation=_NUMBER,
        unit={"const": "user"},
        sentence=_TEXT,
    ),
    "setting": _object(
        model={"const": "central"},
        trust=_TEXTS,
        releases=_TEXT,
        recurring=_object(
            policy_id=_TEXT, run_index=_COUNT, runs_planned=_or_null(_COUNT), audit_level=_TEXT
        ),
    ),
    "unit": _object(
        unit={"const": "user"},
        identifiers=_TEXT,
        multi_owner=_TEXT,
        population_lower_bound=_COUNT,
        exclusions=_TEXTS,
    ),
    "adjacency": _object(relation=_TEXT, accounting_relation=_TEXT, covers_change_own_data=_FLAG),
    "mechanism": _object(
        name=_TEXT,
        plan_sha=_SHA,
        sampler=_TEXT,
        sampling_probability=_or_null(_NUMBER),
        virtual_clients=_COUNT,
        groupings=_COUNT,
        grouping_rule=_TEXT,
        rounds_planned=_COUNT,
        rounds_run=_COUNT,
        clip=_object(kind=_TEXT, l2_norm_clip=_NUMBER, adaptive=_or_null(_ANY_OBJECT)),
        noise_multiplier=_NUMBER,
        noise=_object(family=_TEXT, generator=_TEXT, key=_TEXT, grid_bits=_COUNT, secure=_FLAG),
        normaliser=_object(rule=_TEXT, value=_NUMBER),
        matrix=_or_null(
            _object(
                sensitivity=_or_null(_NUMBER),
                min_separation=_or_null(_COUNT),
                max_participations=_or_null(_COUNT),
                buffers=_or_null(_COUNT),
                restart_every=_or_null(_COUNT),
            )
        ),
    ),
    "accounting": _object(
        library=_TEXT,
        version=_TEXT,
        accountant=_TEXT,
        discretisation=_NUMBER,
        event=_ANY_OBJECT,
        rounds_priced=_COUNT,
        epsilon=_EPSILON,
        delta=_DELTA,
        epsilon_conservative_2c=_EPSILON,
        epsilon_rdp=_EPSILON,
        curve=_list({"type": "array", "items": _NUMBER, "minItems": 2, "maxItems": 2}),
        not_claimed=_TEXT,
    ),
    "cumulative": _object(
        policy_id=_TEXT,
        blocks=_list(_object(block=_TEXT, epsilon=_EPSILON, runs=_COUNT)),
        block_table_sha=_SHA,
        max_block_epsilon=_EPSILON,
        delta=_DELTA,
        cap=_NUMBER,
        filter=_object(kind=_TEXT, order=_or_null(_NUMBER), off_schedule=_TEXT),
        ledger_sequence=_COUNT,
        ledger_head=_SHA,
    ),
    "tuning": _object(data=_TEXT, trials_charged=_COUNT),
    "evaluation": _object(data=_TEXT, charged=_FLAG),
    "pretraining": _object(
        kind=_TEXT,
        licence=_TEXT,
        provenance=_TEXT,
        initial_weights_sha=_SHA,
        overlaps_private=_TEXT,
    ),
    "audit": _object(
        level=_TEXT,
        attack=_TEXT,
        model_sha=_SHA,
        code_sha=_SHA,
        figures=_TEXT,
        auroc=_or_null(_ANY_OBJECT),
        sentence=_TEXT,
        self_test_passed=_FLAG,
        lower_bound=_or_null(_NUMBER),
    ),
    "utility": _object(
        model_sha=_SHA, recall_at_far=_ANY_OBJECT, embedding_space_id=_TEXT, sentence=_TEXT
    ),
    "assumptions": _TEXTS,
    "limitations": _TEXTS,
    "approvals": _list(
        _object(code=_TEXT, model_sha=_SHA, reason=_TEXT, sequence=_COUNT, actor=_TEXT)
    ),
    "provenance": _object(
        config_sha=_SHA,
        code_sha=_SHA,
        plan_sha=_SHA,
        inputs_sha=_SHA,
        commitments=_SHAS,
        input=_TEXT,
        plan_document=_SHA,
        reservation_document=_SHA,
        users_document=_SHA,
        model_files=_SHAS,
        audit_document=_SHA,
        utility_document=_SHA,
    ),
}


def report_schema(*, signed: bool = True) -> dict[str, Any]:
    """The schema of a signed report, or of its body before it is signed."""
    fields = dict(_FIELDS)
    if signed:
        fields["signature"] = _object(key_id=_TEXT, algorithm={"const": "ed25519"}, value=_TEXT)
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, "title": "Privacy report", **_object(**fields)}


def check_schema(report: dict[str, Any]) -> None:
    """Refuses to sign a report that is not of the schema: another step left something out.

    Raises:
      ArtifactError: and which field.
    """
    from jsonschema import Draft202012Validator

    for error in Draft202012Validator(report_schema(signed=False)).iter_errors(report):
        where = ".".join(str(part) for part in error.absolute_path) or "the report"
        raise ArtifactError(
            f"{where} of the privacy report is missing or not as its schema says; run the steps "
            "before account_privacy again"
        )
