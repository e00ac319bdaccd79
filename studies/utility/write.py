"""From the rows that are there to Markdown, JSON and figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fedemb.foundation.canonical_json import json_digest
from fedemb.foundation.document import write_json
from fedemb.foundation.files import write_bytes
from studies.table_file import TableFile
from studies.utility.certify import certificates
from studies.utility.decide import Decided
from studies.utility.execute import Study
from studies.utility.page import figure, standalone, verdict
from studies.utility.rows import Row
from studies.utility.table import (
    ABLATION_HEADER,
    CONTEST_HEADER,
    HEADER,
    PRICE_HEADER,
    Result,
    ablation_cells,
    cells,
    contest_cells,
    markdown,
    price_cells,
    summarise,
)

SCHEMA = "fedemb/study/2"


def write_report(study: Study, decided: Decided) -> list[str]:
    """Writes `study.md`, `study.json` and `study.svg` into the cache folder.

    Args:
      study: what and where.
      decided: contests and rows; what has no result yet is left out.

    Returns:
      Lines to print: the tables, what they say, where they are.
    """
    found = study.results(decided.final)
    certified = {(row.method, row.noise): _prices(study, row) for row, _ in _first_seed(found)}
    lines = summarise(found, certified)
    changed = study.results(decided.ablations)
    if changed and changed[0][0] != decided.ablations[0]:
        changed = []  # nothing to compare with yet
    tried = study.results(row for contest, _ in decided.contests for row in contest.tries)
    recall = {row: next(iter(result["recall"].values())) for row, result in tried}
    recipes = contest_cells(((one.tries, won) for one, won in decided.contests), recall)
    text = [*markdown(CONTEST_HEADER, recipes), ""]
    if lines:
        text += [*markdown(HEADER, [cells(line) for line in lines]), ""]
        text += [*markdown(PRICE_HEADER, price_cells(lines)), ""]
    if changed:
        text += [*markdown(ABLATION_HEADER, ablation_cells(changed)), ""]
    summary = verdict(lines)
    folder = study.cache
    write_bytes(folder / "study.md", ("\n".join([*text, *summary]) + "\n").encode())
    body: dict[str, Any] = {
        "protocol": study.protocol.name,
        "splits": {
            stage: study.protocol.split(stage)._asdict() for stage in ("selection", "final")
        },
        "data_sha": study.data_sha,
        "lines": [line.to_json() for line in lines],
        "contests": [
            {
                "net": contest.net,
                "method": contest.method,
                "noise": contest.noise,
                "tries": [
                    {"recipe": asdict(row), "recall": recall.get(row), "chosen": row is won}
                    for row in contest.tries
                ],
            }
            for contest, won in decided.contests
        ],
        "ablations": [
            {"label": row.label, "recall": result["recall"], "settings": dict(row.settings)}
            for row, result in changed
        ],
        "code_sha": sorted({result["code_sha"] for _, result in [*found, *tried, *changed]}),
        "summary": summary,
    }
    write_json(folder / "study.json", SCHEMA, body)
    if lines:
        write_bytes(folder / "study.svg", standalone(figure(lines)))
    return [*text, *summary, f"report: {folder / 'study.md'}"]


def _first_seed(found: Sequence[tuple[Row, Result]]) -> list[tuple[Row, Result]]:
    return [(row, result) for row, result in found if row.seed == found[0][0].seed]


def _price_key(study: Study, row: Row) -> dict[str, Any]:
    config = row.config(study.base, row.users_per_client * row.clients_per_round)
    return {
        "method": row.method,
        "noise": row.noise,
        "users_per_client": row.users_per_client,
        "rounds": config.mechanism.rounds,
        "epochs": config.training.local.epochs,
        "images": config.partition.max_images_per_user,
    }


def prices(study: Study) -> TableFile:
    """The table of certificates: each takes a minute."""
    return TableFile(study.cache / "prices.jsonl")


def price_name(study: Study, row: Row) -> str:
    """Name of a row's certificates in the table, there or not."""
    return json_digest(_price_key(study, row))[:24]


def _prices(study: Study, row: Row) -> list[dict[str, Any]]:
    table, name, key = prices(study), price_name(study, row), _price_key(study, row)
    found = table.rows().get(name)
    if found is None:
        rounds = key["rounds"]
        result = certificates(row, rounds, rounds * key["epochs"], key["images"])
        found = {"of": key, "certificates": result}
        table.put(name, found)
    return found["certificates"]
