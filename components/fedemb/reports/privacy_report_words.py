"""Text of the privacy report, generated from its codes and figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedemb.documents.fields import Guarantee
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.foundation.runtime_env import Backend
from fedemb.privacy.accounting.guarantee import PrivacyGuarantee
from fedemb.privacy.accounting.units import UNITS

if TYPE_CHECKING:
    from fedemb.config import PretrainingConfig

BACKENDS: dict[Backend, str] = {"tensorflow": "TensorFlow", "jax": "JAX"}


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
