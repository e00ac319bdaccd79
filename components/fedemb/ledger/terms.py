"""What a policy fixes for its life: its caps, how runs compose, and who counts as one user."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, cast

from fedemb.config import ONE_COHORT, PartitionConfig, RunConfig, SourceConfig
from fedemb.config.policy import Unit
from fedemb.data.identity import CURRENT, rule_named
from fedemb.errors import LedgerError
from fedemb.foundation.canonical_json import json_digest
from fedemb.privacy.accounting.events import event_to_json
from fedemb.privacy.mechanisms.mechanism import MechanismPlan

_SETTINGS = {
    "user_id_column": "data.source.columns.user_id",
    "cohort_column": "data.source.columns.cohort",
    "blocks_per_cohort": "partition.blocks_per_cohort",
    "shared_label_column": "the shared classes (data.source.label_scope with columns.label)",
    "evaluation": "partition.evaluation",
    "series": "policy.planned_runs and the plan they repeat",
    "witness_sha": "the digest of storage.witness",
    "identifiers": "the rule of ids (of images without a user column: data.source.format)",
}
"""Where a configuration says it; everything else is `policy.<name>`."""


_LATER = {"covers_change_own_data": False, "witness_sha": "", "trust_sha": ""}
"""What policies from before these terms were known had."""
_SHA = re.compile(r"([0-9a-f]{64})?")


@dataclass(frozen=True)
class PlannedSeries:
    """A series of runs with exactly one event, committed in advance."""

    event_sha: str
    relation: str
    runs: int


@dataclass(frozen=True)
class UserTerms:
    """Who is one user, which block is theirs, and who never trains.

    Another answer gives the same people other ids, blocks or evaluation users: what was spent on
    them would be lost from sight, and people once held out for evaluation would train.
    """

    user_id_column: str | None
    """None: every image is a unit of its own."""
    cohort_column: str | None
    """None: all users are of one cohort."""
    blocks_per_cohort: int
    """Hash buckets of a cohort."""
    shared_label_column: str | None
    """Classes that all users share, of which some are held out; None: classes are the user's."""
    evaluation: Mapping[str, Any]
    """How users, and shared classes, are held out, as `partition.evaluation` says it."""

    def cut(self, blocks: Iterable[str]) -> bool:
        """Whether these are blocks, `cohort/bucket`, of users cut in this way."""
        buckets = {str(number) for number in range(self.blocks_per_cohort)}
        parts = [block.rpartition("/") for block in blocks]
        return all(
            cohort and bucket in buckets and (cohort == ONE_COHORT) == (self.cohort_column is None)
            for cohort, _, bucket in parts
        )


@dataclass(frozen=True)
class PolicyTerms:
    """What a policy fixes for its life."""

    epsilon_cap: float
    """Cap on the cumulative epsilon of every user block."""
    delta: float
    users_lower_bound: int
    composition: Literal["planned", "renyi"]
    renyi_order: float
    audit_level: Literal["monitoring", "full"]
    users: UserTerms
    unit: Unit = "user"
    """Whose presence every guarantee of the policy hides."""
    covers_change_own_data: bool = False
    """Whether users who stay and change their own data are covered too."""
    unplanned_runs: Literal["refuse", "renyi"] = "refuse"
    """What happens to a run that is not of the planned series."""
    approvals: int = 0
    """How many people must approve a release."""
    series: PlannedSeries | None = None
    identifiers: str = f"{CURRENT.version};hmac-sha256/1;cohort-bucket/1"
    """Versions of the rule of ids, of the user hash and of the block rule. A policy keeps its first
    rule of ids, see `fedemb.data.identity`; another of the others is another policy.
    Where images are units and are told apart by their names, `identifiers_of` says so."""
    witness_sha: str = ""
    """Digest of the address of the witness, see `witness_sha`; empty: none was named."""
    trust_sha: str = ""
    """Digest of the trust file beside the ledger, `TrustStore.digest`; empty in old policies."""

    def to_json(self) -> dict[str, Any]:
        """The terms as they stand in the policy record."""
        body = {item.name: getattr(self, item.name) for item in fields(self)}
        users = {**vars(self.users), "evaluation": dict(self.users.evaluation)}
        return {
            **body,
            "users": users,
            "series": vars(self.series).copy() if self.series else {},
        }

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> PolicyTerms:
        """Reads the terms of a policy record, closed-world.

        Raises:
          LedgerError: a field is unknown, missing, of another type or out of bounds.
        """
        try:
            values = _typed(cls, {**_LATER, **body})
            plan = cast("dict[str, Any]", values.pop("series"))
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
            and terms.unplanned_runs in ("refuse", "renyi")
            and terms.audit_level in ("monitoring", "full")
            and terms.unit in ("user", "image")
            and terms.approvals >= 0
            and (terms.composition == "planned") == (terms.series is not None)
            and terms.users.blocks_per_cohort >= 1
            and all(_SHA.fullmatch(sha) for sha in (terms.witness_sha, terms.trust_sha))
        )
        if not holds:
            raise LedgerError("the policy record has terms out of bounds; restore the ledger")
        return terms

    def differences(self, asked: Self) -> list[str]:
        """What somebody asks for otherwise, by the names of the configuration."""
        ours, theirs = _flat(self), _flat(asked)
        theirs["identifiers"] = _by_rule_of(self.identifiers, asked.identifiers)
        free = {"trust_sha"} if self.witness_sha else {"trust_sha", "witness_sha"}
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
    "Mapping[str, Any]": (dict,),
    "UserTerms": (dict,),
    "PlannedSeries | None": (dict,),
}
"""JSON types of the fields by annotation; a Literal is text."""


def _typed(cls: type, body: object) -> dict[str, Any]:
    """The fields of a dataclass, each of its JSON type, none missing and none further."""
    kinds = {item.name: _KINDS.get(str(item.type), (str,)) for item in fields(cls)}
    if not isinstance(body, dict) or set(cast("dict[str, object]", body)) != set(kinds):
        raise ValueError("unknown or missing fields")
    values = cast("dict[str, Any]", body)
    if any(type(values[name]) not in kind for name, kind in kinds.items()):
        raise ValueError("a field of another type")
    return dict(values)


def _flat(terms: PolicyTerms) -> dict[str, Any]:
    body = terms.to_json()
    return {**body.pop("users"), **body}


def _by_rule_of(ours: str, theirs: str) -> str:
    """The identifiers of a configuration, with the rule of ids of the policy.

    A configuration does not name that rule, so an earlier known rule is not a difference.
    """
    if theirs.partition(";")[0] != CURRENT.version:
        return theirs
    return f"{rule_named(ours).version};{theirs.partition(';')[2]}"


def series_of(config: RunConfig, plan: MechanismPlan) -> PlannedSeries | None:
    """The series a new policy of this configuration commits; None unless it plans one."""
    if config.policy.composition != "planned":
        return None
    return PlannedSeries(
        event_sha=json_digest(event_to_json(plan.event())),
        relation=plan.relation.name,
        runs=config.policy.planned_runs,
    )


def identifiers_of(source: SourceConfig) -> str:
    """The rule by which units of a source are told apart.

    Images without users are known by their bytes in Parquet and TFRecord, and by their names in CSV
    and folders: the same photographs in another format would be other units, and those that were
    measured exactly would train.
    """
    kind = "parquet" if source.uri == "builtin" else source.file_format
    if source.columns.user_id is not None or kind not in ("csv", "image_folder"):
        return PolicyTerms.identifiers
    column = f":{source.columns.image_id}" if kind == "csv" else ""
    return f"{PolicyTerms.identifiers};{kind}-name/1{column}"


def terms_of(config: RunConfig, series: PlannedSeries | None) -> PolicyTerms:
    """The terms a configuration asks for.

    Args:
      config: configuration of a run.
      series: of a new policy, `series_of`; of a run, the policy's, as whether the run is of it
        is judged when it reserves.
    """
    policy, source, partition = config.policy, config.data.source, config.partition
    return PolicyTerms(
        epsilon_cap=policy.epsilon_cap,
        delta=policy.delta,
        users_lower_bound=policy.users_lower_bound,
        composition=policy.composition,
        renyi_order=policy.renyi_order,
        audit_level=policy.audit_level,
        users=UserTerms(
            user_id_column=source.columns.user_id,
            cohort_column=source.columns.cohort,
            blocks_per_cohort=partition.blocks_per_cohort,
            shared_label_column=source.columns.label if source.label_scope == "global" else None,
            evaluation=_held_out(partition),
        ),
        unit=policy.unit,
        identifiers=identifiers_of(source),
        covers_change_own_data=policy.covers_change_own_data,
        unplanned_runs=policy.unplanned_runs,
        approvals=policy.approvals,
        series=series,
        witness_sha=witness_sha(policy.policy_id, config.storage.witness),
    )


def witness_sha(policy_id: str, witness_uri: str | None) -> str:
    """Names the witness of a policy in its terms, which every bundle carries to anybody."""
    return json_digest(["witness/1", policy_id, witness_uri]) if witness_uri else ""


def _held_out(partition: PartitionConfig) -> dict[str, Any]:
    """As it is written down; without `classes` as before there was a list of them."""
    said = partition.evaluation.model_dump(mode="json")
    return {name: value for name, value in said.items() if name != "classes" or value}


def charged_content(config: RunConfig, plan: MechanismPlan) -> dict[str, Any]:
    """What the reservation of a run binds as far as its charge is concerned.

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
    """The user blocks a run asks for: `cohort/bucket`, from public constants alone."""
    return [
        f"{cohort}/{bucket}"
        for cohort in sorted(set(partition.cohorts))
        for bucket in range(partition.blocks_per_cohort)
    ]
