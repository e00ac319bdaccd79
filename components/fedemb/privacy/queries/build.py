"""Builds the mechanism of an attempt, under the attempt's own keys."""

# tensorflow-privacy ships no types; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING

from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.queries.running import Mechanism
from fedemb.privacy.randomness.keyed_noise import KeyedNoise
from fedemb.privacy.randomness.noise import run_key

if TYPE_CHECKING:
    from fedemb.privacy.queries.protocol import dp_query


def build_mechanism(  # noqa: PLR0917 - five identify the attempt, in the order of its reservation
    plan: MechanismPlan,
    root_key: bytes,
    run_id: str,
    attempt: int,
    inputs_sha: str,
    query: dp_query.SumAggregationDPQuery | None = None,
) -> Mechanism:
    """Returns the mechanism of one attempt.

    Args:
      plan: planned and reserved mechanism.
      root_key: 32 secret bytes of the reservation.
      run_id: id of the run.
      attempt: the attempt of the run, from its reservation.
      inputs_sha: digest of all inputs; other inputs give other coins and noise.
      query: a third party's sum query instead of the built-in one, see `require_declared`.

    Raises:
      Refused: a third party's query does not declare the guarantee that the plan accounts for.
    """
    ids = (run_id, attempt, inputs_sha)
    noise = KeyedNoise(plan, run_key(root_key, "noise", *ids))
    coin_key = run_key(root_key, "coins", *ids)
    if query is not None:
        from fedemb.privacy.queries.third_party import QueryMechanism

        return QueryMechanism(plan, coin_key, noise, query)
    return Mechanism(plan, coin_key, noise)
