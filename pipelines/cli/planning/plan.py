"""`fedemb plan`: what a run will cost in privacy, before there is one."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedemb.errors import ConfigError
from fedemb.pipelines.cli.planning.plan_checks import one_or_the_other, refuse_ignored
from fedemb.pipelines.output import say, say_json

if TYPE_CHECKING:
    from fedemb.config import RunConfig


class UnitName(StrEnum):
    """Units of privacy."""

    user = "user"
    image = "image"


class TuningLaw(StrEnum):
    """Laws of the number of trials."""

    logarithmic = "logarithmic"
    geometric = "geometric"
    poisson = "poisson"


def plan(
    context: typer.Context,
    config: Annotated[
        str | None, typer.Option("--config", "-c", help="YAML file or preset; excludes the rest.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a.b=c of --config.")
    ] = None,
    mechanism: Annotated[
        str | None,
        typer.Option(
            metavar="KIND", help="One of `fedemb config describe mechanism`; default: the first."
        ),
    ] = None,
    population: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Users: sets virtual clients and users lower bound where they are not given.",
        ),
    ] = None,
    users_per_client: Annotated[
        int, typer.Option(min=1, help="Users per virtual client, on average.")
    ] = 32,
    clients_per_round: Annotated[
        int | None, typer.Option(min=1, help="Virtual clients per round, expected.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Training rounds.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="Delta; default: users lower bound ** -1.1.")
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise on the sum / clip; or give --target-epsilon.")
    ] = None,
    target_epsilon: Annotated[
        float | None, typer.Option(help="Find the least noise for this epsilon.")
    ] = None,
    virtual_clients: Annotated[
        int | None, typer.Option(min=1, help="Virtual clients per grouping (public constant).")
    ] = None,
    users_lower_bound: Annotated[
        int | None, typer.Option(min=2, help="Public number the users never fall below.")
    ] = None,
    certify_at: Annotated[
        list[int] | None, typer.Option(min=2, help="Project to this population; repeatable.")
    ] = None,
    min_separation: Annotated[
        int | None, typer.Option(min=1, help="Tree, BLT: rounds between participations.")
    ] = None,
    max_participations: Annotated[
        int | None, typer.Option(min=1, help="Tree, BLT: participations of a virtual client.")
    ] = None,
    restart_every: Annotated[int, typer.Option(min=0, help="Tree: rounds per tree; 0: one.")] = 0,
    buffers: Annotated[int, typer.Option(min=1, max=8, help="BLT: noise buffers.")] = 2,
    tuning_trials: Annotated[
        float | None, typer.Option(help="Also price a search with this mean number of trials.")
    ] = None,
    tuning_law: Annotated[
        TuningLaw, typer.Option(help="Law of the number of trials.")
    ] = TuningLaw.logarithmic,
    unit: Annotated[
        UnitName, typer.Option(help="Whose presence is hidden: a user with all images, or one.")
    ] = UnitName.user,
    images_per_user: Annotated[int, typer.Option(min=1, help="Images of a user, at most.")] = 1,
    frontier: Annotated[
        bool,
        typer.Option(
            "--frontier", help="Batch, rounds and noise for --target-epsilon, as table and plots."
        ),
    ] = False,
    units_per_second: Annotated[
        float | None,
        typer.Option(min=1e-3, help="--frontier: units a second your machine trains, for minutes."),
    ] = None,
    simulate_at: Annotated[
        str | None,
        typer.Option(help="Also the run at this share of batch and noise, e.g. 1/16 (TAN)."),
    ] = None,
    extrapolate: Annotated[
        bool, typer.Option("--extrapolate", help="Draw epsilon against users and compute.")
    ] = False,
    figure: Annotated[Path, typer.Option(help="SVG of --extrapolate or --frontier.")] = Path(
        "plan.svg"
    ),
    explain: Annotated[
        bool, typer.Option("--explain", help="Say in plain words what the plan means.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Configuration file to put the planned mechanism into, e.g. its noise; with "
            "--simulate-at the simulation."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
) -> None:
    """Price a run before it starts.

    Give --config, or the numbers: --population, --clients-per-round, --rounds and one of
    --noise-multiplier and --target-epsilon.
    """
    from fedemb.privacy.mechanisms.registry import MECHANISMS

    planned = MECHANISMS.get(mechanism or next(iter(MECHANISMS)))
    if planned is None:
        raise ConfigError(f"--mechanism {mechanism} is unknown; there are {', '.join(MECHANISMS)}")
    numbers = {
        "mechanism": mechanism,
        "population": population,
        "users_per_client": users_per_client,
        "clients_per_round": clients_per_round,
        "rounds": rounds,
        "delta": delta,
        "noise_multiplier": noise_multiplier,
        "virtual_clients": virtual_clients,
        "users_lower_bound": users_lower_bound,
        "certify_at": certify_at or [],
        "min_separation": min_separation,
        "max_participations": max_participations,
        "restart_every": restart_every,
        "buffers": buffers,
        "unit": unit.value,
        "images_per_user": images_per_user,
    }
    one_or_the_other(context, config is not None, numbers)
    if units_per_second is not None and not frontier:
        raise ConfigError("--units-per-second estimates minutes of --frontier; add it or drop this")
    if config is None:
        refuse_ignored(context, planned, drawn=extrapolate or frontier, search=tuning_trials)
    if config is not None:
        from fedemb.pipelines.run.load_config import load_config

        run_config = load_config(config, set_ or [])
        if target_epsilon is not None:
            run_config = calibrated(run_config, target_epsilon)
    else:
        if planned.private and (noise_multiplier is None) == (target_epsilon is None):
            raise ConfigError(
                "give exactly one of --noise-multiplier and --target-epsilon, or --config"
            )
        from fedemb.pipelines.cli.planning.plan_numbers import from_numbers

        run_config = from_numbers(planned, numbers)
        if target_epsilon is not None:
            run_config = calibrated(run_config, target_epsilon)
    if write is not None:
        from fedemb.pipelines.cli.edit_config import write_mechanism

        if config is None:
            raise ConfigError("--write changes a configuration; name one with --config")
        new = not write.exists()
        write_mechanism(write, simulated(run_config, simulate_at) if simulate_at else run_config)
        say(f"wrote {'the new file ' if new else ''}{write}", err=True)
    _report(
        run_config,
        output,
        json_=json_,
        words=explain,
        trials=tuning_trials,
        law=tuning_law.value,
        figure=figure if extrapolate else None,
        frontier=figure if frontier else None,
        units_per_second=units_per_second,
        simulate_at=simulate_at,
        target_epsilon=target_epsilon,
        users_per_client=None if config is not None else users_per_client,
    )


def _report(
    config: RunConfig,
    output: Path | None,
    json_: bool,
    words: bool,
    trials: float | None,
    law: Any,
    figure: Path | None,
    frontier: Path | None,
    units_per_second: float | None,
    simulate_at: str | None,
    target_epsilon: float | None,
    users_per_client: int | None,
) -> None:
    from fedemb.config.adjacency import covers_change_own_data
    from fedemb.foundation.document import written
    from fedemb.foundation.files import write_bytes
    from fedemb.pipelines.cli.planning.plan_text import lines
    from fedemb.privacy.accounting.guarantee import PrivacyGuarantee
    from fedemb.privacy.mechanisms.registry import plan_from_json
    from fedemb.privacy.planning.prices import finite
    from fedemb.privacy.planning.tuning import conditions, price_tuning
    from fedemb.steps.plan_privacy.explain import explain
    from fedemb.steps.plan_privacy.extrapolate import extrapolate
    from fedemb.steps.plan_privacy.plan import document, warnings

    made = written(document(config))
    plan = made.json
    mechanism = plan_from_json(plan["plan"])
    guarantee = PrivacyGuarantee.from_json(plan["guarantee"])
    fields: dict[str, Any] = {
        "mechanism": mechanism.kind,
        "backend": plan["backend"],
        "epsilon": finite(guarantee.epsilon),
        "delta": guarantee.delta,
        "accountant": guarantee.accountant,
        "relation": guarantee.relation.name,
        "epsilon_conservative_2c": plan["epsilon_conservative_2c"],
        "epsilon_rdp": plan["epsilon_rdp"],
        "zcdp_rho": plan["zcdp_rho"],
        "comparisons": [
            {**found, "words": other.words}
            for found, other in zip(plan["comparisons"], mechanism.comparisons(), strict=True)
        ],
        "unit": mechanism.unit,
        "noise_multiplier": mechanism.noise_multiplier,
        "sampling_probability": mechanism.chance,
        "clients_per_round": mechanism.normaliser,
        "rounds": mechanism.rounds,
        "virtual_clients": mechanism.virtual_clients,
        "users_lower_bound": config.policy.users_lower_bound,
        "sentence": str(guarantee),
        "series": _series(config),
        "projections": plan["projections"],
        "warnings": list(warnings(config).values()),
        "plan": output and str(output),
        "plan_sha": mechanism.digest,
    }
    if trials is not None:
        search = price_tuning(mechanism, guarantee.delta, trials, law)
        fields["tuning"] = {
            **search.to_json(),
            "sentence": str(search),
            "conditions": conditions(trials, law),
        }
    if words:
        covers_change = covers_change_own_data(config, mechanism)
        fields["explanation"] = explain(mechanism, guarantee, covers_change)
    if figure is not None:
        fields["extrapolation"] = extrapolate(config, mechanism, figure, users_per_client)
    if frontier is not None:
        from fedemb.steps.plan_privacy.frontier import draw_frontier

        fields["frontier"] = draw_frontier(
            mechanism, guarantee.delta, target_epsilon, frontier, units_per_second
        )
    if simulate_at is not None:
        from fedemb.privacy.planning.frontier import simulation_at

        fields["simulation"] = simulation_at(mechanism, simulate_at)
    if output is not None:
        write_bytes(output, made.data)  # for people: no step takes what nobody signed
    if json_:
        say_json(fields)
        return
    for line in lines(fields, mechanism):
        say(line)


def simulated(config: RunConfig, share: str) -> RunConfig:
    """The configuration with the settings that --simulate-at prints."""
    from fedemb.pipelines.run.load_config import overridden
    from fedemb.privacy.mechanisms.registry import plan_mechanism
    from fedemb.privacy.planning.frontier import simulation_at

    return overridden(config, simulation_at(plan_mechanism(config), share)["settings"])


def calibrated(config: RunConfig, target_epsilon: float) -> RunConfig:
    """The configuration with the least noise for an epsilon."""
    from fedemb.privacy.mechanisms.registry import plan_mechanism
    from fedemb.privacy.planning.calibration import with_target_epsilon

    found = with_target_epsilon(plan_mechanism(config), target_epsilon, config.policy.delta)
    return config.updated({"mechanism.noise_multiplier": found.noise_multiplier})


def _series(config: RunConfig) -> dict[str, Any] | None:
    """What the runs cost together that the policy plans at once; None for one run alone."""
    from fedemb.pipelines.cli.ledger_commands.ledger_summary import planned_series
    from fedemb.privacy.planning.prices import finite

    planned = planned_series(config) if config.policy.planned_runs > 1 else None
    if planned is None:
        return None
    return {"runs": planned[0], "epsilon": finite(planned[1]), "cap": config.policy.epsilon_cap}
