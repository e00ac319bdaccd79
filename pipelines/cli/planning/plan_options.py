"""Options of `plan`: a configuration, or its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer


class UnitName(StrEnum):
    """Units of privacy."""

    user = "user"
    image = "image"


@dataclass(frozen=True, kw_only=True)
class ConfigSource:
    """A configuration file or preset, instead of numbers."""

    config: Annotated[
        str | None,
        typer.Option("--config", "-c", help="YAML file or preset; excludes the numbers."),
    ] = None
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a.b=c of --config; repeatable.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class PlanNumbers:
    """Numbers that a plan can be made from without a configuration."""

    mechanism: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Mechanism, one of `fedemb config describe mechanism`; default: the first.",
        ),
    ] = None
    population: Annotated[
        int | None,
        typer.Option(min=2, help="Number of users; default of the two options derived from it."),
    ] = None
    users_per_client: Annotated[
        int, typer.Option(min=1, help="Mean number of users per virtual client.")
    ] = 32
    clients_per_round: Annotated[
        int | None, typer.Option(min=1, help="Expected virtual clients per round.")
    ] = None
    rounds: Annotated[int | None, typer.Option(min=1, help="Training rounds.")] = None
    delta: Annotated[
        float | None, typer.Option(help="Delta of the guarantee; default: users ** -1.1.")
    ] = None
    noise_multiplier: Annotated[
        float | None,
        typer.Option(help="Standard deviation of the noise / clip; or pass --target-epsilon."),
    ] = None
    target_epsilon: Annotated[
        float | None, typer.Option(help="Epsilon for which the smallest noise is searched.")
    ] = None
    virtual_clients: Annotated[
        int | None, typer.Option(min=1, help="Virtual clients per grouping (public constant).")
    ] = None
    users_lower_bound: Annotated[
        int | None, typer.Option(min=2, help="Public lower bound on the number of users.")
    ] = None
    certify_at: Annotated[
        list[int] | None,
        typer.Option(min=2, help="Population to project the plan to; repeatable."),
    ] = None
    min_separation: Annotated[
        int | None, typer.Option(min=1, help="Tree: rounds between participations.")
    ] = None
    max_participations: Annotated[
        int | None, typer.Option(min=1, help="Tree: participations of a virtual client.")
    ] = None
    restart_every: Annotated[int, typer.Option(min=0, help="Tree: rounds per tree; 0: one.")] = 0
    unit: Annotated[
        UnitName, typer.Option(help="Unit of privacy: a user with all images, or one image.")
    ] = UnitName.user
    images_per_user: Annotated[
        int, typer.Option(min=1, help="Largest number of images of a user.")
    ] = 1
