"""A private search inside one attempt: trains a secret number of trials and keeps only the best.

    draw the recipes -> [ train -> score ] x trials -> choose -> delete the others

The number of trials and their recipes follow from the secret key of the reservation, so a resumed
search trains the same trials. Every trial has its own working state and its own keys of coins and
noise; only features that follow from public weights and images without any draw are shared.
Scores, losers and the number of trials stay in the private root: the price of the search
holds only while they are secret (Papernot and Steinke, arXiv 2110.03620). So nothing is logged
while trials run.
"""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypedDict, cast

from typing_extensions import override

from fedemb.config.search import SearchConfig
from fedemb.config.trials import trial_plan
from fedemb.data.client_data import UserStore
from fedemb.engine.audit.attempt_keys import AttemptKeys
from fedemb.engine.server import ServerState
from fedemb.errors import Diverged, Interrupted, Refused
from fedemb.evaluation.selection import require_measurable, score
from fedemb.foundation import step_logging as events
from fedemb.foundation.canonical_json import (
    canonical_json,
    json_digest,
    json_object,
    strict_json,
)
from fedemb.keys import derive
from fedemb.models.arrays import Model
from fedemb.privacy.randomness.trials import draw_trials
from fedemb.runtime.private_inputs import open_private
from fedemb.runtime.step_context import StepContext
from fedemb.storage import open_store
from fedemb.training.attempt_inputs import AttemptInputs
from fedemb.training.bound_attempt import BoundAttempt
from fedemb.training.feature_caches import FeatureCaches
from fedemb.training.round_log import RoundLog
from fedemb.training.signed_state import Origin, SignedState

_LOG = logging.getLogger(__name__)
_SCORE = "score.json"
"""Score of a finished trial, in its working state."""
_BEST = "search.json"
"""Best trial of a finished search, in the working state of the attempt."""


@dataclass(frozen=True, kw_only=True)
class TrialInputs(AttemptInputs):
    """The inputs of one trial: configuration and plan are those of its recipe."""

    recipe: str
    search_sha: str
    """Digest of the inputs of the search."""
    number: int
    """Number of the trial, from 0; secret."""

    @cached_property
    @override
    def inputs_sha(self) -> str:
        """Digest of all inputs; trials with the same recipe draw other coins and noise."""
        return json_digest(["trial/1", self.search_sha, self.number, self.recipe])


class TrainedTrial(NamedTuple):
    """The result of one trial."""

    backbone: Model
    """Backbone with the released weights."""
    state: ServerState
    """State after the last round. Noised."""


def trial_inputs(inputs: AttemptInputs, recipe: str, number: int) -> TrialInputs:
    """Returns the inputs of a trial.

    Args:
      inputs: inputs of the search.
      recipe: name of a declared recipe.
      number: number of the trial.
    """
    return TrialInputs(
        config=inputs.config.tuned(recipe),
        run_id=inputs.run_id,
        plan=trial_plan(inputs.plan, inputs.config, recipe),
        reservation=inputs.reservation,
        users=inputs.users,
        initial_weights_sha=inputs.initial_weights_sha,
        recipe=recipe,
        search_sha=inputs.inputs_sha,
        number=number,
    )


def draw_recipes(keys: AttemptKeys, search: SearchConfig) -> list[str]:
    """Returns the recipe of each trial of an attempt; secret, as is the length of the list.

    Args:
      keys: keys of the attempt.
      search: the declared search.
    """
    secret = derive(keys.root_key, "search/1", keys.run_id, str(keys.attempt), keys.inputs_sha)
    drawn = draw_trials(secret, search.law, search.mean_trials, len(search.recipes))
    return [search.names[index] for index in drawn]


def find_best(
    context: StepContext,
    bound: BoundAttempt,
    backbone: Model,
    train: Callable[[BoundAttempt], TrainedTrial],
    *,
    features: FeatureCaches,
    root_key: bytes | None,
) -> BoundAttempt:
    """Runs the trials of a search, or resumes it, and returns the best trial.

    A trial whose outputs are not finite has the lowest score. The first of equal scores wins, which
    is a uniform choice, because trials are drawn independently.

    Args:
      context: context of the training step.
      bound: the bound attempt.
      backbone: public backbone; tells whether the held-out users can be measured.
      train: trains or restores one trial.
      features: caches of the trials; deleted after the last one.
      root_key: injected root key; None uses the key of the reservation.

    Raises:
      InputError: the held-out users cannot be measured.
      Refused: the law drew no trial.
      Diverged: every trial has outputs that are not finite.
      Interrupted: a stop was requested; the search can be resumed.
    """
    config = bound.inputs.config
    if not bound.store.exists(_BEST):
        search = config.tuning.search
        assert search is not None, "the attempt is a search"
        recipes = draw_recipes(bound.attempt_keys(root_key), search)
        _LOG.info(events.SEARCHING, len(search.recipes))
        with silent():
            _choose(context, bound, recipes, backbone, train)
    features.delete()
    best = cast("_Best | None", strict_json(bound.store.read(_BEST), _BEST))
    if best is None:
        raise Refused(
            "The search ended without a model: its secret law drew no trial. The charge stays; "
            "start another search, or use the logarithmic or geometric law, which always have one"
        )
    if best["score"] is None:
        raise Diverged(
            "Every trial of the search gave numbers that are not finite. Its budget is spent; "
            "lower the learning rates of the recipes"
        )
    chosen = _bound_trial(context, bound, best["recipe"], best["number"])
    _delete_others(bound, best["number"])
    return chosen


class _Best(TypedDict):
    """Best trial of a search, as stored."""

    score: float | None
    number: int
    recipe: str


def _choose(
    context: StepContext,
    bound: BoundAttempt,
    recipes: list[str],
    backbone: Model,
    train: Callable[[BoundAttempt], TrainedTrial],
) -> None:
    """Trains and scores every trial, and stores the best."""
    found: list[tuple[float | None, int, str]] = []
    with _scorer(context) as scorer:
        require_measurable(scorer, bound.inputs.config, backbone)
        for number, recipe in enumerate(recipes):
            trial = _bound_trial(context, bound, recipe, number)
            if not trial.store.exists(_SCORE):
                try:
                    result = score(scorer, bound.inputs.config, train(trial).backbone)
                except Interrupted:
                    raise Interrupted(
                        "Stopped on request. Resume the run to continue the search."
                    ) from None
                trial.store.write(_SCORE, canonical_json({"score": result}))
            stored = json_object(trial.store.read(_SCORE), _SCORE)["score"]
            found.append((cast("float | None", stored), number, recipe))
    best = max(found, key=lambda item: _order(item[0], item[1]), default=None)
    named = {"score": best[0], "number": best[1], "recipe": best[2]} if best else None
    bound.store.write(_BEST, canonical_json(named))


def _order(score: float | None, number: int) -> tuple[bool, float, int]:
    """Returns the rank of a trial: a trial without a score is last, then the first trial wins."""
    return score is not None, score or 0.0, -number


@contextmanager
def _scorer(context: StepContext) -> Generator[UserStore]:
    with open_private(context, "evaluation") as folder:
        yield UserStore(folder)


def _bound_trial(
    context: StepContext, bound: BoundAttempt, recipe: str, number: int
) -> BoundAttempt:
    """Returns the attempt with the inputs and the working state of one trial."""
    inputs = trial_inputs(bound.inputs, recipe, number)
    reservation, name = inputs.reservation, _folder(number)
    state = open_store(context.private("train", f"attempt-{reservation.attempt}", name))
    origin = Origin(inputs.run_id, reservation.attempt, inputs.inputs_sha)
    trust = bound.ledger.chain.trust
    store = SignedState(state, bound.token, origin, bound.signer, trust, reservation.sequence)
    return replace(bound, inputs=inputs, store=store, log=RoundLog(store, inputs.inputs_sha))


def _folder(number: int) -> str:
    return f"trial-{number:06d}"


def _delete_others(bound: BoundAttempt, best: int) -> None:
    """Deletes the working state of all trials but the best."""
    for name in bound.store.list("trial-"):
        if not name.startswith(f"{_folder(best)}/"):
            bound.store.delete(name)


@contextmanager
def silent() -> Generator[None]:
    """Suppresses all log lines: their number would reveal the number of trials."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
