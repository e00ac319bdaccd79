"""`fedemb plan`: what a run will cost in privacy, before there is one."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.fedemb.errors import ConfigError

if TYPE_CHECKING:
    from components.fedemb.config import RunConfig
    from components.fedemb.privacy.mechanism import MechanismPlan

_UNCAPPED = 1e9
"""Budget of a plan that is not part of a run."""
_USELESS = 20.0
"""Epsilon above which a plan is called what it is."""


class MechanismName(StrEnum):
    """Mechanisms of the configuration."""

    group_poisson_gaussian = "group_poisson_gaussian"
    user_poisson = "user_poisson"
    fixed_size = "fixed_size"
    tree_aggregation = "tree_aggregation"
    blt = "blt"
    not_private = "not_private"


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
        MechanismName, typer.Option(help="Which mechanism.")
    ] = MechanismName.group_poisson_gaussian,
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
    extrapolate: Annotated[
        bool, typer.Option("--extrapolate", help="Draw epsilon against users and compute.")
    ] = False,
    figure: Annotated[Path, typer.Option(help="SVG of --extrapolate.")] = Path("extrapolation.svg"),
    explain: Annotated[
        bool, typer.Option("--explain", help="Say in plain words what the plan means.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    output: Annotated[Path, typer.Option(help="Plan file to write.")] = Path("privacy_plan.json"),
) -> None:
    """Price a run before it starts, and write its privacy plan.

    Give --config, or the numbers: --population, --clients-per-round, --rounds and one of
    --noise-multiplier and --target-epsilon.
    """
    numbers = {
        "mechanism": mechanism.value,
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
    }
    _one_or_the_other(context, config is not None, numbers)
    if config is not None:
        from pipelines.load_config import load_config

        run_config = load_config(config, set_ or [])
        if target_epsilon is not None:
            run_config = _calibrated(run_config, target_epsilon)
    else:
        if mechanism is not MechanismName.not_private and (noise_multiplier is None) == (
            target_epsilon is None
        ):
            raise ConfigError(
                "give exactly one of --noise-multiplier and --target-epsilon, or --config"
            )
        run_config = _from_numbers(numbers)
        if target_epsilon is not None:
            run_config = _calibrated(run_config, target_epsilon)
    _report(
        run_config,
        output,
        json_=json_,
        words=explain,
        trials=tuning_trials,
        law=tuning_law.value,
        figure=figure if extrapolate else None,
        users_per_client=None if config is not None else users_per_client,
    )


def _one_or_the_other(context: typer.Context, from_file: bool, numbers: dict[str, Any]) -> None:
    """Refuses what would be ignored: a price of other numbers than those given misleads."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in (numbers if from_file else ("set_",))
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    ]
    if given and from_file:
        raise ConfigError(
            f"{', '.join(given)} and --config exclude each other; change the configuration with "
            "--set, e.g. --set mechanism.rounds=20"
        )
    if given:
        raise ConfigError("--set changes a configuration; name one with --config")


def _report(
    config: RunConfig,
    output: Path,
    json_: bool,
    words: bool,
    trials: float | None,
    law: Any,
    figure: Path | None,
    users_per_client: int | None,
) -> None:
    from components.fedemb.privacy.guarantee import PrivacyGuarantee
    from components.fedemb.privacy.mechanism import MechanismPlan
    from components.fedemb.privacy.tuning import conditions, price_tuning
    from components.plan_privacy.explain import explain
    from components.plan_privacy.plan import finite, run

    document = run(config, output)
    mechanism = MechanismPlan.from_json(document["plan"])
    guarantee = PrivacyGuarantee.from_json(document["guarantee"])
    fields: dict[str, Any] = {
        "mechanism": mechanism.kind,
        "epsilon": finite(guarantee.epsilon),
        "delta": guarantee.delta,
        "accountant": guarantee.accountant,
        "relation": guarantee.relation.name,
        "epsilon_conservative_2c": document["epsilon_conservative_2c"],
        "epsilon_rdp": document["epsilon_rdp"],
        "zcdp_rho": document["zcdp_rho"],
        "noise_multiplier": mechanism.noise_multiplier,
        "sampling_probability": mechanism.sampling_probability,
        "clients_per_round": mechanism.normaliser,
        "rounds": mechanism.rounds,
        "virtual_clients": mechanism.virtual_clients,
        "users_lower_bound": config.policy.users_lower_bound,
        "sentence": str(guarantee),
        "projections": document["projections"],
        "warnings": document["warnings"],
        "plan": str(output),
        "plan_sha": document["plan_sha"],
    }
    if trials is not None:
        search = price_tuning(mechanism, guarantee.delta, trials, law)
        fields["tuning"] = {**search.to_json(), "conditions": conditions(trials, law)}
    if words:
        fields["explanation"] = explain(mechanism, guarantee)
    if figure is not None:
        fields["extrapolation"] = _extrapolate(config, mechanism, figure, users_per_client)
    if json_:
        typer.echo(json.dumps(fields, indent=1))
        return
    for line in _lines(fields):
        typer.echo(line)


def _lines(fields: dict[str, Any]) -> list[str]:
    lines = [fields["sentence"], ""]
    q = fields["sampling_probability"]
    lines.append(
        f"{fields['mechanism']}: noise multiplier {fields['noise_multiplier']:.4g}, "
        f"{fields['clients_per_round']:.4g} of {fields['virtual_clients']} virtual clients a round"
        + (f" (probability {q:.4g})" if q else "")
    )
    named = {
        "epsilon_conservative_2c": "users sampled, then grouped (2C)",
        "epsilon_rdp": "Renyi accountant",
        "zcdp_rho": "zCDP rho",
    }
    for name, words in named.items():
        if fields[name] is not None:
            lines.append(f"  {words}: {fields[name]:.4g}")
    for item in fields["projections"]:
        epsilon = item["epsilon"]
        lines.append(
            f"projection, not a guarantee: simulated at {item['simulated_at']:,} users, for "
            f"{item['population']:,} users with {item['clients_per_round']:.4g} clients a round and"
            f" noise multiplier {item['noise_multiplier']:.4g} epsilon would be "
            + ("infinite" if epsilon is None else f"{epsilon:.4g} at delta {item['delta']:.2g}")
        )
    if "tuning" in fields:
        lines += ["", f"search: {fields['tuning']['sentence']}", "valid only if"]
        lines += [f"  - {text}" for text in fields["tuning"]["conditions"]]
    for paragraph in fields.get("explanation", []):
        lines += ["", paragraph]
    if "extrapolation" in fields:
        lines += ["", *_table(fields["extrapolation"])]
    lines += [f"warning: {text}" for text in [*fields["warnings"], *_useless(fields)]]
    return [*lines, "", f"wrote {fields['plan']}"]


def _useless(fields: dict[str, Any]) -> list[str]:
    epsilon = fields["epsilon"]
    if epsilon is not None and epsilon <= _USELESS:
        return []
    return [
        f"epsilon {'is infinite' if epsilon is None else f'{epsilon:.4g}'}: this protects nobody; "
        "it takes more noise, fewer rounds or far more users (--target-epsilon finds the noise)"
    ]


def _table(extrapolation: dict[str, Any]) -> list[str]:
    lines = ["projected epsilon, delta = users ** -1.1, equal noise in the running sum of updates"]
    for axis in ("population", "compute"):
        lines.append(f"against {axis}:")
        header = f"  {'mechanism':24}{'users':>14}{'clients/round':>15}{'noise':>10}{'epsilon':>10}"
        lines.append(header)
        for point in extrapolation[axis]:
            lines.append(
                f"  {point['mechanism']:24}{point['population']:>14,}"
                f"{point['clients_per_round']:>15,}{point['noise_multiplier']:>10.4g}"
                f"{point['epsilon']:>10.4g}"
            )
    return [*lines, f"wrote {extrapolation['figure']}"]


def _from_numbers(numbers: dict[str, Any]) -> RunConfig:
    """A configuration that holds just what is priced; the rest is the defaults."""
    missing = [
        f"--{name.replace('_', '-')}"
        for name in ("population", "clients_per_round", "rounds")
        if numbers[name] is None
    ]
    separately = numbers["virtual_clients"] and numbers["users_lower_bound"]
    if separately and "--population" in missing:
        missing.remove("--population")
    if missing:
        raise ConfigError(f"give {', '.join(missing)}, or --config; see `fedemb plan --help`")
    users, size = numbers["population"], numbers["users_per_client"]
    groups = numbers["virtual_clients"] or max(1, round(users / size))
    bound = numbers["users_lower_bound"] or users
    delta = numbers["delta"] if numbers["delta"] is not None else float(bound**-1.1)
    from pipelines.load_config import validate

    return validate(
        {
            "purpose": "simulation",
            "data": {"source": {"uri": "builtin"}},
            "partition": {"virtual_clients": groups},
            "mechanism": _mechanism(numbers, groups, users or bound),
            "policy": {
                "users_lower_bound": bound,
                "certify_at": numbers["certify_at"],
                "delta": delta,
                "epsilon_cap": _UNCAPPED,
            },
        }
    )


def _mechanism(numbers: dict[str, Any], groups: int, users: int) -> dict[str, Any]:
    from components.fedemb.privacy.extrapolation import cyclic_participation

    kind, clients, rounds = (
        numbers["mechanism"],
        numbers["clients_per_round"],
        numbers["rounds"],
    )
    out: dict[str, Any] = {"kind": kind, "rounds": rounds}
    if kind != "not_private":
        noise = numbers["noise_multiplier"]
        out["noise_multiplier"] = 1.0 if noise is None else noise
    if kind in ("group_poisson_gaussian", "not_private"):
        out["sampling_probability"] = clients / groups
        return out
    out["clients_per_round"] = clients
    if kind == "user_poisson":
        out["sampling_probability"] = clients * numbers["users_per_client"] / users
    elif kind == "fixed_size":
        out["users_per_client"] = numbers["users_per_client"]
    else:
        separation, most = cyclic_participation(groups, clients, rounds)
        out["min_separation"] = numbers["min_separation"] or separation
        out["max_participations"] = numbers["max_participations"] or most
        out |= (
            {"restart_every": numbers["restart_every"]}
            if kind == "tree_aggregation"
            else {"buffers": numbers["buffers"]}
        )
    return out


def _calibrated(config: RunConfig, target_epsilon: float) -> RunConfig:
    from components.fedemb.privacy.calibration import with_target_epsilon
    from components.fedemb.privacy.mechanism import plan_mechanism

    found = with_target_epsilon(plan_mechanism(config), target_epsilon, config.policy.delta)
    return config.updated({"mechanism.noise_multiplier": found.noise_multiplier})


def _extrapolate(
    config: RunConfig, mechanism: MechanismPlan, figure: Path, users_per_client: int | None
) -> dict[str, Any]:
    from dataclasses import asdict

    from components.fedemb.artifacts import write_bytes
    from components.fedemb.privacy.extrapolation import COMPUTE, GROWTH, SETTINGS, Cohort, points
    from components.plan_privacy.figure import extrapolation_svg

    population = config.policy.users_lower_bound
    size = users_per_client or max(1, round(population / mechanism.virtual_clients))
    cohort = Cohort(
        population=population,
        users_per_client=size,
        clients_per_round=max(1, round(mechanism.normaliser)),
        noise_multiplier=mechanism.noise_multiplier,
        rounds=mechanism.rounds,
    )
    parameters = None
    if mechanism.blt_decay is not None and mechanism.blt_scale is not None:
        parameters = (mechanism.blt_decay, mechanism.blt_scale)
    # Optimising BLT noise takes a minute, so it is compared only where it is planned.
    kinds = SETTINGS if parameters is not None else SETTINGS[:-1]
    at = max(config.policy.certify_at, default=population)
    against_population = points(kinds, [cohort.scaled(population=x) for x in GROWTH], parameters)
    larger = cohort.scaled(population=at / population)
    against_compute = points(kinds, [larger.scaled(compute=x) for x in COMPUTE], parameters)
    write_bytes(figure, extrapolation_svg(against_population, against_compute).encode())
    return {
        "figure": str(figure),
        "simulated_at": population,
        "population": [asdict(point) for point in against_population],
        "compute": [asdict(point) for point in against_compute],
    }
