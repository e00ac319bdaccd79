"""Budget, choice of hyperparameters, evaluation, audit, release and stores."""

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
from fedemb.privacy.accounting.units import Unit

PRIVATE_FOLDERS = {
    "users",
    "evaluation",
    "rejects",
    "partition",
    "train",
    "diagnostics",
    "audit",
    "deletion_marks",
}
"""Folders of a run in the private root, by whose names the stores tell rights apart."""


def _no_folder(policy_id: str) -> str:
    if policy_id in PRIVATE_FOLDERS:
        raise ValueError(
            f"a policy may not be called {policy_id}: rights on the private root go by names of "
            "folders, that among them, and deletion marks lie in one named by the policy; choose "
            "another"
        )
    return policy_id


class PolicyConfig(Section):
    """The budget this run draws from, and for whom the guarantee must hold."""

    policy_id: Annotated[Name, AfterValidator(_no_folder)] = "default"
    """Name of the policy in the ledger; caps and keys belong to it."""
    unit: Unit = "user"
    """Whose presence the guarantee hides, for the policy's life: a user with everything they own,
    or one image. `image` needs `data.source.columns.user_id: null`, and promises owners less."""
    users_lower_bound: Annotated[int, Field(ge=2)]
    """A public number below which the population surely never falls; delta must be safe for it."""
    certify_at: tuple[Annotated[int, Field(ge=2)], ...] = ()
    """Populations for which the same plan is priced as a projection, labelled so."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """Delta of the guarantee of one run and of the cumulative one; below 1/users_lower_bound."""
    epsilon_cap: PositiveFloat
    """Cap on the cumulative epsilon of every user block, over the life of the policy."""
    composition: Literal["planned", "renyi"] = "renyi"
    """`planned`: PLD over a schedule of runs committed in advance; `renyi`: filter at one order."""
    renyi_order: Annotated[float, Field(gt=1, le=512)] = 4.0
    """Order of the Renyi filter, fixed when the policy is created. The more noise and the fewer
    rounds in all, the higher the best order: 3 at noise multiplier 1, 8 to 16 at 2 and more."""
    planned_runs: PositiveInt = 1
    """`planned` only: how many runs of exactly this plan the schedule holds."""
    unplanned_runs: Literal["refuse", "renyi"] = "refuse"
    """`planned` only: a run of another plan is refused, or charged by the Renyi filter; the second
    prices each way at half of delta, as which way is taken may depend on earlier models."""
    covers_change_own_data: bool = False
    """Promise to cover users who stay and change their own data too; a run whose epsilon does not
    hold for them is refused."""
    audit_level: Literal["monitoring", "full"] = "full"
    """What the audit must have shown before a release: `full`, that the priced mechanism is the
    one that ran; `monitoring`, only that an attack was made."""
    approvals: Annotated[int, Field(ge=0, le=100)] = 0
    """How many people must approve a privacy report, each with a key of their own (`fedemb
    approve`), before its model is released; for the policy's life."""


class TuningConfig(Section):
    """How the hyperparameters were chosen: a declaration, which the report repeats.

    Looking at the results of private runs costs privacy (Papernot and Steinke, arXiv 2110.03620).
    """

    data: Literal["undeclared", "public", "private"] = "undeclared"
    """A release needs a declaration. `public`: on public images, which costs
    nothing; `private`: by looking at runs on private users, each charged in the ledger of this
    policy."""
    trials: NonNegativeInt = 0
    """`private` only: how many; as many other runs must be charged before this one."""
    method: Annotated[str, Field(max_length=500)] = ""
    """In a few words: on which images, by which search."""

    @model_validator(mode="after")
    def _whole_declaration(self) -> Self:
        if (self.data == "private") != (self.trials > 0):
            raise ValueError(
                f"tuning.data={self.data} with tuning.trials={self.trials}: trials are the private "
                "runs looked at, one or more of them with data: private and none otherwise"
            )
        if (self.data == "undeclared") != (not self.method.strip()):
            raise ValueError(
                f"tuning.data={self.data} with tuning.method={self.method!r}: say both, or neither"
            )
        return self


class EvaluationConfig(Section):
    """Verification and retrieval on identities that never trained."""

    false_accept_rates: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (1e-3, 1e-1)
    """Recall is reported at each of these; the first is the headline."""
    recall_at: tuple[PositiveInt, ...] = (1, 5)
    """Retrieval recall@k."""
    bootstrap_samples: Annotated[int, Field(ge=20, le=10_000)] = 200
    """Resamples over identities for 95 % intervals."""
    resample_subgroups: bool = False
    """Draw whole subgroups (`data.source.columns.subgroup`: alphabets, stores, tracks) before the
    identities inside them: intervals then say what to expect of subgroups that are not here."""
    batch_size: PositiveInt = 256
    """Images embedded at once."""
    max_images: PositiveInt = 100_000
    """Evaluation images used, in keyed-hash order of identities."""
    centralized_baseline: bool = False
    """Simulation only: also train centrally, and print the utility drop."""
    centralized_epochs: PositiveInt = 15
    """Passes of the centralized baseline."""
    previous_release: Address | None = None
    """Bundle of the previous release, for the recall of new queries against the old gallery."""


class AuditConfig(Section):
    """Empirical attack on the model."""

    max_users: Annotated[int, Field(ge=10)] = 2000
    """Training and held-out users compared, each."""
    bootstrap_samples: Annotated[int, Field(ge=20, le=10_000)] = 200
    """Resamples for 95 % intervals."""


class ReleaseConfig(Section):
    """Name under which a model is published."""

    name: Name | None = None
    """Folder below the releases; null: `embedding` or `classifier`, as the task is."""
    version: Name | None = None
    """Null: the run id."""
    licence: Annotated[str, Field(max_length=200)] = ""
    """Licence of the released model, best by the Hugging Face Hub's identifier (apache-2.0); empty:
    the model card says that it is not stated. That of the public images is
    `pretraining.licence`."""
    min_gain_over_public: Annotated[float, Field(ge=-1, le=1)] | None = 0.0
    """The gate refuses unless the whole 95 % interval of the gain lies above this; null: no floor.
    The gain is that over the best start: public start, its frozen features under a projection, an
    untrained net, raw pixels, or for a classifier the most frequent class; in recall at the first
    false accept rate, or in top-1."""
    no_worse_than: Literal["previous_release"] | None = None
    """The gate refuses a model that is certainly worse than `evaluation.previous_release` on the
    same people, or cannot be compared with it."""


class StorageConfig(Section):
    """Roots of the stores; null: below the run directory."""

    public_root: Address | None = None
    """Public and noised artifacts; file, gs:// or s3://."""
    private_root: Address | None = None
    """Raw artifacts; must not be readable by who reads the pipeline UI."""
    ledger: Address | None = None
    """The lasting privacy ledger; null: a ledger of its own for this run directory."""
    keys: Address | None = None
    """Key store, apart from the ledger and unversioned."""
    deletion_marks: Address | None = None
    """Keyed deletion marks of users who asked to be forgotten; null: there are none."""
    witness: Address | None = None
    """Store that whoever can restore ledger and keys cannot write, such as a bucket with a locked
    retention policy: each charge is marked there too, so that an older ledger is noticed."""
    releases: Address | None = None
    """Where bundles are published."""
    registries: tuple[WebAddress, ...] = ()
    """Whom a release is made known to, after it is published: `mlflow+https://...` (a model
    registry and tracking server), `kubeflow+https://...` (Kubeflow Model Registry), `https://...`
    (any receiver of JSON). One that fails is a warning; `fedemb register` tells it again."""
