"""Privacy report: the guarantee, its cost, and its evidence.

`release.privacy_report` builds the report, and it is compared as a whole with a rebuilt one. It
states each fact once: what another signed document has is bound by the digest of that document.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import ClassVar, Literal

from fedemb.config.policy import Unit as UnitName
from fedemb.documents.audit import MechanismAudit, SelfTest
from fedemb.documents.fields import (
    Address,
    Code,
    Count,
    Delta,
    Epsilon,
    Guarantee,
    Name,
    Purpose,
    Sha,
    Share,
    Time,
)
from fedemb.documents.model import Commitments
from fedemb.foundation.document import Document, Part
from fedemb.foundation.environment import Backend
from fedemb.privacy.section import UNITS


def assumptions(unit: UnitName) -> list[str]:
    """Returns the assumptions of the guarantee."""
    owner = {
        "user": [
            "Every image has the id of the user that it shows; others in it are not protected.",
            "A user has one id and at most one cohort, the same in every run of the policy.",
        ],
        "image": [
            "Every image is one row, the same in every run of the policy. A copy in another row "
            "counts as another image, with a separate budget."
        ],
    }
    return [
        *owner[unit],
        "The ciphers (ChaCha20, AES-256) of noise and sampling coins are not broken.",
        "Readers of the private root, and of the counts of fedemb check-data, are outside the "
        "guarantee.",
    ]


def limitations(unit: UnitName) -> list[str]:
    """Returns the limitations of the guarantee."""
    words = UNITS[unit]
    return [
        f"Held-out evaluation {words.many} are not covered: the utility figures are exact on them.",
        "Runs outside the ledger are not covered. How hyperparameters were chosen is not observed.",
        f"The duration of steps depends on the {words.many} that participate; it is not covered.",
        f"Budgets of other policies for the same {words.many} add up.",
    ]


class Recurring(Part):
    """Position of this run among the runs of its policy."""

    policy_id: Name
    run_index: Count
    runs_planned: Count | None


class Unit(Part):
    """Unit that is protected."""

    unit: Literal["user", "image"]
    population_lower_bound: Count
    held_out_share: Share | None
    """Expected share of held-out users; None: users with the configured values are held out."""


class Adjacency(Part):
    """Difference between two neighbouring data sets."""

    relation: Literal["add_or_remove_one_user", "add_or_remove_one_image"]
    accounting_relation: Name
    covers_change_own_data: bool


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
    l2_norm_clip: float
    noise_multiplier: float
    noise_secure: bool
    """Whether there is noise, from the secret key of the reservation."""
    normalizer: float
    """Divisor of the sum, a public constant."""
    backend: Backend


class Accounting(Part):
    """Cost of the run; the other figures of its mechanism are in the plan."""

    library: Name
    version: Name
    accountant: Name
    epsilon: Epsilon
    delta: Delta
    epsilon_rdp: Epsilon


class BlockSpent(Part):
    """Budget spent by one user block."""

    block: Name
    epsilon: Epsilon
    runs: Count


class Filter(Part):
    """Composition of runs."""

    kind: Name
    order: float | None


class Cumulative(Part):
    """Cumulative cost of all runs of the policy, as of a ledger record."""

    policy_id: Name
    blocks: list[BlockSpent]
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


class Start(Part):
    """Public backbone of the training; licence and provenance are in the configuration."""

    kind: Code
    initial_weights_sha: Sha
    overlaps_private: Literal["no_public_images", "unchecked", "dropped_by_partition_users"]


class Audited(Part):
    """Fields from the audit report."""

    attack: Name
    model_sha: Sha
    code_sha: Sha
    figures: Literal["open", "private"]
    mechanism: MechanismAudit | None
    self_test: SelfTest


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
    recurring: Recurring
    unit: Unit
    adjacency: Adjacency
    mechanism: MechanismFacts
    accounting: Accounting
    cumulative: Cumulative
    tuning: Tuning
    pretraining: Start
    audit: Audited
    waivers: list[Waived]
    release: ReleaseTerms | None
    provenance: Provenance

    @property
    def approve_by(self) -> datetime | None:
        """Deadline of the approvals; None: no deadline."""
        hours = self.release and self.release.approval_hours
        return None if hours is None else datetime.fromisoformat(self.time) + timedelta(hours=hours)
