"""Forecasts and warnings about the noise of a plan, as utility sees it.

Utility depends on the noise, not on epsilon: a small population with the usual epsilon has noise
that no model can learn through. A plan warns if its noise is far above that of every measured run.
Those runs are on other images: a simulation measures the gain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import yaml

from fedemb.config import RunConfig
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.registry import plan_mechanism
from fedemb.privacy.section import UNITS

Recipe = Literal["whole_net", "projection", "whitening", "head"]


class MeasuredRun(NamedTuple):
    """Result of one kind of training on some images."""

    images: str
    noise: float
    """In the unit of `training_noise`."""
    result: str


@cache
def measured_runs() -> Mapping[Recipe, list[MeasuredRun]]:
    """Returns kind of training -> measured runs.

    Noise of embeddings: noise on the mean of one round / clipping norm. Noise of classifiers:
    length of the noise on the mean gradient of the whole training / clipping norm, in all trained
    weights.
    """
    found = yaml.safe_load(Path(__file__).with_name("measured_runs.yaml").read_text())
    return {kind: [MeasuredRun(**run) for run in runs] for kind, runs in found.items()}


def forecast(config: RunConfig) -> str:
    """Returns results of the same kind of training, for each kind of images at the next noise."""
    found = training_noise(config, plan_mechanism(config))
    if found is None:
        return "None for this kind of training; a simulation measures the gain."
    runs, nearest = measured_runs()[found[0]], dict[str, MeasuredRun]()
    for run in sorted(runs, key=lambda run: abs(math.log(run.noise / found[1]))):
        nearest.setdefault(run.images, run)
    rows = (f"{run.images} at noise {run.noise:g}: {run.result}" for run in nearest.values())
    return (
        f"This plan has noise {found[1]:.2g}. Measured with this kind of training: "
        f"{'; '.join(rows)}. Other images may differ; a simulation measures the gain."
    )


WARNED_FROM = 2.0
"""Multiple of the largest measured noise from which the plan warns."""


def training_noise(config: RunConfig, plan: MechanismPlan) -> tuple[Recipe, float] | None:
    """Returns the kind of training and its noise in the unit of `measured_runs`.

    None if the plan is not private, or nothing was measured for this kind of training.
    """
    if not plan.private:
        return None
    if config.task == "embedding":
        if plan.solves:
            return "whitening", noise_on_mean(plan)
        if config.mechanism.samples_units:
            return None
        recipe: Recipe = "projection" if config.model.trainable == "projection" else "whole_net"
        return recipe, noise_on_mean(plan)
    model = config.model
    if model.trainable != "head":
        return None
    weights = (model.embedding_dim + 1) * max(1, len(model.classes))
    return "head", noise_on_mean(plan) * math.sqrt(weights / plan.rounds)


def noise_on_mean(plan: MechanismPlan) -> float:
    """Returns the standard deviation of noise on the mean update / clip; it limits utility."""
    return plan.noise_multiplier / plan.normalizer


def warnings(config: RunConfig) -> dict[str, str]:
    """Returns warnings about allowed but questionable settings: code to sentence."""
    plan, policy = plan_mechanism(config), config.policy
    delta, customary = policy.delta, policy.users_lower_bound**-1.1
    found: dict[str, str] = {}
    if delta > customary:
        found["delta_above_customary"] = (
            f"delta={delta:g} is above the customary users_lower_bound**-1.1={customary:.3g}; lower"
            f" it, as a mechanism may expose a share delta of its {UNITS[policy.unit].many}"
        )
    if plan.normalizer < 1:
        found["rounds_mostly_empty"] = (
            f"{plan.normalizer:.2g} virtual clients are expected in a round, so most rounds hold "
            "only noise; raise the sampling probability"
        )
    clients = config.partition.virtual_clients
    grouped = plan.private and not config.mechanism.samples_units
    if grouped and clients > policy.users_lower_bound:
        found["clients_mostly_empty"] = (
            f"partition.virtual_clients={clients:,} exceeds the {policy.users_lower_bound:,} users "
            "of policy.users_lower_bound, so many of them are empty, and the noise is larger "
            "relative to the update than printed; set fewer clients, with several users each"
        )
    recipe, noise = training_noise(config, plan) or ("head", 0.0)
    largest = max(measured_runs()[recipe], key=lambda run: run.noise)
    if noise > WARNED_FROM * largest.noise:
        found["noise_above_measured"] = (
            f"the noise is {noise:.2g} clipping norms, and no run was measured above "
            f"{largest.noise:g} ({largest.images}: {largest.result}); measure the gain by "
            "a simulation first, or use fewer rounds, a larger epsilon, or a stronger public "
            "backbone and fewer trained weights"
        )
    return found
