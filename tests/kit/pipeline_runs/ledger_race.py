"""Processes that reserve at the same time on one ledger, on whatever store."""

import os

from fedemb.errors import BudgetExceeded
from tests.kit import ledger_kit as kit_
from tests.kit.pipeline_runs.forked import SERVER

PATIENCE = 500
"""Seconds until all have started; a loaded machine takes its time."""


def _reserve(kit, environment, barrier, number, answers):
    os.environ.update(environment)
    try:
        ledger = kit.open()
        barrier.wait(PATIENCE)
        reservation = ledger.reserve(run_id=f"run-{number}", content=kit_.content(rounds=40))
        answers.put((number, reservation.sequence, ""))
    except BudgetExceeded as error:
        answers.put((number, -1, str(error)))
    except BaseException as error:
        answers.put((number, -2, repr(error)))


def check(root, ledger_uri, processes: int) -> None:
    """Accepted runs never pass the cap, nothing is lost, no number is taken twice."""
    kit = kit_.make(root, ledger_uri)
    barrier, answers = SERVER.Barrier(processes), SERVER.Queue()
    workers = [
        SERVER.Process(
            target=_reserve, args=(kit, dict(os.environ), barrier, number, answers), daemon=True
        )
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    found = [answers.get(timeout=PATIENCE) for _ in workers]
    for worker in workers:
        worker.join(60)
    broken = [text for _, sequence, text in found if sequence == -2]
    assert not broken, broken[0]
    accepted = {number: sequence for number, sequence, _ in found if sequence > 0}
    # A run of 40 rounds costs 0.4036 of divergence at order 8; the cap leaves room for 6.
    assert len(accepted) == min(processes, 6)
    assert sorted(accepted.values()) == list(range(1, len(accepted) + 1))
    ledger = kit.open()
    ledger.verify()
    runs = {key[0]: item.reserve.sequence for key, item in ledger.state.attempts.items()}
    assert runs == {f"run-{number}": sequence for number, sequence in accepted.items()}
    assert ledger.spent("all/0").epsilon <= ledger.terms.epsilon_cap
