"""Finds the section of a mechanism by its `kind`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import PydanticKnownError, core_schema

from fedemb.config.data import DataConfig, EvaluationByHash, PartitionConfig, SourceConfig
from fedemb.config.policy import (
    AuditConfig,
    EvaluationConfig,
    PolicyConfig,
    ReleaseConfig,
    StorageConfig,
    TuningConfig,
)
from fedemb.config.training import ModelConfig, PretrainingConfig, TrainingConfig
from fedemb.foundation.canonical_json import json_digest
from fedemb.foundation.section import Section
from fedemb.privacy.registry import MECHANISMS
from fedemb.privacy.section import MechanismConfig, PublicNumbers


def mechanism_sections() -> dict[str, type[MechanismConfig]]:
    """Returns the sections of all registered mechanisms by `kind`."""
    return {kind: mechanism.section for kind, mechanism in MECHANISMS.items()}


class _OfRegisteredKind:
    """Validates a section by its `kind`; the schema is the union of all registered sections."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(
            _section,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda section, info: section.model_dump(mode=info.mode), info_arg=True
            ),
        )

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        sections = mechanism_sections().items()
        choices = {kind: section.__pydantic_core_schema__ for kind, section in sections}
        union = handler(core_schema.tagged_union_schema(choices, discriminator="kind"))
        return {**union, "required": ["kind"]}  # in a file only `kind` identifies the class


def _section(value: Any, info: core_schema.ValidationInfo) -> MechanismConfig:
    sections = mechanism_sections()
    if isinstance(value, Mapping):
        kind = cast("Mapping[str, object]", value).get("kind")
    else:
        kind = getattr(value, "kind", None)
    if kind is None:
        raise PydanticKnownError("union_tag_not_found", {"discriminator": "'kind'"})
    if not isinstance(kind, str) or kind not in sections:
        expected = ", ".join(map(repr, sections))
        raise PydanticKnownError(
            "union_tag_invalid",
            {"discriminator": "'kind'", "tag": str(kind)[:60], "expected_tags": expected},
        )
    return sections[kind].model_validate(value, context=info.context)


AnyMechanism = Annotated[MechanismConfig, _OfRegisteredKind()]
"""Section of any registered mechanism."""

FREE_SECTIONS = ("evaluation", "audit", "release", "storage")
"""Sections that may change after training is charged: evaluation settings and output locations. A
reservation binds every other section, including sections added later."""

_LEAST_LISTED = 4
_CALLED = {"embedding": "embedding", "classification": "classifier"}


def _overlap(private: SourceConfig, public: SourceConfig) -> bool:
    """Returns whether both sources read one file without a `where` column that separates them."""
    shared = private.where.keys() & public.where.keys()
    apart = any(set(private.where[name]).isdisjoint(public.where[name]) for name in shared)
    return private.uri == public.uri != "builtin" and not apart


class BackboneConfig(Section):
    """The part of a configuration that determines the public backbone.

    `pretrain_public` receives only this section, so its cached result depends on nothing else.
    """

    model: ModelConfig
    pretraining: PretrainingConfig
    seed: int
    """Seed of initial weights, shuffles and augmentation."""


class RunConfig(Section):
    """All settings of a run."""

    purpose: Literal["release", "simulation"]
    """Purpose of the run. `release`: a model that may be released; `simulation`: utility and
    projected epsilon only, never released."""
    task: Literal["embedding", "classification"] = "embedding"
    """Output of the model. `embedding`: embeddings of identities that are not listed in advance;
    `classification`: one of the classes in `model.classes`."""
    data: DataConfig
    partition: PartitionConfig
    model: ModelConfig = ModelConfig()
    pretraining: PretrainingConfig = PretrainingConfig()
    training: TrainingConfig = TrainingConfig()
    mechanism: AnyMechanism
    """Mechanism: sampling, clipping, noise and price. Required; one of the variants by `kind`."""
    policy: PolicyConfig
    tuning: TuningConfig = TuningConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    audit: AuditConfig = AuditConfig()
    release: ReleaseConfig = ReleaseConfig()
    storage: StorageConfig = StorageConfig()

    @property
    def public_numbers(self) -> PublicNumbers:
        """Public numbers that the mechanism reads from other sections."""
        return PublicNumbers(
            virtual_clients=self.partition.virtual_clients,
            groupings=self.partition.groupings,
            users_lower_bound=self.policy.users_lower_bound,
            max_images_per_user=self.partition.max_images_per_user,
            unit=self.policy.unit,
            task=self.task,
            trainable=self.model.trainable,
            images_per_unit=self.training.unit_gradient.images_per_unit,
        )

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        policy = self.policy
        if policy.delta >= 1 / policy.users_lower_bound:
            raise ValueError(
                f"policy.delta={policy.delta:g} must be below 1/users_lower_bound="
                f"{1 / policy.users_lower_bound:g}; lower delta (customary: users_lower_bound**-1.1"
                f" = {policy.users_lower_bound**-1.1:.2g})"
            )
        if (policy.unit == "image") != (self.data.source.columns.user_id is None):
            raise ValueError(
                f"policy.unit={policy.unit} does not match "
                f"data.source.columns.user_id={self.data.source.columns.user_id}. Set user_id: "
                "null with unit: image, or name the column of users with unit: user."
            )
        self.mechanism.check_run(self.public_numbers)
        if self.evaluation.resample_subgroups and (
            self.data.source.columns.subgroup is None or self.task == "classification"
        ):
            raise ValueError(
                "evaluation.resample_subgroups draws the subgroups of an embedding's evaluation "
                "people; name data.source.columns.subgroup, or set it to false"
            )
        if self.pretraining.source is not None and _overlap(
            self.data.source, self.pretraining.source
        ):
            raise ValueError(
                f"pretraining.source and data.source are both {self.data.source.uri}, so private "
                "images would be taken for public; name a public source, or let a column of `where`"
                " keep them apart"
            )
        self._check_task()
        self._check_features()
        self._check_covariance()
        self._check_held_out_classes()
        if self.purpose == "release":
            if self.tuning.data == "undeclared":
                raise ValueError(
                    "tuning.data is not set, but a release declares how its hyperparameters were "
                    "chosen. Set tuning.data to public, or to private with tuning.private_runs, "
                    "and describe the choice in tuning.method."
                )
            if not self.mechanism.private:
                raise ValueError(
                    "mechanism.noise_multiplier=0 has no privacy and is not allowed in a release "
                    "run. Set purpose: simulation, or add noise."
                )
            if self.evaluation.centralized_baseline:
                raise ValueError(
                    "evaluation.centralized_baseline trains on private images without "
                    "privacy. Set purpose: simulation, or drop the baseline."
                )
        return self

    def backbone_config(self) -> BackboneConfig:
        """Returns the settings that public pretraining depends on."""
        return BackboneConfig(
            model=self.model, pretraining=self.pretraining, seed=self.training.seed
        )

    def released_as(self, run_id: str) -> tuple[str, str]:
        """Returns the name and version under which a run is published."""
        return self.release_name, self.release.version or run_id

    @property
    def release_name(self) -> str:
        """Returns the name of the released model."""
        return self.release.name or _CALLED[self.task]

    def _check_features(self) -> None:
        """Checks the settings of an imported backbone's features and of embeddings that keep them.

        Raises:
          ValueError: a setting has no effect, or has no public images to take constants from.
        """
        model, start = self.model, self.pretraining
        imported = {
            "model.taps": model.taps,
            "model.square_root": model.square_root,
            "model.principal_directions": model.principal_directions,
        }
        used = [name for name, value in imported.items() if value]
        if used and start.kind != "import":
            raise ValueError(
                f"{used[0]} applies to an imported backbone, and pretraining.kind is {start.kind}. "
                f"Set pretraining.kind: import, or remove {used[0]}"
            )
        if model.principal_directions and model.whitened_directions:
            raise ValueError(
                "model.principal_directions and model.whitened_directions exclude each other. Set "
                "one of them to 0"
            )
        if start.source is None and (model.principal_directions or model.square_root):
            raise ValueError(
                f"{used[-1]} takes constants from public images, and pretraining.source is missing."
                " Name public images in pretraining.source"
            )
        kept = model.principal_directions
        if kept and model.trainable != "projection" and model.embedding_dim != kept:
            raise ValueError(
                f"model.embedding_dim={model.embedding_dim} differs from "
                f"model.principal_directions={kept}, but no projection follows the directions. "
                f"Set embedding_dim: {kept}"
            )
        if model.keep_public_features and (
            model.trainable != "projection" or self.task != "embedding"
        ):
            raise ValueError(
                f"model.keep_public_features={model.keep_public_features:g} keeps the features that"
                f" a projection reads, got task={self.task} and model.trainable={model.trainable}. "
                "Set trainable: projection, or keep_public_features: 0"
            )

    def _check_covariance(self) -> None:
        """Checks that a projection that is solved has a form that can be solved.

        Raises:
          ValueError: algorithm and mechanism contradict each other, or the projection has another
            form.
        """
        model, algorithm = self.model, self.training.algorithm
        solves = self.mechanism.solves
        if solves != (algorithm == "dp_covariance"):
            raise ValueError(
                f"training.algorithm={algorithm} contradicts mechanism.kind={self.mechanism.kind}. "
                "Set training.algorithm: dp_covariance and mechanism.kind: covariance, or neither"
            )
        if not solves:
            return
        if not model.projection:
            raise ValueError(
                "training.algorithm=dp_covariance solves for the projection. Set "
                "model.projection: true"
            )
        kept = model.principal_directions
        if kept and model.embedding_dim != kept:
            raise ValueError(
                f"model.embedding_dim={model.embedding_dim} differs from "
                f"model.principal_directions={kept}, and dp_covariance keeps all directions. Set "
                f"embedding_dim: {kept}"
            )

    def _check_task(self) -> None:
        classes, algorithm = self.model.classes, self.training.algorithm
        classifies = self.task == "classification"
        if classifies != bool(classes) or classifies != (algorithm == "dp_sgd"):
            raise ValueError(
                f"task={self.task} with {len(classes)} model.classes and training.algorithm="
                f"{algorithm}: a classifier has a public list of classes and trains with dp_sgd, "
                "an embedding has neither; set all three"
            )
        if not classifies:
            return
        if len(set(classes)) != len(classes) or len(classes) < 2:
            raise ValueError(
                f"model.classes lists {len(classes)} classes, {len(set(classes))} of them distinct;"
                " list at least two, each once"
            )
        if self.data.source.columns.label is None or self.data.source.label_scope != "global":
            raise ValueError(
                "task=classification needs labels that mean the same for every user; set "
                "data.source.columns.label and data.source.label_scope: global"
            )
        unit = self.training.unit_gradient
        if unit.crop_padding >= self.model.image_size:
            raise ValueError(
                f"training.unit_gradient.crop_padding={unit.crop_padding} must be below "
                f"model.image_size={self.model.image_size}; lower it"
            )
        most = 1 if self.policy.unit == "image" else self.partition.max_images_per_user
        if unit.images_per_unit > most:
            raise ValueError(
                f"training.unit_gradient.images_per_unit={unit.images_per_unit} exceeds the {most} "
                f"that one {self.policy.unit} can have (partition.max_images_per_user, or one with "
                "policy.unit: image); lower it"
            )
        if unit.microbatch > self.policy.users_lower_bound:
            raise ValueError(
                f"training.unit_gradient.microbatch={unit.microbatch} exceeds "
                f"policy.users_lower_bound={self.policy.users_lower_bound}, so it would never be "
                "full; lower it"
            )
        if self.model.trainable == "head" and (unit.views > 1 or unit.flip or unit.crop_padding):
            raise ValueError(
                "model.trainable=head computes the features of an image once, without views"
                " of it; set training.unit_gradient.views: 1, flip: false and crop_padding: 0"
            )

    def _check_held_out_classes(self) -> None:
        evaluation = self.partition.evaluation
        listed = evaluation.classes if isinstance(evaluation, EvaluationByHash) else ()
        if not listed:
            return
        source = self.data.source
        if self.task != "embedding" or source.columns.label is None or source.label_scope == "user":
            raise ValueError(
                "partition.evaluation.classes holds out classes that users share, which takes "
                f"task: embedding, columns.label and label_scope: global, got task={self.task}, "
                f"columns.label={source.columns.label} and label_scope={source.label_scope}; leave "
                "it out"
            )
        if len(set(listed)) != len(listed) or len(listed) < _LEAST_LISTED:
            raise ValueError(
                f"partition.evaluation.classes lists {len(listed)} classes, {len(set(listed))} of "
                f"them distinct; list at least {_LEAST_LISTED}, each once: two train, two are held "
                "out"
            )

    def updated(self, overrides: Mapping[str, object]) -> RunConfig:
        """Returns a validated copy with dotted keys replaced, e.g. `{"mechanism.rounds": 3}`.

        Raises:
          pydantic.ValidationError: the result is not a valid configuration.
        """
        tree: dict[str, Any] = self.model_dump(mode="json")
        for dotted, value in overrides.items():
            node = tree
            *parents, leaf = dotted.split(".")
            for parent in parents:
                if not isinstance(node.get(parent), dict):
                    node[parent] = {}
                node = node[parent]
            node[leaf] = copy.deepcopy(value)  # a later key may change it
        return type(self).model_validate(tree)


def config_digest(config: RunConfig, *free: str) -> str:
    """Returns the SHA-256 of the configuration sections that a reservation binds (`config_sha`).

    Args:
      config: the configuration.
      *free: names of free sections to bind as well. A utility report binds `evaluation` and an
        audit report binds `audit`, so a report made with other settings has another digest.
    """
    left_out = {name for name in FREE_SECTIONS if name not in free}
    return json_digest(config.model_dump(mode="json", exclude=left_out))
