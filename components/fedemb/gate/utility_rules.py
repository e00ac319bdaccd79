"""Gate rules for utility: evaluated as configured, and above the configured floor."""

from __future__ import annotations

from collections.abc import Iterator

from fedemb.config.digest import config_digest
from fedemb.documents.classifier import ClassifierReport
from fedemb.documents.starts import starts_of
from fedemb.documents.utility import UtilityReport, embedding_space_id, rate_name
from fedemb.gate.case import Case, Reason, waiver
from fedemb.reports.formats import points
from fedemb.reports.utility_words import LEAST_RESAMPLED, best_start, few_resampled

_REMEDY = (
    "train on more data, with less noise or from a better public backbone; or let the policy owner "
)


def measured_as_asked(case: Case) -> Iterator[Reason]:
    """Checks that the utility report is of this model and was measured as configured."""
    utility, model, config = (
        case.evidence.utility.body,
        case.evidence.model.body,
        case.evidence.config,
    )
    wanted: dict[str, tuple[object, object]] = {
        "model_sha": (utility.model_sha, model.weights_sha),
        "run_id": (utility.run_id, case.reservation.run_id),
        "config_sha": (
            utility.config_sha,
            config_digest(case.evidence.config, "evaluation"),
        ),
        "public_kind": (utility.public_kind, config.pretraining.kind),
    }
    if isinstance(utility, UtilityReport):
        step, not_private = "evaluate_embeddings", utility.centralized or utility.utility_drop
        wanted |= _embeddings_wanted(utility, case)
    else:
        step, not_private = "evaluate_classifier", utility.centralized
        samples = config.evaluation.bootstrap_samples
        wanted |= {
            "bootstrap_samples": (utility.bootstrap_samples, samples),
            "unit": (utility.unit, config.policy.unit),
            "classes": (utility.classes, len(config.model.classes)),
        }
    if utility.measured:
        wanted["starts"] = (set(utility.measured_starts), set(starts_of(config)))
    for name, (found, expected) in wanted.items():
        if found != expected:
            yield Reason(
                "utility_stale",
                f"the utility report belongs to another {name}",
                f"run {step} on this model, then account_privacy",
            )
    if utility.simulation or not_private:
        yield Reason(
            "utility_without_privacy",
            "the utility report has figures of a model trained without privacy",
            f"run {step} with the configuration of this release",
        )


def _embeddings_wanted(utility: UtilityReport, case: Case) -> dict[str, tuple[object, object]]:
    model, config = case.evidence.model.body, case.evidence.config
    rates = [rate_name(rate) for rate in config.evaluation.false_accept_rates]
    depths = {str(depth) for depth in config.evaluation.recall_at}
    wanted: dict[str, tuple[object, object]] = {
        "embedding_space_id": (
            utility.embedding_space_id,
            embedding_space_id(model.weights_sha, config.model),
        ),
        "bootstrap.samples": (utility.bootstrap.samples, config.evaluation.bootstrap_samples),
    }
    if not config.evaluation.resample_subgroups:
        wanted["bootstrap.groups"] = (utility.bootstrap.groups, None)
    if utility.retrieval is not None:
        wanted["headline_rate"] = (utility.headline_rate, rates[0])
        wanted["recall_at_far"] = (set(utility.recall_at_far), set(rates))
        wanted["retrieval.recall_at"] = (set(utility.retrieval.recall_at), depths)
    return wanted


def gain_over_public(case: Case) -> Iterator[Reason]:
    """Checks that the whole interval of the gain over the best baseline is above the floor."""
    code, least = "no_gain_over_public", case.evidence.config.release.min_gain_over_public
    if least is None:
        return
    utility = case.evidence.utility.body
    gain, remedy = utility.gain, _REMEDY + waiver(code)
    if gain is not None and utility.resampled < LEAST_RESAMPLED:
        yield Reason(
            code,
            f"the gain over {best_start(utility)} is {points(gain)}, and {few_resampled(utility)}",
            f"increase partition.evaluation.fraction; or {remedy}",
        )
    elif gain is None or not gain.low > least:
        yield Reason(
            code,
            f"the gain over {best_start(utility)} is {points(gain)}; its interval must be "
            f"above {100 * least:g} points (release.min_gain_over_public)",
            remedy,
        )


def useful_probabilities(case: Case) -> Iterator[Reason]:
    """Checks that a classifier's log loss is not significantly above that of its baselines.

    An untrained head gives every class the same probability. A classifier above its log loss is
    certain where it is wrong.
    """
    utility, code = case.evidence.utility.body, "log_loss_above_baseline"
    if not isinstance(utility, ClassifierReport) or not utility.measured:
        return
    own, best = utility.log_loss("model"), utility.best_log_loss
    if own is None or best is None or not own.low <= best:
        found = "not measured" if own is None or best is None else f"{own.value:.3g}"
        yield Reason(
            code,
            f"the log loss is {found}, and the best baseline has "
            f"{'none' if best is None else format(best, '.3g')}: the probabilities are not useful",
            "lower training.server.learning_rate, train with less noise, or let the policy owner "
            + waiver(code),
        )


def no_worse_than_previous(case: Case) -> Iterator[Reason]:
    """Checks that the model is not significantly worse than the previous release."""
    code, config = "worse_than_previous_release", case.evidence.config
    if config.release.no_worse_than is None:
        return
    change = case.evidence.utility.body.difference("previous_release")
    if change is None or not change.high >= 0:
        yield Reason(
            code,
            f"the change since the previous release is {points(change)} (release.no_worse_than)",
            _REMEDY + waiver(code),
        )
