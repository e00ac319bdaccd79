"""Private training on arrays in memory: to study the cost of privacy, never to release a model.

Mechanism, noise, sampler, clipping, round function, loop and server step are those of the pipeline.
A simulation lacks the requirements of a release: a ledger that charges the budget, secret keys in a
store, the evidence and the gate. Its guarantee is therefore labeled as a simulation.
"""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import numpy as np
from jaxtyping import Float32, Int, UInt8
from pydantic import Field, PositiveInt

from fedemb.config import AnyMechanism, ModelConfig, RunConfig, Section, TrainingConfig
from fedemb.data.builtin import ArrayUsers, check_images
from fedemb.errors import ConfigError
from fedemb.evaluation.metrics import recall
from fedemb.evaluation.pairs import Estimate
from fedemb.foundation.canonical_json import json_digest
from fedemb.keys import derive
from fedemb.models.keras_backend import Model, use_backend
from fedemb.privacy.guarantee import PrivacyGuarantee
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.planning import guarantee, plan
from fedemb.training.rounds import Round

if TYPE_CHECKING:
    from fedemb.privacy.running import Mechanism
    from fedemb.privacy.sampling import VirtualClient
    from fedemb.training.rounds import ClientExamples
    from fedemb.training.server import ServerState

RUN_ID = "simulation"
UNCOVERED = {
    "dp_fedemb": "",
    "dp_fedavg": "the list of all classes, which its head needs, is not covered; ",
}
"""Algorithms that can be simulated, and the values each one uses from private data without
noise."""


@dataclass(frozen=True, kw_only=True)
class SimulatedGuarantee(PrivacyGuarantee):
    """The guarantee of the same mechanism in a pipeline, labeled as a simulation."""

    key_injected: bool = False
    """Whether coins and noise were drawn from an injected key."""
    uncovered: str = ""
    """Values that the algorithm uses from private data without noise."""

    def __str__(self) -> str:
        """Returns the guarantee as one sentence."""
        known = "; the key was passed in, and anyone with the key can remove the noise"
        return (
            f"simulation, not to be released: {self.uncovered}{super().__str__()}"
            f"{known if self.key_injected else ''}"
        )


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """A trained model with its plan and guarantee."""

    model: Model
    """`keras.Model`: float32 images in [-1, 1] to embeddings, not normalised."""
    plan: MechanismPlan
    """Sampler, clipping norm, noise and privacy loss."""
    delta: float
    """Delta of the guarantee."""
    key_injected: bool
    """Whether the training drew coins and noise from an injected key."""
    uncovered: str
    """Values that the algorithm uses from private data without noise."""

    @cached_property
    def guarantee(self) -> SimulatedGuarantee:
        """Epsilon and delta for one user with all of their data; computed on access."""
        priced = guarantee(self.plan, self.delta)
        return SimulatedGuarantee(
            **vars(priced), key_injected=self.key_injected, uncovered=self.uncovered
        )

    def embed(
        self, images: UInt8[np.ndarray, "images size size channels"]
    ) -> Float32[np.ndarray, "images dim"]:
        """Returns embeddings of unit length."""
        from fedemb.models.inference import embed

        _, size, _, channels = self.model.input_shape
        check_images(images, size, channels)
        return embed(self.model, images)

    def recall(
        self,
        images: UInt8[np.ndarray, "images size size channels"],
        labels: Int[np.ndarray, " images"],
        *,
        false_accept_rate: float = 1e-3,
    ) -> Estimate:
        """Returns the recall of same-class pairs at the threshold with a given false accept rate.

        Args:
          images: images of people or classes that were not trained on.
          labels: classes of the images.
          false_accept_rate: share of different-class pairs above the threshold, in (0, 1).

        Raises:
          InputError: the images do not fit the model, or one kind of pair is missing.
        """
        return recall(self.embed(images), labels, false_accept_rate)


class Simulation(Section):
    """A private training that runs on arrays.

    >>> import numpy as np
    >>> from fedemb import GroupPoissonGaussianConfig, ModelConfig
    >>> random = np.random.default_rng(0)
    >>> images = random.integers(0, 256, (60, 12, 12, 1), np.uint8)  # of 20 people
    >>> people = np.arange(60) // 3
    >>> simulation = Simulation(
    ...     model=ModelConfig(backbone="tiny", image_size=12, embedding_dim=8),
    ...     mechanism=GroupPoissonGaussianConfig(
    ...         rounds=2, sampling_probability=0.5, noise_multiplier=5.0),
    ...     virtual_clients=4)
    >>> result = simulation.train(images, labels=people, users=people)
    >>> result.embed(images[:5]).shape
    (5, 8)
    >>> print(result.guarantee)  # doctest: +ELLIPSIS
    simulation, not to be released: (..., 0.037...)-differential privacy for one user ...
    """

    mechanism: AnyMechanism
    """Sampling, clipping, noise and rounds; required, because privacy has no default."""
    virtual_clients: PositiveInt
    """Number of virtual clients per grouping, a constant that must not depend on the users; about
    one per 32 users works well."""
    groupings: PositiveInt = 1
    """Number of independent groupings."""
    model: ModelConfig = ModelConfig()
    """The backbone."""
    training: TrainingConfig = TrainingConfig()
    """Local training and server; `parallel_clients` virtual clients train in parallel."""
    population: PositiveInt | None = None
    """Public lower bound on the number of users; None uses their actual number as if it were
    public."""
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Delta of the guarantee; None uses population ** -1.1."""

    @classmethod
    def of(cls, config: RunConfig) -> Simulation:
        """Returns the simulation of a run's mechanism, partition, model and training."""
        return cls(
            mechanism=config.mechanism,
            virtual_clients=config.partition.virtual_clients,
            groupings=config.partition.groupings,
            model=config.model,
            training=config.training,
            population=config.policy.users_lower_bound,
            delta=config.policy.delta,
        )

    def train(
        self,
        images: UInt8[np.ndarray, "images size size channels"],
        labels: Int[np.ndarray, " images"],
        users: np.ndarray,
        *,
        start: Model | None = None,
        root_key: bytes | None = None,
        on_round: Callable[[Round[None]], None] | None = None,
    ) -> SimulationResult:
        """Trains a model.

        Args:
          images: private images, of the model's image size.
          labels: classes `[images]`, any integers.
          users: owners `[images]`, the privacy unit: numbers or text.
          start: a backbone trained on public images, from `build_backbone`; None creates a new one.
          root_key: 32 bytes that seed groups, coins and noise, for a bit-exact repeatable training;
              the result records that it was set. None draws them from the system.
          on_round: called after each round with its un-noised diagnostics.

        Returns:
          The trained model, its guarantee and its measures.

        Raises:
          InputError: the arrays do not match each other or the model.
          ConfigError: the mechanism cannot run on these virtual clients, `start` is another
              network, or the algorithm has no simulation.
        """
        training, model = self.training, self.model
        if training.algorithm not in UNCOVERED:
            raise ConfigError(
                f"training.algorithm={training.algorithm} has no simulation. Set one of "
                f"{', '.join(UNCOVERED)}, or call train_centralized for a baseline without rounds."
            )
        check_images(np.asarray(images), model.image_size, model.channels)
        key = secrets.token_bytes(32) if root_key is None else root_key
        people = ArrayUsers(
            images,
            labels,
            users,
            virtual_clients=self.virtual_clients,
            groupings=self.groupings,
            key=derive(key, "partition"),
        )
        return self._trained(
            people, key, start=start, injected=root_key is not None, on_round=on_round
        )

    def _trained(
        self,
        people: ArrayUsers,
        key: bytes,
        *,
        start: Model | None,
        injected: bool,
        on_round: Callable[[Round[None]], None] | None,
    ) -> SimulationResult:
        """Plans the mechanism, trains on the users and returns the result."""
        from fedemb.models.backbones import build_backbone, trainable_variables
        from fedemb.models.keras_backend import configure_threads
        from fedemb.models.layers import plain_form
        from fedemb.models.public_features import with_public_features
        from fedemb.privacy.running import build_mechanism
        from fedemb.training.rounds import assign_weights
        from fedemb.training.server import released_weights

        training, model = self.training, self.model
        population = self.population or people.user_count
        planned = plan(
            self.mechanism,
            virtual_clients=self.virtual_clients,
            groupings=self.groupings,
            population=population,
        )
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        use_backend(training.backend)
        on_jax = training.backend == "jax"
        # Before TensorFlow starts, which fixes its threads.
        workers = 1 if on_jax else configure_threads(training.parallel_clients)
        mechanism = build_mechanism(planned, key, RUN_ID, 1, json_digest({}))
        backbone = build_backbone(model, training.seed)
        if start is not None:
            weights = start.get_weights()
            if [one.shape for one in weights] != [one.shape for one in backbone.get_weights()]:
                raise ConfigError(
                    f"start={start.name} is not the network of model.backbone={model.backbone}. "
                    "Pass a model of fedemb.build_backbone; to import your own Keras network, use "
                    "the pipeline with pretraining.kind=import."
                )
            backbone.set_weights(weights)
        state = self._rounds(backbone, mechanism, people, workers=workers, on_round=on_round)
        variables = trainable_variables(backbone, model.trainable)
        assign_weights(variables, released_weights(training.server, state))
        return SimulationResult(
            model=with_public_features(plain_form(backbone), model.keep_public_features),
            plan=planned,
            delta=population**-1.1 if self.delta is None else self.delta,
            key_injected=injected,
            uncovered=UNCOVERED[training.algorithm],
        )

    def _rounds(
        self,
        backbone: Model,
        mechanism: Mechanism,
        people: ArrayUsers,
        *,
        workers: int,
        on_round: Callable[[Round[None]], None] | None,
    ) -> ServerState:
        """Runs all rounds and returns the state after the last one."""
        from fedemb.training.backend_rounds import build_rounds
        from fedemb.training.feature_cache import FeatureCache, FrozenFeatures, plain_rows
        from fedemb.training.rounds import ClientExamples, Feed, run_rounds
        from fedemb.training.server import initial_state

        training = self.training
        shared, most = training.algorithm == "dp_fedavg", training.local.max_examples_per_client

        def load(client: VirtualClient) -> ClientExamples:
            images, labels = people.examples(client.users, most)
            rows = np.searchsorted(people.classes, labels) if shared else labels
            return ClientExamples(client.grouping, client.group, images, rows)

        function, trunk = build_rounds(
            backbone,
            mechanism,
            self.model,
            training,
            workers=workers,
            shared_head_rows=len(people.classes) if shared else 0,
        )
        if trunk is not None:
            load = FrozenFeatures(FeatureCache(trunk, rows=plain_rows), load, most).load
        state = initial_state(function.initial_weights())
        with Feed(function, mechanism, first=0, index=people, load=load) as feed:
            for done in run_rounds(function, mechanism, training.server, state, feed):
                state = done.state
                if on_round is not None:
                    on_round(done)
        return state
