"""The one configuration of a run: frozen, versioned, checked before anything starts.

Data only: nothing here reads files of the user or imports a framework. Every field says its unit
and bounds; `fedemb config describe` prints them and `tests/golden/run_config.schema.json` pins
them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

SCHEMA_VERSION = 1
ONE_COHORT = "all"
"""Cohort of all users where no column names one."""

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Probability = Annotated[float, Field(gt=0.0, le=1.0)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$")]
"""Lower-case letters, digits, dot, dash, underscore; at most 64: safe in paths and stores."""


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


# ---- data -------------------------------------------------------------------------------------


class Columns(Section):
    """Names of the columns (Parquet, CSV) or features (TFRecord) that are read."""

    image: str = "image"
    """Encoded image bytes (Parquet, TFRecord); unused for CSV and image folders."""
    user_id: str = "user_id"
    """The owner of the image: the unit of privacy."""
    label: str | None = "label"
    """Class of the image; null: every user is one class (face identities)."""
    image_id: str = "image_id"
    """CSV only: file name below `image_root`, with or without ending."""
    cohort: str | None = None
    """Public cohort of the user (sign-up month, say), for ledger blocks; null: one cohort."""
    subgroup: str | None = None
    """Attribute by which evaluation is broken down; null: none."""


class SourceConfig(Section):
    """Where images come from."""

    uri: str
    """File, folder or glob; local, gs:// or s3://. `builtin` stands for the generated glyphs."""
    format: Literal["auto", "parquet", "tfrecord", "image_folder", "csv"] = "auto"
    """`auto` decides by the ending: .parquet, .tfrecord[.gz], .csv, else a folder per user."""
    image_root: str | None = None
    """CSV only: folder of the image files."""
    columns: Columns = Columns()
    """Which column is what."""
    where: dict[str, tuple[str, ...]] = {}
    """Keep a record only if each named column has one of the values: a public filter."""
    label_scope: Literal["user", "global"] = "user"
    """`user`: labels mean nothing outside their user (identities); `global`: shared classes."""


class BuiltinData(Section):
    """The procedural glyph data of `make run`: every identity is a random stroke glyph."""

    users: Annotated[int, Field(ge=100, le=10_000_000)] = 32_000
    """Private identities to draw."""
    images_per_user: Annotated[int, Field(ge=1, le=100)] = 4
    """Images of each identity, with jitter in pose, thickness and noise."""
    public_classes: Annotated[int, Field(ge=2, le=10_000)] = 64
    """Classes of the small public set, drawn in another stroke style."""
    public_images_per_class: Annotated[int, Field(ge=2, le=1000)] = 8
    """Images of each public class."""
    seed: NonNegativeInt = 0
    """The same seed gives the same bytes."""


class DataConfig(Section):
    """The private images."""

    source: SourceConfig
    """Where the private images are."""
    builtin: BuiltinData = BuiltinData()
    """Used only where `source.uri` is `builtin`."""
    max_pixels: Annotated[int, Field(ge=1024)] = 50_000_000
    """Width x height above which an image is dropped unread (decompression bombs)."""
    max_bad_fraction: Fraction = 0.01
    """`fedemb check-data` fails above this share of bad records. The pipeline itself never does."""


class EvaluationByHash(Section):
    """Hold out users, and classes if they are shared, by keyed hash."""

    by: Literal["hash"] = "hash"
    fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Expected share of users (and of shared classes) that never train."""


class EvaluationByValue(Section):
    """Hold out every record with one of the named values, e.g. alphabets."""

    by: Literal["value"]
    column: str
    """Column that decides; users and classes are taken to lie inside one value."""
    values: tuple[str, ...] = Field(min_length=1)
    """Values that never train."""


class PartitionConfig(Section):
    """How users become virtual clients. All numbers here are public constants."""

    virtual_clients: PositiveInt
    """Virtual clients per grouping (G); fixed by policy, never from the exact user count."""
    groupings: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Independent groupings (R); round r uses grouping r mod R."""
    max_images_per_user: PositiveInt = 64
    """Images kept per user, chosen in keyed-hash order; the rest is dropped and counted."""
    evaluation: EvaluationByHash | EvaluationByValue = Field(
        default=EvaluationByHash(), discriminator="by"
    )
    """Which users and classes are held out for evaluation."""
    cohorts: tuple[str, ...] = (ONE_COHORT,)
    """Cohorts this run may touch; users of other cohorts are left out."""
    blocks_per_cohort: Annotated[int, Field(ge=1, le=1000)] = 1
    """Hash buckets per cohort; block = cohort/bucket, fixed for life."""
    shards: Annotated[int, Field(ge=1, le=10_000)] = 4
    """Output files."""


# ---- model and training -----------------------------------------------------------------------


class ModelConfig(Section):
    """The backbone and what it sees."""

    backbone: str = "resnet8"
    """Name in the registry of `embedding/backbones.py`, or `module:function` of one's own."""
    embedding_dim: Annotated[int, Field(ge=2, le=8192)] = 128
    """Length of the embedding."""
    image_size: Annotated[int, Field(ge=8, le=1024)] = 28
    """Height and width in pixels."""
    channels: Literal[1, 3] = 1
    """1 grey, 3 RGB."""
    trainable: Literal["all", "norm_only", "last_block", "dense_only", "conv_frozen"] = "all"
    """Which named group of backbone variables private training may change."""


class LossConfig(Section):
    """Classification loss of local and public training."""

    kind: Literal["softmax", "normalized_softmax", "arcface", "cosface", "triplet"] = (
        "normalized_softmax"
    )
    """Softmax of plain or cosine logits, with or without margin; or batch-hard triplets."""
    scale: PositiveFloat = 16.0
    """Factor on cosine logits; unused by `softmax` and `triplet`."""
    margin: NonNegativeFloat = 0.2
    """Angular (arcface, radians), cosine (cosface) or distance (triplet) margin."""


class AugmentationConfig(Section):
    """Random affine copies of a training image; free of charge in privacy."""

    multiplicity: Annotated[int, Field(ge=1, le=64)] = 1
    """Augmented copies per image and visit, averaged in the loss."""
    rotation_degrees: Annotated[float, Field(ge=0, le=180)] = 10.0
    """Uniform in plus-minus this."""
    scale: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Relative, uniform in plus-minus this."""
    shear: Annotated[float, Field(ge=0, lt=1)] = 0.15
    """Uniform in plus-minus this."""
    translation: Annotated[float, Field(ge=0, le=0.5)] = 0.07
    """Share of the image size, uniform in plus-minus this."""
    flip: bool = False
    """Mirror left-right with probability one half."""


class LocalTrainingConfig(Section):
    """What a virtual client does with the broadcast backbone."""

    epochs: PositiveInt = 2
    """Passes over the virtual client's examples."""
    batch_size: PositiveInt = 32
    """Examples per local step."""
    max_examples_per_client: PositiveInt = 2048
    """Examples of one virtual client used per epoch, in keyed order."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """Local optimizer of backbone and head; its slots die with the round."""
    client_learning_rate: NonNegativeFloat = 0.02
    """Learning rate of the backbone."""
    client_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """SGD momentum, or Adam's beta_1."""
    head_learning_rate_scale: NonNegativeFloat = 100.0
    """Learning rate of the head = client_learning_rate x this."""
    head_init: Literal["glorot", "prototypes"] = "glorot"
    """Fresh head: random, or normalised class means of the client's own embeddings."""
    reconstruction_steps: NonNegativeInt = 0
    """First this many steps train only the head, the rest only the backbone; 0 trains jointly."""
    loss: LossConfig = LossConfig()
    """Local loss."""
    augmentation: AugmentationConfig | None = None
    """None trains on the images as they are."""


class ServerConfig(Section):
    """What the server does with the noised mean update: post-processing, free of charge."""

    optimizer: Literal["sgd", "adam"] = "sgd"
    """Rule that applies the noised mean update."""
    learning_rate: PositiveFloat = 0.5
    """Step along the noised mean update."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """SGD momentum, or Adam's beta_1."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Decay of the learning rate over all rounds."""
    warmup_rounds: NonNegativeInt = 0
    """Linear warm-up before the schedule."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Average of the weights that is released; 0 releases the last weights."""


class TrainingConfig(Section):
    """The training algorithm. Rounds, clip and noise belong to `mechanism`."""

    algorithm: Literal["dp_fedemb", "dp_fedavg", "centralized"] = "dp_fedemb"
    """`dp_fedavg` shares its head (and clips and noises it); `centralized` is a baseline."""
    local: LocalTrainingConfig = LocalTrainingConfig()
    server: ServerConfig = ServerConfig()
    seed: NonNegativeInt = 0
    """Initial weights, shuffles, augmentation, heads. Never noise, never sampling."""
    checkpoint_every: PositiveInt = 1
    """Rounds between checkpoints; 1 resumes with no lost work."""
    parallel_clients: NonNegativeInt = 0
    """Virtual clients trained side by side; 0: one per core or device."""
    mixed_precision: bool = False
    """bfloat16 local training; clipping and sums stay in full precision."""


class PretrainingConfig(Section):
    """Public start of the backbone."""

    kind: Literal["none", "supervised", "simclr", "import"] = "none"
    """No start, classes, self-supervision without labels, or a model file."""
    source: SourceConfig | None = None
    """Public images; images found here are dropped from the private side."""
    epochs: PositiveInt = 10
    """Passes over the public images."""
    batch_size: PositiveInt = 64
    """Public images per step."""
    learning_rate: PositiveFloat = 0.05
    """Peak learning rate; decays by a cosine."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """SGD momentum."""
    loss: LossConfig = LossConfig()
    """Loss of supervised pretraining."""
    temperature: PositiveFloat = 0.2
    """SimCLR only."""
    augmentation: AugmentationConfig | None = AugmentationConfig()
    """Public augmentation; null trains on the images as they are."""
    import_path: str | None = None
    """`import` only: a .keras file with whitelisted layers."""
    licence: str = "unknown"
    """Licence of the public data or model, printed in report and model card."""
    provenance: str = ""
    """Where the public data or model comes from."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind in ("supervised", "simclr") and self.source is None:
            raise ValueError(
                f"pretraining.kind={self.kind} needs pretraining.source; name one, or kind: none"
            )
        if self.kind == "import" and not self.import_path:
            raise ValueError("pretraining.kind=import needs pretraining.import_path, a .keras file")
        return self


# ---- mechanism --------------------------------------------------------------------------------


class _MechanismBase(Section):
    rounds: PositiveInt
    """Training rounds (T)."""
    l2_norm_clip: PositiveFloat = 1.0
    """Bound (C) on the L2 norm of a virtual client's update, all released variables together."""


class _Noised(_MechanismBase):
    noise_multiplier: PositiveFloat
    """Standard deviation of the noise on the SUM of updates / l2_norm_clip (sigma)."""


class AdaptiveClipConfig(Section):
    """Quantile clipping: the clip of a round comes from noised estimates of earlier rounds."""

    target_quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of virtual clients whose update should lie below the clip."""
    learning_rate: PositiveFloat = 0.2
    """Geometric step of the estimate."""
    count_noise_multiplier: PositiveFloat = 20.0
    """Standard deviation of the noise on the number of unclipped clients, in clients."""


class GroupPoissonGaussianConfig(_Noised):
    """Default: whole virtual clients are sampled independently; sensitivity as in dp.md 2.2."""

    kind: Literal["group_poisson_gaussian"]
    sampling_probability: Probability
    """Chance (q) of each virtual client in each round."""
    adaptive_clip: AdaptiveClipConfig | None = None
    """Null: the clip is `l2_norm_clip` in every round; else that is where it starts."""


class UserPoissonConfig(_Noised):
    """Users are sampled, then assigned to clients_per_round groups; priced at 2C."""

    kind: Literal["user_poisson"]
    sampling_probability: Probability
    """Chance (q) of each user in each round."""
    clients_per_round: PositiveInt
    """Groups (K) the sampled users are hashed into; the normaliser."""
    adaptive_clip: AdaptiveClipConfig | None = None
    """Null: the clip is `l2_norm_clip` in every round; else that is where it starts."""


class FixedSizeConfig(_Noised):
    """The paper's sampler: a fixed number of users without replacement, in groups; priced at 2C."""

    kind: Literal["fixed_size"]
    clients_per_round: PositiveInt
    """Groups (K) per round; the normaliser."""
    users_per_client: PositiveInt
    """Users (M) per group."""
    adaptive_clip: AdaptiveClipConfig | None = None
    """Null: the clip is `l2_norm_clip` in every round; else that is where it starts."""


class TreeAggregationConfig(_Noised):
    """DP-FTRL: noise on the nodes of a binary tree over rounds; bounded participation."""

    kind: Literal["tree_aggregation"]
    clients_per_round: PositiveInt
    """Virtual clients per round; the normaliser."""
    min_separation: PositiveInt
    """Rounds between two participations of one virtual client, at least (difference of indices)."""
    max_participations: PositiveInt
    """Participations of one virtual client in the whole run, at most."""
    restart_every: NonNegativeInt = 0
    """Rounds per tree; 0: one tree for the run."""


class BltConfig(_Noised):
    """Buffered linear Toeplitz noise: correlated, no sampling, bounded participation."""

    kind: Literal["blt"]
    clients_per_round: PositiveInt
    """Virtual clients per round; the normaliser."""
    min_separation: PositiveInt
    """Rounds between two participations of one virtual client, at least (difference of indices)."""
    max_participations: PositiveInt
    """Participations of one virtual client in the whole run, at most."""
    buffers: Annotated[int, Field(ge=1, le=8)] = 2
    """Noise buffers (d)."""


class NotPrivateConfig(_MechanismBase):
    """No noise: a baseline that can never pass the gate."""

    kind: Literal["not_private"]
    sampling_probability: Probability
    """Chance of each virtual client in each round."""


MechanismConfig = Annotated[
    GroupPoissonGaussianConfig
    | UserPoissonConfig
    | FixedSizeConfig
    | TreeAggregationConfig
    | BltConfig
    | NotPrivateConfig,
    Field(discriminator="kind"),
]

TRACKS_PARTICIPATION = ("tree_aggregation", "blt")
"""Mechanisms that bound how often a virtual client takes part, and so need one fixed grouping."""


# ---- policy, evaluation, release --------------------------------------------------------------


class PolicyConfig(Section):
    """The budget this run draws from, and for whom the guarantee must hold."""

    policy_id: Name = "default"
    """Name of the policy in the ledger; caps and keys belong to it."""
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
    off_schedule: Literal["refuse", "renyi"] = "refuse"
    """`planned` only: a run of another plan is refused, or charged by the Renyi filter; the second
    prices each way at half of delta, as which way is taken may depend on earlier models."""
    audit_level: Literal["monitoring", "full"] = "monitoring"
    """What the audit must have shown before a release."""


class EvaluationConfig(Section):
    """Verification and retrieval on identities that never trained."""

    false_accept_rates: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (1e-3, 1e-1)
    """Recall is reported at each of these; the first is the headline."""
    recall_at: tuple[PositiveInt, ...] = (1, 5)
    """Retrieval recall@k."""
    bootstrap_samples: Annotated[int, Field(ge=20, le=10_000)] = 200
    """Resamples over identities for 95 % intervals."""
    batch_size: PositiveInt = 256
    """Images embedded at once."""
    max_images: PositiveInt = 100_000
    """Evaluation images used, in keyed-hash order of identities."""
    centralized_baseline: bool = False
    """Simulation only: also train centrally, and print the utility drop."""
    centralized_epochs: PositiveInt = 15
    """Passes of the centralized baseline."""
    previous_release: str | None = None
    """Bundle of the previous release, for the recall of new queries against the old gallery."""


class AuditConfig(Section):
    """Empirical attack on the model."""

    max_users: Annotated[int, Field(ge=10)] = 2000
    """Training and held-out users compared, each."""
    bootstrap_samples: Annotated[int, Field(ge=20, le=10_000)] = 200
    """Resamples for 95 % intervals."""


class ReleaseConfig(Section):
    """Name under which a model is published."""

    name: Name = "embedding"
    """Folder below the releases."""
    version: Name | None = None
    """Null: the run id."""


class StorageConfig(Section):
    """Roots of the stores; null: below the run directory."""

    public_root: str | None = None
    """Public and noised artifacts; file, gs:// or s3://."""
    private_root: str | None = None
    """Raw artifacts; must not be readable by who reads the pipeline UI."""
    ledger: str | None = None
    """The lasting privacy ledger; null: a ledger of its own for this run directory."""
    keys: str | None = None
    """Key store, apart from the ledger and unversioned."""
    tombstones: str | None = None
    """Keyed tombstones of users who asked to be forgotten; null: nobody did."""
    releases: str | None = None
    """Where bundles are published."""


def _overlap(private: SourceConfig, public: SourceConfig) -> bool:
    """Whether one file serves as both, and no column of `where` keeps its records apart."""
    shared = private.where.keys() & public.where.keys()
    apart = any(set(private.where[name]).isdisjoint(public.where[name]) for name in shared)
    return private.uri == public.uri != "builtin" and not apart


class RunConfig(Section):
    """Everything that decides a run."""

    schema_version: Literal[1] = SCHEMA_VERSION
    """Version of this schema."""
    purpose: Literal["release", "simulation"]
    """`simulation`: shows utility and projected epsilon, can never be released."""
    data: DataConfig
    partition: PartitionConfig
    model: ModelConfig = ModelConfig()
    pretraining: PretrainingConfig = PretrainingConfig()
    training: TrainingConfig = TrainingConfig()
    mechanism: MechanismConfig
    """Sampling, clipping, noise and price: one of the tagged variants, never left out."""
    policy: PolicyConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    audit: AuditConfig = AuditConfig()
    release: ReleaseConfig = ReleaseConfig()
    storage: StorageConfig = StorageConfig()

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        policy, mechanism = self.policy, self.mechanism
        if policy.delta >= 1 / policy.users_lower_bound:
            raise ValueError(
                f"policy.delta={policy.delta:g} must be below 1/users_lower_bound="
                f"{1 / policy.users_lower_bound:g}; lower delta (customary: users_lower_bound**-1.1"
                f" = {policy.users_lower_bound**-1.1:.2g})"
            )
        if self.partition.groupings > 1 and mechanism.kind in TRACKS_PARTICIPATION:
            raise ValueError(
                f"mechanism.kind={mechanism.kind} tracks participation, so partition.groupings must"
                f" be 1, got {self.partition.groupings}; a user would change virtual client"
            )
        clients = getattr(mechanism, "clients_per_round", None)
        if (
            clients
            and mechanism.kind in TRACKS_PARTICIPATION
            and clients > self.partition.virtual_clients
        ):
            raise ValueError(
                f"mechanism.clients_per_round={clients} exceeds partition.virtual_clients="
                f"{self.partition.virtual_clients}; lower it"
            )
        if self.pretraining.source is not None and _overlap(
            self.data.source, self.pretraining.source
        ):
            raise ValueError(
                f"pretraining.source and data.source are both {self.data.source.uri}, so private "
                "images would be taken for public; name a public source, or let a column of `where`"
                " keep them apart"
            )
        if self.purpose == "release":
            if self.training.algorithm == "centralized":
                raise ValueError(
                    "training.algorithm=centralized has no privacy and cannot stand in a release"
                    " run; set purpose: simulation, or algorithm: dp_fedemb"
                )
            if self.evaluation.centralized_baseline:
                raise ValueError(
                    "evaluation.centralized_baseline trains on private images without privacy; it"
                    " needs purpose: simulation"
                )
        return self

    def updated(self, overrides: dict[str, Any]) -> RunConfig:
        """Returns a validated copy with dotted keys replaced, e.g. `{"mechanism.rounds": 3}`.

        Raises:
          pydantic.ValidationError: the result is not a valid configuration.
        """
        tree = self.model_dump(mode="json")
        for dotted, value in overrides.items():
            node = tree
            *parents, leaf = dotted.split(".")
            for parent in parents:
                child = node.get(parent)
                if not isinstance(child, dict):
                    child = node[parent] = {}
                node = child
            node[leaf] = value
        return RunConfig.model_validate(tree)
