"""Privacy report: the guarantee, its cost, and its evidence.

`reports.privacy_report` builds the report, and it is compared as a whole with a rebuilt one. Text
is displayed by code; `reports.privacy_report_words` contains the text.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import ClassVar, Literal

from fedemb.documents.audit import SelfTest
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
from fedemb.documents.mechanism_audit import MechanismAudit
from fedemb.documents.users import Commitments
from fedemb.documents.utility import Recall, SpaceId
from fedemb.foundation.document import Document, Part
from fedemb.foundation.runtime_env import Backend


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
