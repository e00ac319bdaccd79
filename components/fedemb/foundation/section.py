"""Base class and field types of configuration sections."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
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
    Field(pattern=r"^(mlflow|kubeflow)\+https?://[^\s]+$"),
]
"""Address of a registry; refused if it contains credentials, like an `Address`."""
Address = Annotated[str, AfterValidator(_without_credentials)]
"""Path, or address of a store; refused if it contains credentials, which every copy of the
configuration would then contain."""


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no NaN or infinity.

    All settings are written out, including defaults, so that a digest covers them.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,  # an address may hold a password
    )
