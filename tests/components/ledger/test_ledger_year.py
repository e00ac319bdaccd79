"""A year of weekly runs with random crashes and retries: the account holds."""

import numpy as np
import pytest
from dp_accounting import NeighboringRelation

from fedemb.errors import BudgetExceeded
from fedemb.keys import reservation_key_name
from fedemb.ledger.budget import renyi_epsilon
from fedemb.privacy.accounting import rdp_of
from tests.kit import ledger_kit as kit_

ORDER = 8.0
REPLACE_ONE = NeighboringRelation.REPLACE_ONE


def _live(kit, random, weeks: int, noise: float, rounds: int):
    """Lives through the weeks; returns rounds charged by run, and the run that was refused."""
    charged: dict[str, int] = {}
    for week in range(weeks):
        run_id = f"week-{week:02d}"
        content = kit_.content(noise=noise, rounds=rounds)
        try:
            reservation = kit.open().reserve(run_id=run_id, content=content)
        except BudgetExceeded:
            return charged, run_id
        charged[run_id] = rounds
        fate = random.choice(["well", "crash before key", "crash in training", "stopped", "void"])
        if fate == "void":
            kit.open().void(reservation, "nothing started")
            del charged[run_id]
            continue
        if fate == "crash before key":
            continue  # no one came back: charged in full
        for _ in range(int(random.integers(1, 4))):  # retries of a killed pod repeat each act
            assert kit.open().reserve(run_id=run_id, content=content) == reservation
            kit_.bind(kit.open(), reservation)
        if fate == "crash in training":
            continue
        started = rounds if fate == "well" else int(random.integers(1, rounds))
        kit.keys.load_or_create(reservation_key_name(run_id, 1))
        for _ in range(int(random.integers(1, 3))):
            kit_.commit(kit, kit.open(), reservation, started)
        charged[run_id] = started
    return charged, None


def _recomputed(charged: dict[str, int], noise: float) -> float:
    """Independent of the ledger: divergence of one round, times all rounds charged."""
    one = float(rdp_of(kit_.event(noise, 1), REPLACE_ONE, [ORDER])[0])
    return renyi_epsilon(one * sum(charged.values()), ORDER, kit_.DELTA)


@pytest.mark.parametrize(("weeks", "seed"), [(10, 1), pytest.param(52, 2, marks=pytest.mark.slow)])
def test_year_of_crashes_equals_an_independent_recomputation(tmp_path, weeks, seed):
    kit = kit_.make(tmp_path, epsilon_cap=6.0)
    random = np.random.default_rng(np.random.SeedSequence([seed]))
    charged, refused = _live(kit, random, weeks, noise=4.0, rounds=30)
    assert refused is None
    ledger = kit.open()
    ledger.verify()
    assert ledger.spent("all/0").epsilon == pytest.approx(_recomputed(charged, 4.0), rel=1e-6)


@pytest.mark.parametrize("seed", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_run_that_would_cross_the_cap_is_refused_before_it_reads(tmp_path, seed):
    kit = kit_.make(tmp_path, epsilon_cap=2.5)
    random = np.random.default_rng(np.random.SeedSequence([seed]))
    charged, refused = _live(kit, random, 52, noise=2.0, rounds=30)
    assert refused is not None
    ledger = kit.open()
    ledger.verify()
    assert ledger.spent("all/0").epsilon == pytest.approx(_recomputed(charged, 2.0), rel=1e-6)
    assert _recomputed({**charged, refused: 30}, 2.0) > 2.5
    assert (refused, 1) not in ledger.state.attempts
    assert not kit.keys.exists(reservation_key_name(refused, 1))
