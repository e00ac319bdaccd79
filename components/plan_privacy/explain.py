"""A plan in plain words: what is protected, from whom, by what, and what is not."""

from __future__ import annotations

import math

from fedemb.privacy.accounting.guarantee import PrivacyGuarantee
from fedemb.privacy.mechanisms.mechanism import MechanismPlan

_UNIT = (
    "Unit. One user with everything they own: all their images, however many. The guarantee does "
    "not multiply by images, and it does not cover a person who appears under two user ids or in "
    "other people's images."
)
_SAMPLERS = {
    "group_poisson_gaussian": (
        "Sampler. Users are hashed once into {groups} virtual clients. In every round a secret "
        "coin with chance {q:.4g} is tossed for each virtual client, filled or empty, and the "
        "whole of it takes part or none. About {expected:.4g} take part; how many did is never "
        "published."
    ),
    "user_poisson": (
        "Sampler. In every round a secret coin with chance {q:.4g} is tossed for each user, and "
        "the chosen ones fall into {clients} virtual clients. A chosen user changes the update of "
        "a virtual client that is there anyway, by up to twice the clip: hence 2C."
    ),
    "fixed_size": (
        "Sampler. In every round {clients} virtual clients of {size} users are drawn without "
        "replacement, as in the paper. A user swaps with another one of the same virtual client, "
        "whose update then changes by up to twice the clip: hence 2C."
    ),
    "tree_aggregation": (
        "Sampler. None to rely on: the {groups} virtual clients take turns, {clients} a round, "
        "each at most {most} times and at least {separation} rounds apart. Noise sits on the "
        "nodes of a binary tree over rounds; a participation changes an update by up to twice the "
        "clip (2C)."
    ),
    "blt": (
        "Sampler. None to rely on: the {groups} virtual clients take turns, {clients} a round, "
        "each at most {most} times and at least {separation} rounds apart. The noise of a round "
        "partly cancels that of earlier ones; a participation changes an update by up to 2C."
    ),
    "not_private": (
        "Sampler. Each of {groups} virtual clients with chance {q:.4g}. No noise: this run has no "
        "guarantee and no gate will pass it."
    ),
}
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


def explain(plan: MechanismPlan, guarantee: PrivacyGuarantee) -> list[str]:
    """Returns paragraphs: unit, adjacency, sampler, clip and noise, accountant, limits."""
    words = {
        "groups": plan.virtual_clients,
        "q": plan.sampling_probability or 0.0,
        "expected": plan.normaliser,
        "clients": plan.clients_per_round,
        "size": plan.users_per_client,
        "most": plan.max_participations,
        "separation": plan.min_separation,
    }
    sampler = _SAMPLERS[plan.kind].format(**words)
    if not plan.private:
        return [sampler]
    paragraphs = [_UNIT, _adjacency(plan), sampler]
    paragraphs.append(
        f"Clip and noise. A virtual client's update is scaled down to norm {plan.l2_norm_clip:g}; "
        f"normal noise of {plan.noise_multiplier:g} times that is added to every entry of the sum, "
        f"which is then divided by the public constant {plan.normaliser:g}, however many took part."
    )
    paragraphs.append(_ACCOUNTANTS[guarantee.accountant])
    shift = (
        f"by a factor of at most e^{guarantee.epsilon:.3g}, except with probability "
        f"{guarantee.delta:.3g}. It says nothing of what the model reveals about everybody."
    )
    if math.isinf(guarantee.epsilon):
        shift = "without any bound: this protects nobody."
    paragraphs.append(
        f"Meaning. Whatever anybody knew or suspected about a user, the released model shifts the "
        f"odds {shift}"
    )
    return paragraphs


def _adjacency(plan: MechanismPlan) -> str:
    if plan.kind == "group_poisson_gaussian":
        return (
            "Adjacency. Two data sets that differ by one user being there or not, or by everything "
            "that user owns. Either way one virtual client's update is replaced by another, which "
            "is what REPLACE_ONE stands for here: no user is swapped for another."
        )
    return (
        "Adjacency. Two data sets that differ by one user being there or not, or by everything "
        "that user owns; the factor 2 of the changed update is in the event's noise multiplier."
    )
