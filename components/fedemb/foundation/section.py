"""Base class and field types of configuration sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fedemb.foundation.addresses import WITHOUT, credentials_in, redacted

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Probability = Annotated[float, Field(gt=0.0, le=1.0)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$")]
"""Lower-case letters, digits, dot, dash, underscore; at most 64 characters: safe in paths."""


CREDENTIALS = "credentials"
"""Type of the error whose input must not be shown."""


def _without_credentials(address: str) -> str:
    if problem := credentials_in(address):
        why = {"why": problem, "remedy": WITHOUT}
        raise PydanticCustomError(CREDENTIALS, "{why}. {remedy}", why)
    return address


def _without_password(address: str) -> str:
    if redacted(address) != address:
        raise PydanticCustomError(
            CREDENTIALS, "contains a user or a password. Pass credentials in the environment."
        )
    return address


WebAddress = Annotated[
    str,
    AfterValidator(_without_password),
    Field(pattern=r"^((mlflow|kubeflow)\+)?https?://[^\s]+$"),
]
"""Address of a registry; refused if it contains credentials, like an `Address`."""
Address = Annotated[str, AfterValidator(_without_credentials)]
"""Path, or address of a store; refused if it contains credentials, which every copy of the
configuration would then contain."""


_AS_WRITTEN = "as_written"
"""Key of the validation context: settings missing in the file are not written out."""


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no NaN or infinity.

    All settings are written out, including defaults. A setting that an older version did not have
    is read as its default, and is omitted when the section is written again. So the digest that a
    reservation binds stays the same when a later version adds a setting. The default of a new
    setting must be the previous behaviour and must never change. (The settings of a mechanism are
    also in its plan, which has a separate version.)
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,  # an address may hold a password
    )

    renamed: ClassVar[Mapping[str, str]] = {}
    """Former name -> name of a setting. Files with the former name stay readable. A section that a
    run wrote keeps the former name, so that its digest stays the same."""

    @classmethod
    def as_written(cls, tree: object) -> Self:
        """Returns the section that a run wrote, possibly with an older version.

        Args:
          tree: JSON of a complete section, not the partial settings of a user's file.

        Raises:
          pydantic.ValidationError: the JSON is not a valid section.
        """
        return cls.model_validate(tree, context={_AS_WRITTEN: True})

    @model_validator(mode="wrap")
    @classmethod
    def _complete(
        cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        former = cls._former_names(value)
        section = handler(_with_current_names(value, former) if former else value)
        context = cast("Mapping[str, bool] | None", info.context)
        if context and context.get(_AS_WRITTEN):
            section.model_fields_set.difference_update(former.values())
            section.model_fields_set.update(former)
        elif section is not value:  # an existing section that is passed through stays as read
            section.model_fields_set.update(cls.model_fields)
        return section

    @classmethod
    def _former_names(cls, value: Any) -> dict[str, str]:
        return {
            old: new for old, new in cls.renamed.items() if isinstance(value, dict) and old in value
        }

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        known, written = self.model_fields_set, handler(self)
        former = {old: written[new] for old, new in self.renamed.items() if old in known}
        return {**{name: value for name, value in written.items() if name in known}, **former}


def _with_current_names(value: Any, former: Mapping[str, str]) -> dict[str, Any]:
    fields = dict(cast("dict[str, Any]", value))
    for old, new in former.items():
        setting = fields.pop(old)
        if setting is not None and fields.get(new, setting) not in (None, setting):
            raise ValueError(f"{old} is the former name of {new}; set only {new}")
        fields[new] = fields.get(new) if setting is None else setting
    return fields
