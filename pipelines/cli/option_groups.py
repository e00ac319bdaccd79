"""Groups of command-line options that travel through the code as one frozen dataclass."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command whose dataclass parameters are replaced by one option per field.

    Fields are declared as options of Typer: `Annotated[type, typer.Option(...)]` with a default.

    Args:
      command: function with keyword parameters; those annotated with a dataclass are groups.

    Raises:
      TypeError: two groups, or a group and the command, declare the same option.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    options: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            groups[name] = hint
            options += _options(hint)
        else:
            options.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
    names = [option.name for option in options]
    if twice := {name for name in names if names.count(name) > 1}:
        raise TypeError(f"{command.__name__} declares {', '.join(sorted(twice))} twice")

    @functools.wraps(command)
    def call(**values: Any) -> None:
        made = {
            name: group(**{field.name: values.pop(field.name) for field in _fields(group)})
            for name, group in groups.items()
        }
        command(**made, **values)

    call.__signature__ = inspect.Signature(options)  # pyright: ignore[reportAttributeAccessIssue]
    call.__annotations__ = {option.name: option.annotation for option in options}
    return call


def _fields(group: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(group)


def _options(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty
            if field.default is dataclasses.MISSING
            else field.default,
            annotation=hints[field.name],
        )
        for field in _fields(group)
    ]
