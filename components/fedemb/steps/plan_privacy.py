"""Computes the privacy guarantee of a run before the run starts.

The plan is public: it contains no data and no secrets, and every later step compares its operations
with the plan.
"""

from __future__ import annotations

import logging

from kfp import dsl

from fedemb.documents.artifacts import Public
from fedemb.documents.plan import PrivacyPlan
from fedemb.foundation.document import Written
from fedemb.foundation.environment import require_backend
from fedemb.keys.trust import Signer, write_signed
from fedemb.release.plan import check_first_run, document
from fedemb.reports.privacy_text import guarantee_sentence
from fedemb.runtime.step import Rights, step
from fedemb.runtime.step_context import StepContext
from fedemb.training.noise_warnings import warnings


@step(
    image="cpu",
    private=False,
    outputs={"config": Public, "privacy_plan": Public},
    rights=Rights(signing=("plan",)),
)
def plan_privacy(
    purpose: str,
    task: str,
    policy: str,
    mechanism: str,
    data: str,
    partition: str,
    model: str,
    pretraining: str,
    training: str,
    seed: int,
    tuning: str,
    evaluation: str,
    audit: str,
    release: str,
    rollback_anchor: str,
    keys: str,
    config: dsl.OutputPath(str),  # pyright: ignore[reportInvalidTypeForm] - kfp's form
    privacy_plan: dsl.Output[dsl.Artifact],
):
    """Checks the parameters, hands them on as one configuration, and prices its mechanism."""
    from pathlib import Path

    from fedemb.runtime.step import step_process
    from fedemb.steps.plan_privacy import run

    with step_process("plan_privacy", locals()) as context:
        guarantee = run(context).body.guarantee
        Path(config).write_text(context.config.model_dump_json())
        privacy_plan.metadata.update(
            epsilon=guarantee.epsilon, delta=guarantee.delta, accountant=guarantee.accountant
        )


_log = logging.getLogger(__name__)


def run(context: StepContext) -> Written[PrivacyPlan]:
    """Writes `privacy_plan`, the plan of the configuration.

    Returns:
      The document: mechanism plan, event, relation, guarantee, the conservative and RDP figures,
      the (delta, epsilon) curve and projections to other populations.

    Raises:
      ConfigError: the mechanism cannot run on this partition, its policy cannot compose or pay its
          privacy loss, or the pipeline's images have another backend.
      UnsupportedAccounting: no accountant is valid for it.
    """
    require_backend(context.config.training.backend)
    check_first_run(context.config)
    body = document(context.config)
    for warning in warnings(context.config).values():
        _log.warning("%s", warning)
    _log.info("planned: %s", guarantee_sentence(body.guarantee))
    signer = Signer.newest(context.keys, "plan")
    return write_signed(context.artifacts.privacy_plan, body, signer)
