"""The words of the privacy report.

The lists belong to version 1 of the schema: old bundles are rebuilt and compared with them, so they
never change; other words are another version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRUST = [
    "the operator of the training job, who sees the private images",
    "the store of private artifacts and the key store",
    "the code whose digest this report carries",
]
ASSUMPTIONS = [
    "Every image is under the id of the user it is about; an image of two people protects the "
    "owner of the record only.",
    "Noise and sampling coins come from ChaCha20 under a secret key, so the guarantee is "
    "computational: it holds against whoever cannot break the cipher.",
    "Whoever reads the private root (images, diagnostics, rejects, raw audit scores, logs of "
    "failures) is outside the guarantee.",
    "A user has one id and, where a column names cohorts, one cohort, the same in every run of the "
    "policy; another id or cohort would be charged to another account. Whoever has records of "
    "several cohorts takes no part.",
    "The thresholds of `fedemb check-data` are the data owner's preflight and lie before the "
    "guarantee.",
]
LIMITATIONS = [
    "Held-out evaluation users are not covered: the utility figures are exact on them.",
    "How hyperparameters were chosen is declared, not observed: each private run that was looked "
    "at costs its own price in the ledger, and what lies in no ledger is not covered.",
    "The audit is monitoring: it can refute the guarantee, never prove it.",
    "How long steps take depends on how many users took part; whoever watches the pipeline's clock "
    "sees that, and it is not covered.",
    "Other policies over the same users add up; this report knows its own ledger only.",
]
SAMPLERS = {
    "group_poisson_gaussian": "each virtual client independently with the sampling probability",
    "user_poisson": "each user independently, then hashed into virtual clients",
    "fixed_size": "a fixed number of user slots without replacement",
    "tree_aggregation": "every virtual client in a fixed order, participation bounded",
    "blt": "every virtual client in a fixed order, participation bounded",
    "not_private": "each virtual client independently with the sampling probability",
}


def all_runs(report: Mapping[str, Any]) -> str | None:
    """What all runs of the policy cost together, from its second run on; None for the first."""
    cumulative, recurring = report["cumulative"], report["setting"]["recurring"]
    if recurring["run_index"] < 2:
        return None
    epsilon = cumulative["max_block_epsilon"]
    spent = "no finite epsilon" if epsilon is None else f"epsilon {epsilon:.4g}"
    return (
        f"all {recurring['run_index']} runs of policy {recurring['policy_id']!r} together: {spent} "
        f"of the cap {cumulative['cap']:g} at delta {cumulative['delta']:g}, for the users who "
        "took part in most"
    )
