"""Sampling, clipping and noise: one tagged variant per mechanism."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from fedemb.config.section import Probability, Section


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
