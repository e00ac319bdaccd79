"""Settings of privacy budget, tuning declaration, evaluation, audit, release and stores."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from fedemb.foundation.section import Address, Name, Section, WebAddress
from fedemb.privacy.section import Unit

PRIVATE_FOLDERS = {"users", "evaluation", "rejects", "partition", "train", "diagnostics", "audit"}
"""Folders of a run in the private root. Stores assign access rights by these names."""


def _no_folder(policy_id: str) -> str:
    if policy_id in PRIVATE_FOLDERS:
        raise ValueError(
            f"policy_id {policy_id!r} is reserved: access rights of the private root depend on "
            "folders of this name. Choose another policy_id."
        )
    return policy_id


class PolicyConfig(Section):
    """Privacy budget that this run charges, and the unit that the guarantee protects."""

    policy_id: Annotated[Name, AfterValidator(_no_folder)] = "default"
    """Name of the policy in the ledger. Caps and keys belong to the policy."""
    unit: Unit = "user"
    """Unit of privacy, fixed for the life of the policy: a user with all their images, or one
    image. `image` requires `data.source.columns.user_id: null` and protects owners less."""
    users_lower_bound: Annotated[int, Field(ge=2)]
    """Public lower bound on the number of users, at least 2. Delta must be safe for it."""
    certify_at: tuple[Annotated[int, Field(ge=2)], ...] = ()
    """Numbers of users for which the same plan is also priced, labelled as a projection."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """Delta of the guarantee of one run and of the cumulative guarantee, above 0 and below
    1/users_lower_bound."""
    epsilon_cap: PositiveFloat
    """Maximum cumulative epsilon of each user block over the life of the policy."""
    composition: Literal["planned", "renyi"] = "renyi"
    """Composition of runs. `planned`: PLD over a schedule of runs committed in advance; `renyi`:
    Renyi filter at one order."""
    renyi_order: Annotated[float, Field(gt=1, le=512)] = 4.0
    """Order of the Renyi filter, above 1 and at most 512, fixed when the policy is created. More
    noise and fewer total rounds need a higher order: 3 at noise multiplier 1, 8 to 16 from 2."""
    planned_runs: PositiveInt = 1
    """`planned` only: number of runs of exactly this plan in the schedule. The policy refuses any
    other run."""
    covers_change_own_data: bool = False
    """Requirement that the guarantee also covers users who stay and change their own data. A run
    whose epsilon does not hold for them is refused."""
    approvals: Annotated[int, Field(ge=0, le=100)] = 0
    """Number of people who must approve a privacy report before its model is released, each with
    their own key (`fedemb approve`), 0 to 100; fixed for the life of the policy."""


class TuningConfig(Section):
    """Declaration of how the hyperparameters were chosen, repeated in the privacy report.

    Reading the results of private runs costs privacy (Papernot and Steinke, arXiv 2110.03620).
    """

    data: Literal["undeclared", "public", "private"] = "undeclared"
    """Data used for tuning; a release requires a value. `public`: public images, at no privacy
    cost; `private`: runs on private users, each charged in the ledger of this policy."""
    private_runs: NonNegativeInt = 0
    """`private` only: number of tuning runs. The same number of other runs must be charged before
    this run."""
    method: Annotated[str, Field(max_length=500)] = ""
    """Short description of the tuning images and the method, at most 500 characters."""

    @model_validator(mode="after")
    def _whole_declaration(self) -> Self:
        if (self.data == "private") != (self.private_runs > 0):
            raise ValueError(
                f"tuning.data={self.data} and tuning.private_runs={self.private_runs} contradict "
                "each other. Set private_runs to at least 1 with data: private, else to 0."
            )
        if (self.data == "undeclared") != (not self.method.strip()):
            raise ValueError(
                f"tuning.data={self.data} and tuning.method={self.method!r} belong together. "
                "Set both or neither."
            )
        return self


class EvaluationConfig(Section):
    """Verification and retrieval on held-out identities."""

    false_accept_rates: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (1e-3, 1e-2)
    """False accept rates at which recall is reported, each between 0 and 1. The first is the
    headline rate."""
    recall_at: tuple[PositiveInt, ...] = (1, 5)
    """Values of k for retrieval recall@k."""
    bootstrap_samples: Annotated[int, Field(ge=20, le=10_000)] = 200
    """Number of bootstrap resamples over identities for 95 % intervals."""
    resample_subgroups: bool = False
    """Whether to resample whole subgroups (`data.source.columns.subgroup`: alphabets, stores,
    tracks) before the identities in them. Intervals then also cover unseen subgroups."""
    batch_size: PositiveInt = 256
    """Number of images embedded per batch."""
    max_images: PositiveInt = 100_000
    """Maximum number of evaluation images, in keyed-hash order of identities."""
    centralized_baseline: bool = False
    """Simulation only: whether to also train a centralized model and print the utility drop."""
    centralized_epochs: PositiveInt = 15
    """Number of epochs of the centralized baseline."""
    previous_release: Address | None = None
    """Bundle of the previous release, to measure the recall of new queries against the old
    gallery."""


class AuditConfig(Section):
    """Empirical attack on the model."""

    max_users: Annotated[int, Field(ge=10)] = 2000
    """Maximum number of training users, and of held-out users, in the attack."""
    bootstrap_samples: Annotated[int, Field(ge=20, le=10_000)] = 200
    """Number of bootstrap resamples for 95 % intervals."""


class ReleaseConfig(Section):
    """Settings of a release: name, licence and utility floors."""

    name: Name | None = None
    """Name of the model and folder in the releases; null: `embedding` or `classifier`, by task."""
    version: Name | None = None
    """Version of the release; null: the run ID."""
    licence: Annotated[str, Field(max_length=200)] = ""
    """Licence of the released model, preferably a Hugging Face Hub identifier (apache-2.0); empty:
    the model card says that no licence is stated. The licence of the public images is
    `pretraining.licence`."""
    min_gain_over_public: Annotated[float, Field(ge=-1, le=1)] | None = 0.0
    """Lower bound for the whole 95 % interval of the gain, -1 to 1; null: no floor. The gate
    refuses a model below it. The gain is measured over the best baseline: public backbone, its
    frozen features under a projection, the output of an imported network, an untrained network, raw
    pixels, or, for a classifier, the most frequent class. Its unit is recall at the first false
    accept rate, or top-1 accuracy."""
    approval_hours: PositiveFloat | None = None
    """Hours after the time of the privacy report within which all approvals (`policy.approvals`)
    must be in the ledger; null: no deadline. After the deadline the gate refuses the release, and
    later approvals do not count."""
    no_worse_than: Literal["previous_release"] | None = None
    """Regression check. With `previous_release`, the gate refuses a model that is significantly
    worse than `evaluation.previous_release` on the same users or cannot be compared with it; null:
    none."""


class StorageConfig(Section):
    """Root addresses of the stores; null: below the run directory."""

    public_root: Address | None = None
    """Root of the public and noised artifacts of runs on a cluster; gs:// or s3://."""
    private_root: Address | None = None
    """Raw artifacts. Readers of the pipeline UI must not have read access."""
    ledger: Address | None = None
    """Permanent privacy ledger; null: a separate ledger for this run directory."""
    keys: Address | None = None
    """Key store, separate from the ledger and without object versioning."""
    rollback_anchor: Address | None = None
    """Store of the rollback anchor, for example a bucket with a locked retention policy. Each
    charge is also recorded there, so that an older ledger is detected. Accounts that can restore
    ledger and keys must not have write access."""
    releases: Address | None = None
    """Store where release bundles are published."""
    registries: tuple[WebAddress, ...] = ()
    """Model registries where a release is registered after it is published: `mlflow+https://...`
    (model registry and tracking server) or `kubeflow+https://...` (Kubeflow Model Registry). A
    failed registration is a warning; retry it with `fedemb register`."""
