"""The privacy report: what is guaranteed, what it cost, and what it rests on.

It is built by `reports.privacy_report` and compared as a whole with one built again. Words are
shown by code; `reports.privacy_report_words` has them.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from fedemb.documents.audit import SelfTest
from fedemb.documents.fields import (
    Address,
    Code,
    Comparison,
    Count,
    Delta,
    Epsilon,
    Guarantee,
    Interval,
    Json,
    Name,
    PlantedBugs,
    Point,
    Purpose,
    Sha,
    Share,
    Time,
)
from fedemb.documents.mechanism_audit import Independence, MechanismAudit
from fedemb.documents.users import Commitments
from fedemb.documents.utility import Recall, SpaceId
from fedemb.foundation.document import Document, Part, Since
from fedemb.foundation.runtime_env import Backend


class Recurring(Part):
    """Where this run stands among those of its policy."""

    policy_id: Name
    run_index: Count
    runs_planned: Count | None
    audit_level: Name


class Setting(Part):
    """Who is trusted, and what is published."""

    model: Literal["central"]
    trust: list[Code]
    releases: Literal["final_model_only"]
    recurring: Recurring


class Unit(Part):
    """Who is protected."""

    unit: Literal["user", "image"]
    multi_owner: Literal["not_covered"]
    population_lower_bound: Count
    exclusions: list[Code]
    held_out_share: Annotated[Share | None, Since(2, before=None)]
    """Expected share of the users held out for evaluation; None: those with named values."""


class Adjacency(Part):
    """What two neighbouring data sets differ by."""

    relation: Literal["add_or_remove_one_user", "add_or_remove_one_image"]
    accounting_relation: Name
    covers_change_own_data: bool


class Clip(Part):
    """How much of one contribution counts."""

    kind: Literal["global_l2_per_virtual_client", "global_l2_per_unit", "global_l2_per_image"]
    l2_norm_clip: float
    adaptive: Json | None


class Noise(Part):
    """What was added, and from where."""

    family: Literal["gaussian", "none"]
    generator: Literal["chacha20_box_muller_float64"]
    key: Literal["256_bits_per_attempt_bound_to_inputs_and_sums"]
    grid_bits: Count
    secure: bool


class Normaliser(Part):
    """What the sum was divided by."""

    rule: Literal["public_constant"]
    value: float


class Matrix(Part):
    """Of mechanisms that track participation."""

    sensitivity: float | None
    min_separation: Count | None
    max_participations: Count | None
    buffers: Count | None
    restart_every: Count | None


class MechanismFacts(Part):
    """What ran."""

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
    normaliser: Normaliser
    matrix: Matrix | None
    backend: Annotated[Backend, Since(3, before="tensorflow")]


class Accounting(Part):
    """What it costs, by every reading."""

    library: Name
    version: Name
    accountant: Name
    discretisation: float
    event: Json
    rounds_priced: Count
    epsilon: Epsilon
    delta: Delta
    epsilon_conservative_2c: Epsilon
    epsilon_rdp: Epsilon
    zcdp_rho: Epsilon
    comparisons: list[Comparison]
    curve: list[Point]


class BlockSpent(Part):
    """What one user block has spent."""

    block: Name
    epsilon: Epsilon
    runs: Count


class Filter(Part):
    """How runs compose."""

    kind: Name
    order: float | None
    unplanned_runs: Name


class Cumulative(Part):
    """What all runs of the policy cost together, as of a ledger record."""

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
    """How hyperparameters were chosen, as declared; the method stands in the configuration."""

    data: Code
    trials: Count
    other_runs_before: Count
    simulations_before: Annotated[Count, Since(2, before=0)]
    """Simulations on the same users before this run, which paid nothing."""


class EvaluationData(Part):
    """Whom the utility figures are about."""

    data: Literal["held_out_users"]
    charged: Literal[False]


class Start(Part):
    """Where training began; licence and provenance stand in the configuration."""

    kind: Code
    initial_weights_sha: Sha
    overlaps_private: Literal["no_public_images", "unchecked", "dropped_by_partition_users"]


class Audited(Part):
    """From the audit report."""

    level: Name
    attack: Name
    model_sha: Sha
    code_sha: Sha
    figures: Literal["open", "private"]
    lower_bound: float | None
    mechanism: Annotated[MechanismAudit | None, Since(2, before=None)]
    independence: Annotated[Independence | None, Since(5, before=None)]
    self_test: SelfTest
    planted_bug_suite: PlantedBugs


class Useful(Part):
    """From the utility report."""

    model_sha: Sha
    recall_at_far: dict[str, Recall]
    embedding_space_id: SpaceId


class UsefulClassifier(Part):
    """The same, of a classifier."""

    model_sha: Sha
    top_1: Interval | None


class Waived(Part):
    """A waiver in the ledger; its reason stands there, signed by the policy owner."""

    code: Code
    model_sha: Sha
    sequence: Count


class Provenance(Part):
    """Digests of everything it rests on."""

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
    """On what terms the model goes out, as the configuration has them."""

    licence_sha: Sha
    """SHA-256 of its licence, as the page shows it: no document has room for free text."""
    min_gain_over_public: float | None
    """None: no floor."""
    no_worse_than: Literal["previous_release"] | None
    name: Annotated[Name | None, Since(5, before=None)]
    """Under which it is published: approvers sign the report, and with it name and version."""
    version: Annotated[Name | None, Since(5, before=None)]


class PrivacyReport(Document):
    """Written by account_privacy."""

    kind: ClassVar[str] = "privacy_report"
    newest: ClassVar[int] = 5
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
    release: Annotated[ReleaseTerms | None, Since(4, before=None)]
    provenance: Provenance
