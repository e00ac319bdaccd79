"""Runs the contests, then what they chose: test people are read when all of them are decided."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from fedemb.data.sources import find_parts, read_part
from studies.utility.execute import Say, Study, execute
from studies.utility.grid import (
    OF_PRESET,
    Contest,
    ablation_rows,
    contests,
    final_rows,
    public_contests,
)
from studies.utility.protocol import Stage
from studies.utility.rows import Net, Row


@dataclass(frozen=True)
class Decided:
    """Results of a study so far.

    Attributes:
      contests: as far as their starts are decided, each with its winner or None.
      final: the rows of the table; none before all contests are decided.
      ablations: the first is the unchanged recipe; none unless asked for.
    """

    contests: Sequence[tuple[Contest, Row | None]]
    final: Sequence[Row]
    ablations: Sequence[Row]


def run_study(
    study: Study, *, budget: float, jobs: int, with_ablations: bool = False, say: Say = print
) -> Decided:
    """Runs what is not there yet, within a budget in seconds.

    Args:
      study: what and where.
      budget: a row that would pass it is not started.
      jobs: processes, one core each.
      with_ablations: change one thing of the chosen recipe at a time too.
      say: told of every row and every winner, in one line.
    """
    deadline = time.monotonic() + budget

    def run(rows: Sequence[Row]) -> None:
        left = max(0.0, deadline - time.monotonic())
        execute(study, rows, budget=left, jobs=jobs, say=say)

    def winner(contest: Contest) -> Row | None:
        found = {row: study.headline(row) for row in contest.tries}
        return contest.winner({row: value for row, value in found.items() if value is not None})

    def decide(found: Sequence[Contest]) -> list[tuple[Contest, Row | None]]:
        run([row for contest in found for row in contest.tries])
        decided = [(contest, winner(contest)) for contest in found]
        for contest, won in decided:
            if won is not None:
                say(f"chosen for {contest.net} {contest.method} {contest.noise:g}: {won.label}")
        return decided

    stages: tuple[Stage, ...] = ("selection", "final")
    people: dict[Stage, int] = {stage: people_who_train(study, stage) for stage in stages}
    public = decide(public_contests())
    starts: dict[Net, Row] = {contest.net: won for contest, won in public if won is not None}
    decided = [*public, *decide(contests(starts, people["selection"]))]
    winners = [won for _, won in decided if won is not None]
    if len(winners) < len(decided):
        return Decided(decided, (), ())
    final = final_rows(winners, people)
    run(final)
    ablations: list[Row] = []
    if with_ablations:
        ablations = ablation_rows(
            next(row for row in winners if (row.net, row.method, row.noise) == OF_PRESET)
        )
        run(ablations)
    return Decided(decided, final, ablations)


def people_who_train(study: Study, stage: Stage) -> int:
    """How many, read from the data."""
    names = study.protocol.split(stage).train
    source = study.base.data.source.model_copy(update={"where": {study.protocol.column: names}})
    column = source.columns.user_id
    assert column is not None, "the preset names it"
    found: set[str] = set()
    for part in find_parts(source, [column]):
        for batch in read_part(source, part, [column]):
            found.update(map(str, batch.columns[column]))
    return len(found)
