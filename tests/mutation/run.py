"""Tries mutants, stores the result of each, and resumes after the last run.

    python -m tests.mutation.run MUTANTS.jsonl [--minutes 60] [--results FILE]

Mutants of all groups are tried in one random order with a fixed seed, so that a run that is
stopped tried a sample of all files.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.mutation.changes import Mutant
from tests.mutation.groups import GROUPS, REPOSITORY, files, group_of

RESULTS = Path(__file__).with_name("results.jsonl")
BATCH = 240
"""Number of mutants of the common order that are distributed at a time."""
SPENT = 2.5
"""Processor seconds of tests for one mutant, as the first pass measured them."""
STATUSES = ("caught", "survived", "not_reached", "stopped", "not_code")


def tried(results: Path) -> list[dict[str, object]]:
    """What became of the mutants so far; a later line of a mutant takes the place of an earlier."""
    lines = map(json.loads, results.read_text().splitlines()) if results.exists() else []
    return list({line["key"]: line for line in lines}.values())


def summary(results: Path) -> str:
    """How many mutants of each group were tried, by what became of them, as a Markdown table."""
    counts = Counter(
        (str(group_of(f"components/{line['key']}")), str(line["status"])) for line in tried(results)
    )
    rows = [
        [group, sum(counts[group, status] for status in STATUSES)]
        + [counts[group, status] for status in STATUSES]
        for group in GROUPS
    ]
    rows.append(["all", *(sum(int(row[column]) for row in rows) for column in range(1, 7))])
    head = "| group | tried | " + " | ".join(STATUSES) + " |\n|---"
    lines = [" | ".join(map(str, row)) for row in rows]
    return head + "|---" * 6 + "|\n" + "".join(f"| {line} |\n" for line in lines)


def waiting(mutants: Path, results: Path, only: str | None, *, again: bool) -> list[Mutant]:
    """The mutants that were not tried yet, or those that survived, in the order of a run."""
    status = {str(line["key"]): line["status"] for line in tried(results)}
    listed = [Mutant(**json.loads(line)) for line in mutants.read_text().splitlines()]
    wanted = "survived" if again else None
    left = [
        mutant
        for mutant in listed
        if group_of(mutant.file) in ((only,) if only else GROUPS)
        and status.get(mutant.key) == wanted
    ]
    return sorted(left, key=lambda mutant: mutant.turn)


def _try_group(
    group: str, mutants: list[Mutant], results: Path, until: float, spent: float
) -> None:
    """Never returns: runs the mutants of one group in this process."""
    from tests.mutation.fresh import Fresh

    fresh = Fresh()  # before anything of the product is imported
    import pytest

    from tests.mutation.server import Server

    server = Server(group, mutants, results, until=until, fresh=fresh, spent=spent)
    options = ["-q", "-s", "-p", "no:cacheprovider", "--no-header"]
    code = pytest.main([*options, *(f"tests/{test}" for test in GROUPS[group].tests)], [server])
    fresh.close()
    os._exit(int(code))


def _in_children(jobs: list[Callable[[], None]], most: int) -> bool:
    """Runs jobs that never return, so many at a time; whether all exit codes were 0."""
    running, good = 0, True
    for job in [*jobs, *[None] * most]:
        if running == most or (job is None and running):
            good &= os.wait()[1] == 0
            running -= 1
        if job is not None:
            if os.fork() == 0:
                job()
            running += 1
    return good


def main() -> None:
    """Tries what was not tried yet, and prints a summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("mutants", type=Path, nargs="?", help="Mutants as listed by mutants.py.")
    parser.add_argument("--files", action="store_true", help="Print the files that are changed.")
    parser.add_argument("--minutes", type=float, default=60.0, help="Time limit, 60 by default.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="File that is added to.")
    parser.add_argument("--group", choices=GROUPS, help="Only the mutants of one group.")
    parser.add_argument("--most", type=int, default=None, help="Mutants at most.")
    parser.add_argument("--processes", type=int, default=2, help="Groups at a time, 2 by default.")
    parser.add_argument("--again", action="store_true", help="Try survivors with every quick test.")
    parser.add_argument("--spent", type=float, help="Processor seconds of tests for one mutant.")
    parser.add_argument("--survivors", action="store_true", help="Print what no test noticed.")
    parser.add_argument("--summary", action="store_true", help="Print the table of results.")
    asked = parser.parse_args()
    if asked.survivors:
        alive = [line for line in tried(asked.results) if line["status"] == "survived"]
        sys.stdout.write("".join(f"{json.dumps(line)}\n" for line in alive))
    elif asked.summary:
        sys.stdout.write(summary(asked.results))
    elif asked.files or asked.mutants is None:
        sys.stdout.write("\n".join(files()) + "\n")
    else:
        sys.exit(0 if _try_all(asked) else 1)


def _try_all(asked: argparse.Namespace) -> bool:
    os.chdir(REPOSITORY)
    until = time.monotonic() + 60 * asked.minutes
    left = waiting(asked.mutants, asked.results, asked.group, again=asked.again)[: asked.most]
    spent = asked.spent or (math.inf if asked.again else SPENT)
    good = True
    for first in range(0, len(left), BATCH):
        if time.monotonic() > until:
            break
        batch = left[first : first + BATCH]
        jobs: list[Callable[[], None]] = []
        for group in GROUPS:
            mutants = [mutant for mutant in batch if group_of(mutant.file) == group]
            if mutants:
                jobs.append(
                    lambda group=group, mutants=mutants: _try_group(
                        group, mutants, asked.results, until, spent
                    )
                )
        good &= _in_children(jobs, asked.processes)
        sys.stdout.write(summary(asked.results))
        sys.stdout.flush()
    return good


if __name__ == "__main__":
    main()
