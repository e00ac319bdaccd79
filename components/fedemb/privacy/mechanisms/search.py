"""Terms of a private search: the law of the number of trials, and the event of the whole search.

A search trains a random number of trials and releases only the best one. Its price is a little more
than that of one trial (Papernot and Steinke, arXiv 2110.03620, theorems 2 and 6), if the number of
trials is drawn from the law below and stays secret.
"""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from fedemb.foundation.section import Section
from fedemb.privacy.randomness.trials import Law

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe

SHAPES: dict[Law, float] = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
"""Shape parameter of `RepeatAndSelectDpEvent` for each law."""


class SearchTerms(Section):
    """Law of the number of trials of a private search."""

    mean_trials: Annotated[float, Field(gt=1, le=1000)]
    """Mean number of trials, above 1 and at most 1000."""
    law: Law = "logarithmic"
    """Law of the number of trials. `logarithmic`: lowest price, most variable number; `geometric`:
    in between; `poisson`: number close to the mean, highest price. With `poisson` a search has no
    trial with probability exp(-mean_trials), and then ends without a model."""

    def event(self, trial: dpe.DpEvent) -> dpe.DpEvent:
        """Returns the event of the whole search, from the event of one trial."""
        from dp_accounting import dp_event as dpe

        return dpe.RepeatAndSelectDpEvent(trial, self.mean_trials, SHAPES[self.law])
