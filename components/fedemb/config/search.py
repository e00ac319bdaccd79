"""Settings of a private search over declared recipes."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, JsonValue, model_validator

from fedemb.foundation.section import Name
from fedemb.privacy.mechanisms.search import SearchTerms

SECTIONS = ("training.", "mechanism.")
"""Prefixes of the settings that a recipe may change."""
FIXED = (
    "training.algorithm",
    "training.backend",
    "training.seed",
    "training.parallel_clients",
    "training.checkpoint_every",
    "training.server.other_ema_decays",
    "mechanism.kind",
)
"""Settings that all trials share: other steps read them, or they change nothing in the model."""


class SearchConfig(SearchTerms):
    """Private search over declared recipes; `fedemb tune` fills this section.

    The training step trains a secret number of trials, each with a recipe drawn at random, and
    keeps only the best. The price of the whole search is charged before the first trial.
    """

    recipes: Annotated[dict[Name, dict[str, JsonValue]], Field(min_length=2, max_length=200)]
    """Name of each recipe, and the settings of `training` and `mechanism` that it changes (dotted
    name: value); 2 to 200. No recipe may cost more than the run without changes."""

    @property
    def names(self) -> list[str]:
        """Names of the recipes, sorted: a trial draws an index in this list."""
        return sorted(self.recipes)

    @model_validator(mode="after")
    def _only_tunable_settings(self) -> Self:
        for name, settings in self.recipes.items():
            for setting in settings:
                if not setting.startswith(SECTIONS) or setting.startswith(FIXED):
                    raise ValueError(
                        f"recipe {name!r} sets {setting}, which all trials share. Set it in the "
                        "configuration; recipes change settings of training and mechanism"
                    )
        distinct = {
            tuple(sorted((k, repr(v)) for k, v in s.items())) for s in self.recipes.values()
        }
        if len(distinct) < len(self.recipes):
            raise ValueError("two recipes have the same settings. List each once")
        return self
