"""Finds the section of a mechanism by its `kind`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticKnownError, core_schema

from fedemb.privacy.mechanisms.registry import MECHANISMS
from fedemb.privacy.mechanisms.section import MechanismConfig


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
