"""The fixed terms of a policy: caps, composition method, and the definition of a user."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, TypedDict, cast

from fedemb.config import ONE_COHORT, PartitionConfig, RunConfig, SourceConfig
from fedemb.config.policy import Unit
from fedemb.data.identity import RULE
from fedemb.documents.fields import Purpose
from fedemb.errors import LedgerError
from fedemb.foundation.canonical_json import Json, JsonObject, json_digest
from fedemb.privacy.guarantee import event_to_json
from fedemb.privacy.mechanism import MechanismPlan

_SETTINGS = {
    "user_id_column": "data.source.columns.user_id",
    "cohort_column": "data.source.columns.cohort",
    "blocks_per_cohort": "partition.blocks_per_cohort",
    "shared_label_column": "the shared classes (data.source.label_scope with columns.label)",
    "evaluation": "partition.evaluation",
    "series": "policy.planned_runs and the plan they repeat",
    "rollback_anchor_sha": "the digest of storage.rollback_anchor",
    "identifiers": "the rule of ids (of images without a user column: data.source.format)",
}
"""Configuration field of a term; every other term is `policy.<name>`."""
_SHA = re.compile(r"([0-9a-f]{64})?")


@dataclass(frozen=True)
class PlannedSeries:
    """A series of runs with one exact event, committed in advance."""

    event_sha: str
    relation: str
    runs: int


@dataclass(frozen=True)
class UserTerms:
    """The definition of a user, the rule that assigns blocks, and the held-out users.

    Different terms would give the same people other ids, blocks or held-out status. Recorded
    privacy loss would no longer match, and users once held out for evaluation would train.
    """

    user_id_column: str | None
    """Column of the user id; None makes every image a unit."""
    cohort_column: str | None
    """Column of the cohort; None puts all users in one cohort."""
    blocks_per_cohort: int
    """Number of hash buckets per cohort."""
    shared_label_column: str | None
    """Column of classes shared by all users, some held out; None: classes belong to the user."""
    evaluation: Mapping[str, Json]
    """Rule that holds out users and shared classes, as in `partition.evaluation`."""

    def cut(self, blocks: Iterable[str]) -> bool:
        """Returns whether the blocks, `cohort/bucket`, match this partition of users."""
        buckets = {str(number) for number in range(self.blocks_per_cohort)}
        parts = [block.rpartition("/") for block in blocks]
        return all(
            cohort and bucket in buckets and (cohort == ONE_COHORT) == (self.cohort_column is None)
            for cohort, _, bucket in parts
        )


@dataclass(frozen=True)
class PolicyTerms:
    """The fixed terms of a policy."""

    epsilon_cap: float
    """Cap on the cumulative epsilon of every user block."""
    delta: float
    users_lower_bound: int
    composition: Literal["planned", "renyi"]
    renyi_order: float
    users: UserTerms
    unit: Unit = "user"
    """Privacy unit whose presence every guarantee of the policy hides."""
    covers_change_own_data: bool = False
    """Whether the guarantee also covers users who stay and change their own data."""
    approvals: int = 0
    """Number of people who must approve a release."""
    series: PlannedSeries | None = None
    identifiers: str = f"{RULE};hmac-sha256/1;cohort-bucket/1"
    """Versions of the id rule, the user hash and the block rule. A policy keeps its first id rule,
    see `fedemb.data.identity`; a change of the other two needs another policy. If images are units
    and identified by name, `identifiers_of` adds that."""
    rollback_anchor_sha: str = ""
    """Digest of the rollback anchor's address, see `rollback_anchor_sha`; empty if none is set."""
    trust_sha: str = ""
    """Digest of the trust file of the root, `TrustStore.digest`; empty in old policies."""

    def to_json(self) -> JsonObject:
        """Returns the terms as stored in the policy record."""
        body = {item.name: getattr(self, item.name) for item in fields(self)}
        users = {**vars(self.users), "evaluation": dict(self.users.evaluation)}
        return {**body, "users": users, "series": vars(self.series).copy() if self.series else {}}

    @classmethod
    def from_json(cls, body: JsonObject) -> PolicyTerms:
        """Reads the terms of a policy record; unknown fields are errors.

        Raises:
          LedgerError: a field is unknown, missing, of another type or out of bounds.
        """
        try:
            values = _typed(cls, body)
            plan = cast("JsonObject", values.pop("series"))
            users = UserTerms(**_typed(UserTerms, values.pop("users")))
            series = PlannedSeries(**_typed(PlannedSeries, plan)) if plan else None
            terms = cls(**values, users=users, series=series)
        except (TypeError, ValueError) as error:
            raise LedgerError(
                f"the policy record is broken: {error}; restore the ledger"
            ) from error
        holds = (
            0 < terms.epsilon_cap < math.inf
            and 0 < terms.delta < 1 / terms.users_lower_bound
            and 1 < terms.renyi_order <= 512
            and terms.composition in ("planned", "renyi")
            and terms.unit in ("user", "image")
            and terms.approvals >= 0
            and (terms.composition == "planned") == (terms.series is not None)
            and terms.users.blocks_per_cohort >= 1
            and all(_SHA.fullmatch(sha) for sha in (terms.rollback_anchor_sha, terms.trust_sha))
        )
        if not holds:
            raise LedgerError("the policy record has terms out of bounds; restore the ledger")
        return terms

    def differences(self, asked: Self) -> list[str]:
        """Returns the differences from the requested terms, by configuration field."""
        ours, theirs = _flat(self), _flat(asked)
        free = {"trust_sha"} if self.rollback_anchor_sha else {"trust_sha", "rollback_anchor_sha"}
        return [
            f"{_SETTINGS.get(name, f'policy.{name}')} is {theirs[name]!r} where the policy has "
            f"{ours[name]!r} for life"
            for name in ours
            if ours[name] != theirs[name] and name not in free
        ]


_KINDS: dict[str, tuple[type, ...]] = {
    "float": (float,),
    "int": (int,),
    "str": (str,),
    "bool": (bool,),
    "str | None": (str, type(None)),
    "Mapping[str, Json]": (dict,),
    "UserTerms": (dict,),
    "PlannedSeries | None": (dict,),
}
"""JSON types of the fields by annotation; a Literal is a string."""


def _typed(cls: type, body: object) -> dict[str, Any]:
    """Returns the fields of a dataclass, type-checked; missing and unknown fields are errors."""
    kinds = {item.name: _KINDS.get(str(item.type), (str,)) for item in fields(cls)}
    if not isinstance(body, dict) or set(cast("dict[str, object]", body)) != set(kinds):
        raise ValueError("unknown or missing fields")
    values = cast("dict[str, Any]", body)
    if any(type(values[name]) not in kind for name, kind in kinds.items()):
        raise ValueError("a field has the wrong type")
    return dict(values)


def _flat(terms: PolicyTerms) -> JsonObject:
    body = terms.to_json()
    users = body.pop("users")
    return {**cast("JsonObject", users), **body}


def series_of(config: RunConfig, plan: MechanismPlan) -> PlannedSeries | None:
    """Returns the series that a new policy of this configuration commits, or None."""
    if config.policy.composition != "planned":
        return None
    return PlannedSeries(
        event_sha=json_digest(event_to_json(plan.event())),
        relation=plan.relation.name,
        runs=config.policy.planned_runs,
    )


def identifiers_of(source: SourceConfig) -> str:
    """Returns the rule that identifies the units of a source.

    Images without users are identified by their bytes in Parquet and TFRecord, and by their names
    in CSV and folders. The same photographs in another format would be other units, and held-out
    images would train.
    """
    kind = "parquet" if source.uri == "builtin" else source.file_format
    if source.columns.user_id is not None or kind not in ("csv", "image_folder"):
        return PolicyTerms.identifiers
    column = f":{source.columns.image_id}" if kind == "csv" else ""
    return f"{PolicyTerms.identifiers};{kind}-name/1{column}"


def terms_of(config: RunConfig, series: PlannedSeries | None) -> PolicyTerms:
    """Returns the terms that a configuration requests.

    Args:
      config: configuration of a run.
      series: for a new policy, `series_of`; for a run, the policy's series, because membership is
          checked when the run reserves.
    """
    policy, source, partition = config.policy, config.data.source, config.partition
    return PolicyTerms(
        epsilon_cap=policy.epsilon_cap,
        delta=policy.delta,
        users_lower_bound=policy.users_lower_bound,
        composition=policy.composition,
        renyi_order=policy.renyi_order,
        users=UserTerms(
            user_id_column=source.columns.user_id,
            cohort_column=source.columns.cohort,
            blocks_per_cohort=partition.blocks_per_cohort,
            shared_label_column=source.columns.label if source.label_scope == "global" else None,
            evaluation=partition.evaluation.model_dump(mode="json"),
        ),
        unit=policy.unit,
        identifiers=identifiers_of(source),
        covers_change_own_data=policy.covers_change_own_data,
        approvals=policy.approvals,
        series=series,
        rollback_anchor_sha=rollback_anchor_sha(policy.policy_id, config.storage.rollback_anchor),
    )


def rollback_anchor_sha(policy_id: str, rollback_anchor: str | None) -> str:
    """Returns a digest of the policy's rollback anchor; every bundle publishes the terms."""
    return json_digest(["rollback_anchor/1", policy_id, rollback_anchor]) if rollback_anchor else ""


class ChargedContent(TypedDict):
    """Part of a reservation that determines the charge of a run."""

    purpose: Purpose
    blocks_requested: list[str]
    """User blocks, `cohort/bucket`."""
    event: JsonObject
    relation: str
    delta: float
    rounds: int


class ReservedContent(ChargedContent):
    """Content that a reservation binds; a retry must pass the same values."""

    plan_sha: str
    config_sha: str
    code_sha: str
    input: str
    """Address of the source."""


def charged_content(config: RunConfig, plan: MechanismPlan) -> ChargedContent:
    """Returns the part of a reservation that determines the charge of a run.

    The rest of a reservation is digests: of plan, configuration, code and input.
    """
    return {
        "purpose": config.purpose,
        "blocks_requested": blocks_of(config.partition),
        "event": event_to_json(plan.event()),
        "relation": plan.relation.name,
        "delta": config.policy.delta,
        "rounds": plan.rounds,
    }


def blocks_of(partition: PartitionConfig) -> list[str]:
    """Returns the user blocks that a run requests, `cohort/bucket`, from public constants only."""
    return [
        f"{cohort}/{bucket}"
        for cohort in sorted(set(partition.cohorts))
        for bucket in range(partition.blocks_per_cohort)
    ]
