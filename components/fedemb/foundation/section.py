"""Settings of a section: strict YAML, and models that reject unknown names."""

# PyYAML ships no types for its parser.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
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
    str, AfterValidator(_without_password), Field(pattern=r"^(mlflow|kubeflow)\+https?://[^\s]+$")
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


_DEEPEST = 64
_LARGEST = 1 << 20
_LONGEST_PROBLEM = 80
"""Characters of the parser's message that are repeated."""
"""Maximum number of characters; the presets have two thousand."""


class NotYaml(ValueError):
    """Error that describes the problem and its location briefly."""


class _WithAliases(yaml.SafeLoader):
    """Safe loader that refuses repeated keys in mappings."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool | None):
                line = key_node.start_mark.line + 1
                raise NotYaml(f"YAML with a key that is not a string at line {line}")
            if key in seen:
                line = key_node.start_mark.line + 1
                raise NotYaml(f"YAML with {str(key)[:60]!r} twice, again at line {line}")
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Loader(_WithAliases):
    """Loader that also refuses aliases."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise NotYaml("YAML with an alias; aliases are not allowed here, write the value out")
        return super().compose_node(parent, index)


def parse_yaml(text: str, *, aliases: bool = False) -> object:
    """Parses YAML text; only the profile of a cluster may have aliases.

    Raises:
      NotYaml: the text is not YAML, has a repeated key or an alias, or is too deep or too long.
    """
    if len(text) > _LARGEST:
        raise NotYaml(f"{len(text)} characters long, at most {_LARGEST}")
    _check_depth(text)
    try:
        return yaml.load(text, _WithAliases if aliases else _Loader)
    except yaml.YAMLError as error:
        raise NotYaml(f"not valid YAML{_place(error)}") from error
    except (ValueError, OverflowError) as error:  # for example an incomplete date
        if isinstance(error, NotYaml):
            raise
        raise NotYaml("YAML with an invalid value") from error


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return ""
    problem = str(getattr(error, "problem", None) or "invalid")[:_LONGEST_PROBLEM]
    return f" (line {mark.line + 1}, column {mark.column + 1}: {problem})"


def _check_depth(text: str) -> None:
    """Refuses deep nesting, token by token, before the parser runs out of stack."""
    depth = 0
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > _DEEPEST:
                raise NotYaml(f"YAML nested more than {_DEEPEST} deep")
    except yaml.YAMLError:
        return  # reported by the full parser
