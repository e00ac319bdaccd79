"""A privacy guarantee as a sentence: epsilon with delta, unit, relation and accountant.

Source: Ponomareva et al., How to DP-fy ML (arXiv 2303.00654), section 5.3.3.
"""

# The numeric libraries ship no types; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dp_accounting.privacy_accountant import NeighboringRelation

from fedemb.errors import ArtifactError
from fedemb.foundation.canonical_json import JsonObject, ToJson
from fedemb.privacy.accounting.sampler_share import largest_epsilon
from fedemb.privacy.accounting.units import UNITS, Unit, count_of


def neighbours(relation: NeighboringRelation, unit: Unit) -> str:
    """Describes the allowed difference between two neighbouring data sets."""
    if relation is NeighboringRelation.REPLACE_SPECIAL:
        return f"one {unit}'s data is blanked out"
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        return f"one {unit} is added or removed"
    return f"one {unit} is added or removed (one virtual client's update is replaced)"


@dataclass(frozen=True, kw_only=True)
class PrivacyGuarantee:
    """(epsilon, delta)-differential privacy of one unit, and how it was computed."""

    epsilon: float
    """Bound on the log-ratio of probabilities; infinite without privacy."""
    delta: float
    """Total failure probability, `sampler_delta` included."""
    relation: NeighboringRelation
    """Neighbouring relation the accountant used."""
    accountant: str
    """`pld` or `rdp`."""
    rounds: int | None = None
    """Number of training rounds accounted for, if the event contains it."""
    sampler_delta: float = 0.0
    """Share of delta for the distance of drawn noise from true Gaussians, see `sampler_share`."""
    unit: Unit = "user"
    """Privacy unit that is protected."""

    def __str__(self) -> str:
        """Returns the guarantee as one sentence."""
        over = f" over {count_of(self.rounds, 'round')}" if self.rounds else ""
        whole = UNITS[self.unit].whole
        if math.isinf(self.epsilon):
            return (
                f"no differential privacy for {whole}{over}: epsilon is infinite; none up to "
                f"{largest_epsilon(self.delta, 1):.3g}, the most that the noise sampler allows at "
                f"delta {self.delta:.4g}, can be certified"
            )
        return (
            f"({self.epsilon:.4g}, {self.delta:.4g})-differential privacy for {whole}, "
            f"if {neighbours(self.relation, self.unit)}{over}; "
            f"{self.accountant.upper()} accountant under {self.relation.name}; delta includes "
            f"{self.sampler_delta:.2g} for the noise sampler; the guarantee is "
            "computational, as noise and coins come from ciphers"
        )

    def to_json(self) -> JsonObject:
        """Returns the guarantee for a plan or report; an infinite epsilon is written as null."""
        return {
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            "delta": self.delta,
            "relation": self.relation.name,
            "accountant": self.accountant,
            "rounds": self.rounds,
            "sampler_delta": self.sampler_delta,
            "unit": self.unit,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, ToJson]) -> PrivacyGuarantee:
        """Reads a guarantee written by `to_json`.

        Raises:
          ArtifactError: a field is missing or unknown.
        """
        fields = dict[str, Any](value)
        try:
            fields["relation"] = NeighboringRelation[fields["relation"]]
            fields["epsilon"] = math.inf if fields["epsilon"] is None else fields["epsilon"]
            guarantee = cls(**fields)
            if guarantee.unit not in UNITS:
                raise KeyError(f"unit {guarantee.unit!r}")
        except (KeyError, TypeError) as error:
            raise ArtifactError(
                f"the guarantee has a missing, unknown or invalid field ({error}); run the step "
                "that writes it again"
            ) from error
        return guarantee
