"""Privacy report: the guarantee, its cost, and its evidence.

`gate.privacy_report` builds the report, and it is compared as a whole with a rebuilt one. Trust,
assumptions and limitations are codes with a fixed text.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import ClassVar, Literal

from fedemb.config.policy import Unit as UnitName
from fedemb.documents.audit import MechanismAudit, SelfTest
from fedemb.documents.fields import (
    Address,
    AnyJson,
    Code,
    Comparison,
    Count,
    Delta,
    Epsilon,
    Guarantee,
    Interval,
    Name,
    Point,
    Purpose,
    Sha,
    Share,
    Time,
)
from fedemb.documents.model import Commitments
from fedemb.documents.utility import Recall, SpaceId
from fedemb.foundation.document import Document, Part
from fedemb.foundation.environment import Backend
from fedemb.privacy.section import UNITS

TRUST = {
    "training_operator": "the operator of the training job, who sees the private images",
    "private_stores": "the store of private artifacts and the key store",
    "code": "the code whose digest this report carries",
}


def assumptions(unit: UnitName) -> dict[str, str]:
    """Returns the assumptions of the guarantee, by code."""
    rows = {
        "owner_of_record": "Every image has the id of the user that it shows. An image of two "
        "people protects only the user whose id it has.",
        "one_row_an_image": "Every image is one row, the same in every run of the policy. A copy "
        "in another row counts as another image, with a separate budget.",
        "computational": "Noise and sampling coins come from ciphers (ChaCha20, AES-256) under a "
        "secret key, so the guarantee is computational: it holds against adversaries who cannot "
        "break these ciphers.",
        "private_root": "Readers of the private root (images, diagnostics, rejects, raw audit "
        "scores, logs of failures) are outside the guarantee.",
        "one_id_and_cohort": "A user has one id and, where a column names cohorts, one cohort, the "
        "same in every run of the policy; another id or cohort would be charged to another "
        "budget. A user with records of several cohorts does not train.",
        "preflight": "The thresholds of fedemb check-data are a check by the data owner before "
        "the run and are outside the guarantee.",
    }
    others = {"user": {"one_row_an_image"}, "image": {"owner_of_record", "one_id_and_cohort"}}
    return {code: words for code, words in rows.items() if code not in others[unit]}


def limitations(unit: UnitName) -> dict[str, str]:
    """Returns the limitations of the guarantee by code."""
    words = UNITS[unit]
    several = {"owners_of_several": words.covered} if unit == "image" else {}
    return {
        **several,
        "evaluation_users": f"Held-out evaluation {words.many} are not covered: the utility "
        "figures are exact on them.",
        "declared_tuning": "The choice of hyperparameters is declared, not observed: each "
        "private run whose results were used has its own price in the ledger. Runs outside the "
        "ledger are not covered.",
        "monitoring": "The attack of the audit is monitoring only: it does not bound epsilon and "
        "does not prove privacy.",
        "timing": f"The duration of steps depends on the number of {words.many} that participate. "
        "Observers of the pipeline can measure it, and it is not covered.",
        "other_policies": f"Budgets of other policies for the same {words.many} add up. This "
        "report includes its own ledger only.",
    }


class Recurring(Part):
    """Position of this run among the runs of its policy."""

    policy_id: Name
    run_index: Count
    runs_planned: Count | None
    audit_level: Name


class Setting(Part):
    """Trust model, and published outputs."""

    model: Literal["central"]
    trust: list[Code]
    releases: Literal["final_model_only"]
    recurring: Recurring


class Unit(Part):
    """Unit that is protected."""

    unit: Literal["user", "image"]
    multi_owner: Literal["not_covered"]
    population_lower_bound: Count
    exclusions: list[Code]
    held_out_share: Share | None
    """Expected share of held-out users; None: users with the configured values are held out."""


class Adjacency(Part):
    """Difference between two neighbouring data sets."""

    relation: Literal["add_or_remove_one_user", "add_or_remove_one_image"]
    accounting_relation: Name
    covers_change_own_data: bool


class Clip(Part):
    """Clipping of one contribution."""

    kind: Literal["global_l2_per_virtual_client", "global_l2_per_unit", "global_l2_per_image"]
    l2_norm_clip: float


class Noise(Part):
    """Noise that was added, and its source."""

    family: Literal["gaussian", "none"]
    generator: Literal["chacha20_box_muller_float64"]
    key: Literal["256_bits_per_attempt_bound_to_inputs_and_sums"]
    grid_bits: Count
    secure: bool


class Normalizer(Part):
    """Divisor of the sum."""

    rule: Literal["public_constant"]
    value: float


class Matrix(Part):
    """Matrix of mechanisms that track participation."""

    sensitivity: float | None
    min_separation: Count | None
    max_participations: Count | None
    restart_every: Count | None


class MechanismFacts(Part):
    """Facts about the mechanism that ran."""

    name: Code
    plan_sha: Sha
    sampling_probability: float | None
    virtual_clients: Count
    groupings: Count
    grouping_rule: Literal["keyed_hash_of_user_id", "each_unit_alone"]
    rounds_planned: Count
    rounds_run: Count
    clip: Clip
    noise_multiplier: float
    noise: Noise
    normalizer: Normalizer
    matrix: Matrix | None
    backend: Backend


class Accounting(Part):
    """Cost of the run by every accounting method."""

    library: Name
    version: Name
    accountant: Name
    discretisation: float
    event: AnyJson
    rounds_priced: Count
    epsilon: Epsilon
    delta: Delta
    epsilon_conservative_2c: Epsilon
    epsilon_rdp: Epsilon
    zcdp_rho: Epsilon
    comparisons: list[Comparison]
    curve: list[Point]


class BlockSpent(Part):
    """Budget spent by one user block."""

    block: Name
    epsilon: Epsilon
    runs: Count


class Filter(Part):
    """Composition of runs."""

    kind: Name
    order: float | None
    unplanned_runs: Name


class Cumulative(Part):
    """Cumulative cost of all runs of the policy, as of a ledger record."""

    policy_id: Name
    blocks: list[BlockSpent]
    block_table_sha: Sha
    max_block_epsilon: Epsilon
    delta: Delta
    cap: float
    filter: Filter
    ledger_sequence: Count
    ledger_head: Sha


class Tuning(Part):
    """Declared choice of hyperparameters; the method is in the configuration."""

    data: Code
    private_runs: Count
    other_runs_before: Count
    simulations_before: Count
    """Number of simulations on the same users before this run, which were not charged."""


class EvaluationData(Part):
    """Users that the utility figures describe."""

    data: Literal["held_out_users"]
    charged: Literal[False]


class Start(Part):
    """Public backbone of the training; licence and provenance are in the configuration."""

    kind: Code
    initial_weights_sha: Sha
    overlaps_private: Literal["no_public_images", "unchecked", "dropped_by_partition_users"]


class Audited(Part):
    """Fields from the audit report."""

    level: Name
    attack: Name
    model_sha: Sha
    code_sha: Sha
    figures: Literal["open", "private"]
    mechanism: MechanismAudit | None
    self_test: SelfTest


class Useful(Part):
    """Fields from the utility report."""

    model_sha: Sha
    recall_at_far: dict[str, Recall]
    embedding_space_id: SpaceId


class UsefulClassifier(Part):
    """Fields from the utility report of a classifier."""

    model_sha: Sha
    top_1: Interval | None


class Waived(Part):
    """Waiver in the ledger; its reason is in the ledger record, signed by the policy owner."""

    code: Code
    model_sha: Sha
    sequence: Count


class Provenance(Part):
    """Digests of all evidence of the report."""

    config_sha: Sha
    code_sha: Sha
    plan_sha: Sha
    inputs_sha: Sha
    commitments: Commitments
    input: Address
    plan_document: Sha
    reservation_document: Sha
    users_document: Sha
    model_files: dict[Name, Sha]
    audit_document: Sha
    utility_document: Sha


class ReleaseTerms(Part):
    """Release terms from the configuration."""

    licence_sha: Sha
    """SHA-256 of the licence as shown on the page, because documents have no free text."""
    min_gain_over_public: float | None
    """Floor of the gain; None: no floor."""
    no_worse_than: Literal["previous_release"] | None
    name: Name | None
    """Name of the release. Approvers sign the report, and with it name and version."""
    version: Name | None
    train_despite_noise_sha: Sha | None
    """SHA-256 of the reason to train despite the noise; None: the noise needed no reason."""
    approval_hours: float | None
    """Hours after `time` of the report within which approvals count; None: no deadline."""


class PrivacyReport(Document):
    """Written by account_privacy."""

    kind: ClassVar[str] = "privacy_report"
    role: ClassVar[str | None] = "report"

    purpose: Purpose
    run_id: Name
    attempt: Count
    time: Time
    model_sha: Sha
    guarantee: Guarantee
    setting: Setting
    unit: Unit
    adjacency: Adjacency
    mechanism: MechanismFacts
    accounting: Accounting
    cumulative: Cumulative
    tuning: Tuning
    evaluation: EvaluationData
    pretraining: Start
    audit: Audited
    utility: Useful | UsefulClassifier
    assumptions: list[Code]
    limitations: list[Code]
    waivers: list[Waived]
    release: ReleaseTerms | None
    provenance: Provenance

    @property
    def approve_by(self) -> datetime | None:
        """Deadline of the approvals; None: no deadline."""
        hours = self.release and self.release.approval_hours
        return None if hours is None else datetime.fromisoformat(self.time) + timedelta(hours=hours)
