"""What every mechanism's section holds, and how a configuration finds the section of a `kind`.

A mechanism is told once, in its module below `privacy/mechanisms/`: its section too. The registry
there is asked when a configuration is checked, not when this module is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, PositiveFloat, PositiveInt
from pydantic_core import PydanticKnownError, core_schema

from fedemb.config.section import Section

if TYPE_CHECKING:
    from fedemb.config.run import RunConfig


MOST_NOISE = 1e6
"""The largest noise multiplier, for plans and for whoever searches one."""


class MechanismConfig(Section):
    """What is common to the sections of all mechanisms."""

    private: ClassVar[bool] = True
    """Whether there is any guarantee."""
    tracks_participation: ClassVar[bool] = False
    """Whether noise is correlated over rounds, so that the guarantee rests on how often a virtual
    client takes part."""

    samples_units: ClassVar[bool] = False
    """Whether each unit has its own coin and contribution, so that a unit may be an image."""

    samples_images: ClassVar[bool] = False
    """Whether a user's images are sampled one by one, each with a coin and a record of its own."""

    solves_head: ClassVar[bool] = False
    """Whether the only round gives second moments, from which a head is solved."""

    kind: Any
    """Name of the mechanism; each section narrows it to its own."""
    rounds: PositiveInt
    """Training rounds (T)."""
    l2_norm_clip: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Bound (C) on the L2 norm of a virtual client's update, all released variables together."""

    @classmethod
    def kind_name(cls) -> str:
        """The `kind` of this class."""
        return cls.model_fields["kind"].default

    def check_run(self, config: RunConfig) -> None:
        """Refuses a run whose other sections contradict this one.

        Raises:
          ValueError: with the sentence to show.
        """
        if config.policy.unit == "image" and not self.samples_units:
            raise ValueError(
                f"mechanism.kind={self.kind} groups what it samples, so policy.unit=image has no "
                "price under it; name a mechanism that samples units alone, or unit: user"
            )


class NoisedConfig(MechanismConfig):
    """A mechanism that adds noise."""

    noise_multiplier: Annotated[float, Field(ge=1e-3, le=MOST_NOISE)]
    """Standard deviation of the noise on the SUM of updates / l2_norm_clip (sigma)."""


class AdaptiveClipConfig(Section):
    """Quantile clipping: the clip of a round comes from noised estimates of earlier rounds."""

    target_quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of virtual clients whose update should lie below the clip."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.2
    """Geometric step of the estimate."""
    count_noise_multiplier: PositiveFloat = 20.0
    """Standard deviation of the noise on the number of unclipped clients, in clients."""


def mechanism_sections() -> dict[str, type[MechanismConfig]]:
    """The sections of all registered mechanisms by `kind`."""
    from fedemb.privacy.mechanisms.registry import MECHANISMS

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
        return {**union, "required": ["kind"]}  # in Python the class says it, in a file only this


def _section(value: Any, info: core_schema.ValidationInfo) -> MechanismConfig:
    sections = mechanism_sections()
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
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
"""The section of any registered mechanism."""
