"""The JSON schemas of the evidence: every field named, nothing else allowed.

What the gate reads is published word for word, so a field that nobody knows must not pass: it could
hold a figure without noise. Only dictionaries that are open by nature, keyed by a false accept rate
or a depth, take other names, and then of one form. What the fields say is judged by the gate.
"""

from __future__ import annotations

import functools
from typing import Any

from fedemb.documents.document_schema import (
    ANY_OBJECT,
    COUNT,
    DELTA,
    EPSILON,
    FLAG,
    GUARANTEE,
    NAME,
    NUMBER,
    PLANTED_BUG_SUITE,
    SHA,
    SIGNATURE,
    TEXT,
    by_name,
    checker,
    closed,
    first_problem,
    list_of,
    or_null,
)

SCHEMAS = {
    "plan": "fedemb/privacy_plan/1",
    "reservation": "fedemb/reservation/1",
    "users": "fedemb/users/1",
    "model": "fedemb/model/1",
    "audit": "fedemb/audit_report/1",
    "utility": "fedemb/utility_report/1",
    "report": "fedemb/privacy_report/1",
    "verdict": "fedemb/verdict/1",
}
_PAIR = {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}
_INTERVAL = {"value": NUMBER, "low": NUMBER, "high": NUMBER}
_ESTIMATE = closed(**_INTERVAL)
_RATE = r"[0-9.e-]{1,12}"
_DEPTH = "[0-9]{1,6}"
_RECALL = by_name(_RATE, closed(**_INTERVAL, threshold=NUMBER))
_DIFFERENCE = by_name(_RATE, _ESTIMATE)
_RETRIEVAL = closed(
    recall_at=by_name(_DEPTH, _ESTIMATE),
    mean_average_precision=_ESTIMATE,
    nearest_neighbour=_ESTIMATE,
    queries=COUNT,
)
_MEASURED = closed(recall_at_far=_RECALL, retrieval=_RETRIEVAL)
_ROC = closed(far=list_of(NUMBER), recall=list_of(NUMBER), threshold=list_of(NUMBER))
_OTHER = or_null(
    closed(recall_at_far=_RECALL, retrieval=_RETRIEVAL, roc=_ROC, difference=_DIFFERENCE)
)
_FINDING = {"enum": ["leak", "reversed", "nothing", None]}
_CASE = closed(passed=FLAG)
_CASE_WITH_FIGURE = closed(passed=FLAG, auroc=NUMBER)

_FIELDS: dict[str, dict[str, Any]] = {
    "plan": {
        "config_sha": SHA,
        "purpose": {"enum": ["release", "simulation"]},
        "plan": ANY_OBJECT,  # `MechanismPlan.from_json` is closed, and compared
        "event": ANY_OBJECT,  # compared with the event of the plan
        "relation": NAME,
        "guarantee": GUARANTEE,
        "epsilon_conservative_2c": EPSILON,
        "epsilon_rdp": EPSILON,
        "zcdp_rho": EPSILON,
        "users_lower_bound": COUNT,
        "curve": list_of(_PAIR),
        "projections": list_of(
            closed(
                simulated_at=COUNT,
                population=COUNT,
                virtual_clients=COUNT,
                clients_per_round=NUMBER,
                noise_multiplier=NUMBER,
                delta=DELTA,
                epsilon=EPSILON,
                compute_factor=NUMBER,
                label=NAME,
            )
        ),
        "warnings": list_of(TEXT),
        "accounting_library": NAME,
        "plan_sha": SHA,
    },
    "reservation": {
        "policy_id": NAME,
        "run_id": NAME,
        "attempt": COUNT,
        "sequence": COUNT,
        "record_sha": SHA,
        "purpose": {"enum": ["release", "simulation"]},
        "blocks": list_of(NAME),
        "blocks_requested": list_of(NAME),
        "event": ANY_OBJECT,  # compared with the event of the plan
        "relation": NAME,
        "delta": DELTA,
        "rounds": COUNT,
        "plan_sha": SHA,
        "config_sha": SHA,
        "code_sha": SHA,
        "input": TEXT,
        "signature": SIGNATURE,
    },
    "users": {
        "run_id": NAME,
        "config_sha": SHA,
        "reservation_sha": SHA,
        "virtual_clients": COUNT,
        "groupings": COUNT,
        "blocks": list_of(NAME),
        "image_size": COUNT,
        "channels": COUNT,
        "commitments": closed(users=SHA, evaluation=SHA),
    },
    "model": {
        "run_id": NAME,
        "attempt": COUNT,
        "config_sha": SHA,
        "plan_sha": SHA,
        "code_sha": SHA,
        "inputs_sha": SHA,
        "initial_weights_sha": SHA,
        "weights_sha": SHA,
        "key_injected": FLAG,
        "rounds_run": COUNT,
        "backbone": NAME,
        "embedding_dim": COUNT,
        "tensors": list_of(closed(name=NAME, shape=list_of(COUNT))),
    },
    "audit": {
        "run_id": NAME,
        "config_sha": SHA,
        "model_sha": SHA,
        "code_sha": SHA,
        "level": NAME,
        "attack": NAME,
        "self_test": closed(
            passed=FLAG,
            cases=closed(
                no_leak=closed(passed=FLAG, auroc=NUMBER, alarms=COUNT, trials=COUNT),
                planted_leak=_CASE_WITH_FIGURE,
                reversed_sign=_CASE_WITH_FIGURE,
                missing_score=_CASE,
                missing_side=_CASE,
            ),
        ),
        "planted_bug_suite": PLANTED_BUG_SUITE,
        "figures": {"enum": ["open", "private"]},
        "lower_bound": or_null(NUMBER),
        "split_by_value": FLAG,
        "users_at_most": COUNT,
        "bootstrap_samples": COUNT,
        "limitations": list_of(TEXT),
        "auroc": or_null(_ESTIMATE),
        "tpr_at_fpr": or_null(_DIFFERENCE),
        "finding": _FINDING,
        "calibrated": or_null(
            closed(auroc=_ESTIMATE, tpr_at_fpr=_DIFFERENCE, finding=_FINDING),
        ),
        "measured": or_null(FLAG),
        "sentence": TEXT,
    },
    "utility": {
        "run_id": NAME,
        "config_sha": SHA,
        "model_sha": SHA,
        "embedding_space_id": NAME,
        "covers": TEXT,
        "simulation": FLAG,
        "public_kind": NAME,
        "bootstrap": closed(samples=COUNT, unit={"enum": ["user", "class"]}),
        "measured": FLAG,
        "evaluated": or_null(
            closed(images=COUNT, identities=COUNT, positive_pairs=COUNT, negative_pairs=COUNT)
        ),
        "recall_at_far": _RECALL,
        "retrieval": or_null(_RETRIEVAL),
        "roc": _ROC,
        "public_backbone": _OTHER,
        "untrained": _OTHER,
        "centralized": _OTHER,
        "utility_drop": or_null(_DIFFERENCE),
        "subgroups": or_null(
            closed(
                measured=list_of(
                    closed(
                        name=NAME,
                        images=COUNT,
                        identities=COUNT,
                        recall_at_own_threshold=_ESTIMATE,
                        recall_at_common_threshold=or_null(_ESTIMATE),
                        false_accept_rate_at_common_threshold=or_null(_ESTIMATE),
                    )
                ),
                too_small=COUNT,
            )
        ),
        "previous_release": {
            "anyOf": [
                {"type": "null"},
                closed(comparable={"const": False}, old_model_sha=SHA, reason=TEXT),
                closed(
                    comparable={"const": True},
                    old_model_sha=SHA,
                    old_embedding_space_id=NAME,
                    old=_MEASURED,
                    new_against_old=_MEASURED,
                    change=_DIFFERENCE,
                ),
            ]
        },
        "sentence": TEXT,
    },
    "verdict": {
        "allow": FLAG,
        "simulation": FLAG,
        "reasons": list_of(closed(code=NAME, sentence=TEXT, remedy=TEXT)),
        "waived": list_of(NAME),
        "audit_level": NAME,
        "config_sha": SHA,
        "model_sha": NAME,  # empty in a denial of what could not be read
        "report_sha": NAME,
        "signature": SIGNATURE,
    },
}


@functools.cache
def _checker(kind: str) -> Any:
    return checker(closed(schema={"const": SCHEMAS[kind]}, **_FIELDS[kind]))


def document_problem(kind: str, body: Any) -> str | None:
    """Where a document says more, less or other than its schema has words for; None if nowhere.

    Args:
      kind: a key of `SCHEMAS`. The report is left to the gate, which builds it again as a whole.
      body: the document.
    """
    return first_problem(_checker(kind), body) if kind in _FIELDS else None
