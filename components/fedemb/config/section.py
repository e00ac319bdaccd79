"""What every section of the configuration is made of."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Probability = Annotated[float, Field(gt=0.0, le=1.0)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$")]
"""Lower-case letters, digits, dot, dash, underscore; at most 64: safe in paths and stores."""


CREDENTIALS = "credentials"
"""Type of the error whose input is not to be shown."""


def _without_credentials(address: str) -> str:
    if "://" in address and not address.startswith("file:"):
        place = urlsplit(address, allow_fragments=False).netloc
        if "@" in place or ":" in place:
            raise PydanticCustomError(
                CREDENTIALS,
                "holds a user, a password or a port; give scheme://bucket/prefix, and the "
                "credentials to the environment",
            )
    return address


def _without_password(address: str) -> str:
    if "@" in urlsplit(address, allow_fragments=False).netloc:
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


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
