"""What every section of the configuration is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

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
"""Lower-case letters, digits, dot, dash, underscore; at most 64: safe in paths and stores."""


CREDENTIALS = "credentials"
"""Type of the error whose input is not to be shown."""


def _without_credentials(address: str) -> str:
    if problem := credentials_in(address):
        why = {"why": problem, "remedy": WITHOUT}
        raise PydanticCustomError(CREDENTIALS, "{why}; {remedy}", why)
    return address


def _without_password(address: str) -> str:
    if redacted(address) != address:
        raise PydanticCustomError(
            CREDENTIALS, "holds a user or a password; give them to the environment"
        )
    return address


WebAddress = Annotated[
    str,
    AfterValidator(_without_password),
    Field(pattern=r"^((mlflow|kubeflow)\+)?https?://[^\s]+$"),
]
"""Address of a registry; refused with credentials in it, as an `Address` is."""
Address = Annotated[str, AfterValidator(_without_credentials)]
"""Path, or address of a store; refused with credentials in it, which would stand in every copy of
the configuration."""


_AS_WRITTEN = "as_written"
"""Key of the validation context: do not write settings that the file lacks."""


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no NaN or infinity.

    Every setting is written out, also one that nobody named. One that an older version did not
    know yet stands for its default and is left out again where the section is written: what a
    reservation bound keeps its digest when a later version adds a setting. So the default of a new
    setting is what was done before there was one, and never changes afterwards. (A mechanism's
    settings stand in its plan too, which has a version of its own.)
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,  # an address may hold a password
    )

    @classmethod
    def as_written(cls, tree: Mapping[str, Any]) -> Self:
        """Reads what a run wrote down, perhaps with an older version.

        Args:
          tree: JSON of a whole section, not the few settings of a file that people write.

        Raises:
          pydantic.ValidationError: it is no valid section.
        """
        return cls.model_validate(tree, context={_AS_WRITTEN: True})

    @model_validator(mode="wrap")
    @classmethod
    def _complete(
        cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        section = handler(value)
        # A section that was there before, and is only handed on, stays as it was read.
        if section is not value and not (info.context or {}).get(_AS_WRITTEN):
            section.model_fields_set.update(cls.model_fields)
        return section

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        known = self.model_fields_set
        return {name: value for name, value in handler(self).items() if name in known}
