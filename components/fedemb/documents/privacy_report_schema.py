"""The JSON schema of the privacy report, version 1: every field named, nothing else allowed.

`tests/golden/privacy_report.schema.json` pins it. The gate does not rely on it, as it rebuilds the
whole report; it is for those who read reports elsewhere.
"""

from __future__ import annotations

from typing import Any

from fedemb.documents.document_schema import (
    ANY_OBJECT,
    COUNT,
    DELTA,
    EPSILON,
    FLAG,
    GUARANTEE,
    NUMBER,
    PLANTED_BUG_SUITE,
    SHA,
    SHAS,
    SIGNATURE,
    TEXT,
    checker,
    closed,
    first_problem,
    list_of,
    or_null,
)
from fedemb.errors import ArtifactError

_TEXTS = list_of(TEXT)

_FIELDS: dict[str, dict[str, Any]] = {
    "schema": {"const": "fedemb/privacy_report/1"},
    "purpose": {"enum": ["release", "simulation"]},
    "run_id": TEXT,
    "attempt": COUNT,
    "time": {"type": "string", "format": "date-time"},
    "model_sha": SHA,
    "guarantee": GUARANTEE,
    "setting": closed(
        model={"const": "central"},
        trust=_TEXTS,
        releases=TEXT,
        recurring=closed(
            policy_id=TEXT, run_index=COUNT, runs_planned=or_null(COUNT), audit_level=TEXT
        ),
    ),
    "unit": closed(
        unit={"const": "user"},
        identifiers=TEXT,
        multi_owner=TEXT,
        population_lower_bound=COUNT,
        exclusions=_TEXTS,
    ),
    "adjacency": closed(relation=TEXT, accounting_relation=TEXT, covers_change_own_data=FLAG),
    "mechanism": closed(
        name=TEXT,
        plan_sha=SHA,
        sampler=TEXT,
        sampling_probability=or_null(NUMBER),
        virtual_clients=COUNT,
        groupings=COUNT,
        grouping_rule=TEXT,
        rounds_planned=COUNT,
        rounds_run=COUNT,
        clip=closed(kind=TEXT, l2_norm_clip=NUMBER, adaptive=or_null(ANY_OBJECT)),
        noise_multiplier=NUMBER,
        noise=closed(family=TEXT, generator=TEXT, key=TEXT, grid_bits=COUNT, secure=FLAG),
        normaliser=closed(rule=TEXT, value=NUMBER),
        matrix=or_null(
            closed(
                sensitivity=or_null(NUMBER),
                min_separation=or_null(COUNT),
                max_participations=or_null(COUNT),
                buffers=or_null(COUNT),
                restart_every=or_null(COUNT),
            )
        ),
    ),
    "accounting": closed(
        library=TEXT,
        version=TEXT,
        accountant=TEXT,
        discretisation=NUMBER,
        event=ANY_OBJECT,
        rounds_priced=COUNT,
        epsilon=EPSILON,
        delta=DELTA,
        epsilon_conservative_2c=EPSILON,
        epsilon_rdp=EPSILON,
        curve=list_of({"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}),
        not_claimed=TEXT,
    ),
    "cumulative": closed(
        policy_id=TEXT,
        blocks=list_of(closed(block=TEXT, epsilon=EPSILON, runs=COUNT)),
        block_table_sha=SHA,
        max_block_epsilon=EPSILON,
        delta=DELTA,
        cap=NUMBER,
        filter=closed(kind=TEXT, order=or_null(NUMBER), off_schedule=TEXT),
        ledger_sequence=COUNT,
        ledger_head=SHA,
    ),
    "tuning": closed(data=TEXT, trials=COUNT, method=TEXT, other_runs_before=COUNT),
    "evaluation": closed(data=TEXT, charged=FLAG),
    "pretraining": closed(
        kind=TEXT,
        licence=TEXT,
        provenance=TEXT,
        initial_weights_sha=SHA,
        overlaps_private=TEXT,
    ),
    "audit": closed(
        level=TEXT,
        attack=TEXT,
        model_sha=SHA,
        code_sha=SHA,
        figures=TEXT,
        auroc=or_null(ANY_OBJECT),
        sentence=TEXT,
        self_test_passed=FLAG,
        planted_bug_suite=PLANTED_BUG_SUITE,
        lower_bound=or_null(NUMBER),
    ),
    "utility": closed(
        model_sha=SHA, recall_at_far=ANY_OBJECT, embedding_space_id=TEXT, sentence=TEXT
    ),
    "assumptions": _TEXTS,
    "limitations": _TEXTS,
    "approvals": list_of(closed(code=TEXT, model_sha=SHA, reason=TEXT, sequence=COUNT, actor=TEXT)),
    "provenance": closed(
        config_sha=SHA,
        code_sha=SHA,
        plan_sha=SHA,
        inputs_sha=SHA,
        commitments=SHAS,
        input=TEXT,
        plan_document=SHA,
        reservation_document=SHA,
        users_document=SHA,
        model_files=SHAS,
        audit_document=SHA,
        utility_document=SHA,
    ),
}


def report_schema(*, signed: bool = True) -> dict[str, Any]:
    """The schema of a signed report, or of its body before it is signed."""
    fields = dict(_FIELDS)
    if signed:
        fields["signature"] = SIGNATURE
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, "title": "Privacy report", **closed(**fields)}


def check_schema(report: dict[str, Any]) -> None:
    """Refuses to sign a report that is not of the schema: another step left something out.

    Raises:
      ArtifactError: and which field.
    """
    where = first_problem(checker(report_schema(signed=False)), report)
    if where is not None:
        raise ArtifactError(
            f"{where} of the privacy report is missing or not as its schema says; run the steps "
            "before account_privacy again"
        )
