"""Explains an epsilon: attack rates, the equivalent Gaussian mechanism, and other deployments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from fedemb.documents.fields import Guarantee
from fedemb.privacy.accounting.attack_rates import gaussian_mu, rounded_up
from fedemb.privacy.accounting.guarantee import PrivacyGuarantee
from fedemb.privacy.accounting.units import UNITS
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.planning.prices import plan_attack_rates


class Deployment(NamedTuple):
    """Published guarantee of a deployment."""

    name: str
    epsilon: str
    delta: str
    unit: str
    source: str


_LIST = "https://desfontain.es/blog/real-world-differential-privacy.html"
DEPLOYMENTS = (
    Deployment(
        "Google Gboard language models",
        "0.994 to 13.69",
        "1e-10",
        "person",
        "https://research.google/blog/"
        "advances-in-private-training-for-production-on-device-language-models/",
    ),
    Deployment("Apple emoji suggestions, local", "4", "0", "person and day", _LIST),
    Deployment("Apple QuickType, local", "16", "0", "person and day", _LIST),
    Deployment("Facebook URLs", "1.453", "1e-5", "person (96.6 % of them)", _LIST),
)
"""Deployments with a published epsilon; a report on images must not say "user"."""


@dataclass(frozen=True)
class Meaning:
    """Meaning of the guarantee of one run; every figure is rounded up."""

    epsilon: float
    mu: float
    """mu of the Gaussian mechanism with the same epsilon and delta."""
    odds: float
    """exp(epsilon): the maximum factor on the odds of any conclusion; may be infinite."""
    rates: list[tuple[float, float]]
    """False positive rate, highest true positive rate of any attack."""
    unit: str
    units: str

    def sentence(self) -> str:
        """Returns the meaning for a reader who is not a specialist."""
        rate, found = self.rates[0]
        return (
            f"Suppose an attacker guesses from the model which {self.units} were in the training "
            f"data, and wrongly names at most {percent(rate)} of the {self.units} outside it. "
            f"Then the attacker finds at most {percent(found)} of the {self.units} in it, "
            "whatever else the attacker knows."
        )

    def figures(self) -> list[tuple[str, str]]:
        """Returns (name, value) of each figure, for tables."""
        odds = f"{self.odds:g}" if math.isfinite(self.odds) else "more than 1e300"
        return [
            *(
                (f"attacks found, at {percent(rate)} false positives", f"at most {percent(found)}")
                for rate, found in self.rates
            ),
            (f"odds that one {self.unit} was in the data", f"change by at most a factor of {odds}"),
            ("Gaussian mechanism with the same epsilon and delta", f"mu = {self.mu:g} (mu-GDP)"),
        ]


def meaning(plan: MechanismPlan, guarantee: PrivacyGuarantee | Guarantee) -> Meaning | None:
    """Returns the meaning of a run's guarantee; None without a finite epsilon."""
    epsilon, unit = guarantee.epsilon, UNITS[plan.unit]
    if not plan.private or epsilon is None or not math.isfinite(epsilon):
        return None
    return Meaning(
        epsilon=epsilon,
        mu=rounded_up(gaussian_mu(epsilon, guarantee.delta)),
        odds=rounded_up(math.exp(epsilon)) if epsilon < 690 else math.inf,
        rates=[(rate, min(1.0, rounded_up(found))) for rate, found in plan_attack_rates(plan)],
        unit=unit.one,
        units=unit.many,
    )


def percent(share: float) -> str:
    """Returns a share in percent, without further rounding of three digits.

    >>> percent(0.01), percent(0.0413), percent(0.0001)
    ('1 %', '4.13 %', '0.01 %')
    """
    return f"{100 * share:.12g} %"


def markdown(found: Meaning) -> list[str]:
    """Returns the paragraphs of the model card."""
    figures = (f"| {name} | {value} |" for name, value in found.figures())
    others = (
        f"| [{item.name}]({item.source}) | {item.epsilon} | {item.delta} | {item.unit} |"
        for item in DEPLOYMENTS
    )
    return [
        "### What this epsilon means",
        found.sentence(),
        "\n".join(["| figure, for this run | value |", "|---|---|", *figures]),
        "Published deployments, whose units and data differ:",
        "\n".join(["| deployment | epsilon | delta | unit |", "|---|---|---|---|", *others]),
    ]
