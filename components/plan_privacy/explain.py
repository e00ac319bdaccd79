"""Explains a plan: what is protected, from whom, by which mechanism, and the limits."""

from __future__ import annotations

import math

from fedemb.privacy.accounting.guarantee import PrivacyGuarantee
from fedemb.privacy.accounting.units import UNITS
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.reports import epsilon_meaning
from fedemb.reports.epsilon_meaning import meaning
from fedemb.reports.mechanism_text import adjacency, explanation

_ACCOUNTANTS = {
    "pld": (
        "Accountant. Privacy loss distributions (dp-accounting): the losses of all rounds are "
        "convolved numerically, rounded so that the result can only be too large."
    ),
    "rdp": (
        "Accountant. Renyi differential privacy: a bound that is easier to compute and a little "
        "looser than privacy loss distributions."
    ),
}


def explain(plan: MechanismPlan, guarantee: PrivacyGuarantee, covers_change: bool) -> list[str]:
    """Returns paragraphs: unit, adjacency, sampler, clip and noise, accountant, limits, attacks."""
    if not plan.private:
        return [explanation(plan)]
    unit = UNITS[plan.unit]
    protected = f"Unit. {unit.whole[0].upper()}{unit.whole[1:]}. {unit.covered}"
    changed = f"A {plan.unit} that {unit.change} is {'also' if covers_change else 'not'} covered."
    paragraphs = [protected, f"{adjacency(plan)} {changed}", explanation(plan)]
    paragraphs.append(
        f"Clip and noise. A contribution is scaled down to norm {plan.l2_norm_clip:g}; "
        f"normal noise of {plan.noise_multiplier:g} times that is added to every entry of the sum, "
        f"which is then divided by the public constant {plan.normalizer:g}."
    )
    paragraphs.append(_ACCOUNTANTS[guarantee.accountant])
    shift = (
        f"by a factor of at most e^{guarantee.epsilon:.3g}, except with probability "
        f"{guarantee.delta:.3g}. It does not limit what the model reveals about all "
        f"{unit.many} together."
    )
    if math.isinf(guarantee.epsilon):
        shift = "without any bound: this protects no user."
    paragraphs.append(
        f"Meaning. Compared with any earlier belief about one {plan.unit}, the released model "
        f"shifts the odds {shift}"
    )
    found = meaning(plan, guarantee)
    return paragraphs + (epsilon_meaning.paragraphs(found) if found else [])
