"""Rules for utility: measured as configured, and above the configured floors."""

from __future__ import annotations

from collections.abc import Iterator

from fedemb.config.digest import config_digest
from fedemb.documents.classifier import ClassifierReport
from fedemb.documents.fields import points
from fedemb.documents.starts import LEAST_RESAMPLED, starts_of
from fedemb.documents.utility import UtilityReport, embedding_space_id, rate_name
from fedemb.gate.rule import Case, Rule

_BETTER = "train on more data, with less noise or from a better public backbone"


_EVALUATE = "run the evaluation of this release on its model, then account_privacy"


@Rule(_EVALUATE)
def utility_stale(case: Case) -> Iterator[str]:
    """Utility of this model, measured as configured."""
    utility, model, config = case.utility, case.model, case.config
    wanted: dict[str, tuple[object, object]] = {
        "model_sha": (utility.model_sha, model.weights_sha),
        "run_id": (utility.run_id, case.reservation.run_id),
        "config_sha": (utility.config_sha, config_digest(config, "evaluation")),
        "public_kind": (utility.public_kind, config.pretraining.kind),
    }
    if isinstance(utility, UtilityReport):
        wanted |= _embeddings_wanted(utility, case)
    else:
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
            yield f"the utility report belongs to another {name}"


def _embeddings_wanted(utility: UtilityReport, case: Case) -> dict[str, tuple[object, object]]:
    config = case.config
    rates = [rate_name(rate) for rate in config.evaluation.false_accept_rates]
    depths = {str(depth) for depth in config.evaluation.recall_at}
    space = embedding_space_id(case.model.weights_sha, config.model)
    wanted: dict[str, tuple[object, object]] = {
        "embedding_space_id": (utility.embedding_space_id, space),
        "bootstrap.samples": (utility.bootstrap.samples, config.evaluation.bootstrap_samples),
    }
    if not config.evaluation.resample_subgroups:
        wanted["bootstrap.groups"] = (utility.bootstrap.groups, None)
    if utility.retrieval is not None:
        wanted["headline_rate"] = (utility.headline_rate, rates[0])
        wanted["recall_at_far"] = (set(utility.recall_at_far), set(rates))
        wanted["retrieval.recall_at"] = (set(utility.retrieval.recall_at), depths)
    return wanted


@Rule(_EVALUATE)
def utility_without_privacy(case: Case) -> Iterator[str]:
    """No figures of a model trained without privacy."""
    utility = case.utility
    drop = isinstance(utility, UtilityReport) and utility.utility_drop
    if utility.simulation or utility.centralized or drop:
        yield "the utility report has figures of a model trained without privacy"


@Rule(
    _BETTER,
    waivable=True,
    applies=lambda case: case.config.release.min_gain_over_public is not None,
    value=lambda case: points(case.utility.gain),
    limit=lambda case: f"above {100 * (case.config.release.min_gain_over_public or 0):g} points",
)
def no_gain_over_public(case: Case) -> Iterator[str]:
    """Interval of the gain over the best baseline above its floor."""
    utility, gain = case.utility, case.utility.gain
    least = case.config.release.min_gain_over_public
    found = f"the gain over the best baseline ({utility.best_start}) is {points(gain)}"
    if gain is not None and utility.resampled < LEAST_RESAMPLED:
        few = f"{utility.resampled}, fewer than {LEAST_RESAMPLED}"
        yield f"{found}, from too few held-out users for an interval: {few}"
    elif gain is None or least is None or not gain.low > least:
        yield f"{found}; its interval must be above the floor (release.min_gain_over_public)"


@Rule(
    "lower training.server.learning_rate, or train with less noise",
    waivable=True,
    applies=lambda case: isinstance(case.utility, ClassifierReport) and case.utility.measured,
)
def log_loss_above_baseline(case: Case) -> Iterator[str]:
    """Log loss not significantly above that of the best baseline.

    An untrained head gives every class the same probability. A classifier above its log loss is
    certain where it is wrong.
    """
    utility = case.utility
    assert isinstance(utility, ClassifierReport)
    own, best = utility.log_loss("model"), utility.best_log_loss
    if own is None or best is None or not own.low <= best:
        found = "not measured" if own is None or best is None else f"{own.value:.3g}"
        yield (
            f"the log loss is {found}, and the best baseline has "
            f"{'none' if best is None else format(best, '.3g')}: the probabilities are not useful"
        )


@Rule(
    _BETTER,
    waivable=True,
    applies=lambda case: case.config.release.no_worse_than is not None,
    value=lambda case: points(case.utility.difference("previous_release")),
)
def worse_than_previous_release(case: Case) -> Iterator[str]:
    """Not significantly worse than the previous release."""
    change = case.utility.difference("previous_release")
    if change is None or not change.high >= 0:
        yield f"the change since the previous release is {points(change)} (release.no_worse_than)"
