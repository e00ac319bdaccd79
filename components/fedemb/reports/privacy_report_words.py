"""Text of the privacy report, generated from its codes and figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedemb.config.policy import Unit
from fedemb.documents.fields import Guarantee
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.foundation.runtime_env import Backend
from fedemb.privacy.accounting.guarantee import PrivacyGuarantee
from fedemb.privacy.accounting.units import UNITS

if TYPE_CHECKING:
    from fedemb.config import PretrainingConfig

TRUST = {
    "training_operator": "the operator of the training job, who sees the private images",
    "private_stores": "the store of private artifacts and the key store",
    "code": "the code whose digest this report carries",
}


BACKENDS: dict[Backend, str] = {"tensorflow": "TensorFlow", "jax": "JAX"}


def assumptions(unit: Unit) -> dict[str, str]:
    """Returns the assumptions of the guarantee, by code."""
    rows = {
        "owner_of_record": "Every image has the id of the user that it shows. An image of two "
        "people protects only the user whose id it has.",
        "one_row_an_image": "Every image is one row, the same in every run of the policy. A copy "
        "in another row counts as another image, with a separate budget.",
        "computational": "Noise and sampling coins come from ciphers (ChaCha20, AES-256) under a "
        "secret key, so the guarantee is computational: it holds against adversaries who cannot "
        "break these ciphers.",
        "private_root": "Readers of the private root (images, diagnostics, rejects, raw audit "
        "scores, logs of failures) are outside the guarantee.",
        "one_id_and_cohort": "A user has one id and, where a column names cohorts, one cohort, the "
        "same in every run of the policy; another id or cohort would be charged to another "
        "budget. A user with records of several cohorts does not train.",
        "preflight": "The thresholds of fedemb check-data are a check by the data owner before "
        "the run and are outside the guarantee.",
    }
    others = {"user": {"one_row_an_image"}, "image": {"owner_of_record", "one_id_and_cohort"}}
    return {code: words for code, words in rows.items() if code not in others[unit]}


def limitations(unit: Unit) -> dict[str, str]:
    """Returns the limitations of the guarantee by code."""
    words = UNITS[unit]
    several = {"owners_of_several": words.covered} if unit == "image" else {}
    return {
        **several,
        "evaluation_users": f"Held-out evaluation {words.many} are not covered: the utility "
        "figures are exact on them.",
        "declared_tuning": "The choice of hyperparameters is declared, not observed: each "
        "private run whose results were used has its own price in the ledger. Runs outside the "
        "ledger are not covered.",
        "monitoring": "The attack of the audit is monitoring only: it does not bound epsilon and "
        "does not prove privacy.",
        "timing": f"The duration of steps depends on the number of {words.many} that participate. "
        "Observers of the pipeline can measure it, and it is not covered.",
        "other_policies": f"Budgets of other policies for the same {words.many} add up. This "
        "report includes its own ledger only.",
    }


OVERLAPS = {
    "no_public_images": "no public images",
    "unchecked": "unchecked: the images of an imported backbone are unknown",
    "dropped_by_partition_users": "dropped image by image by partition_users",
}


def start_licence(pretraining: PretrainingConfig) -> str:
    """Returns the licence of the pretraining images, as stated by the configuration's owner."""
    drawn = pretraining.kind == "none"
    unstated = pretraining.licence == type(pretraining)().licence
    return "none needed" if drawn and unstated else pretraining.licence


def guarantee_sentence(guarantee: Guarantee) -> str:
    """Returns the guarantee of a plan or report as one sentence."""
    return str(PrivacyGuarantee.from_json(guarantee.model_dump()))


def report_sentence(report: PrivacyReport) -> str:
    """Returns the guarantee of a report as one sentence, with covered and uncovered users."""
    unit, share = report.unit.unit, report.unit.held_out_share
    covered = "also covered is" if report.adjacency.covers_change_own_data else "not covered is"
    change, many = UNITS[unit].change, UNITS[unit].many
    held_out = f"about {share:.3g} of all {many}" if share else "those with the held-out values"
    return (
        f"{guarantee_sentence(report.guarantee)}; {covered} one {unit} that {change}; "
        f"{many} held out for evaluation ({held_out}) are measured exactly and have no guarantee"
    )


def all_runs(report: PrivacyReport) -> str | None:
    """Returns the total privacy loss of all charges; None for the first charge on all blocks.

    The loss is that of the fullest block that this run trained on. Other blocks are in the reports
    of other runs.
    """
    cumulative, many = report.cumulative, UNITS[report.unit.unit].many
    charges = max((row.runs for row in cumulative.blocks), default=0)
    if charges < 2:
        return None
    epsilon = cumulative.max_block_epsilon
    spent = "no finite epsilon" if epsilon is None else f"epsilon {epsilon:.4g}"
    blocks = "" if len(cumulative.blocks) == 1 else ", for those of the fullest block"
    return (
        f"all {charges} charges of policy {cumulative.policy_id!r} on these {many} together: "
        f"{spent} of the cap {cumulative.cap:g} at delta {cumulative.delta:g}{blocks}"
    )
