"""From the rows that are there to Markdown, JSON, figure and page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from fedemb.foundation.canonical_json import json_digest
from fedemb.foundation.files import write_bytes
from fedemb.foundation.json_files import read_json, write_json
from studies.utility.certify import certificates
from studies.utility.decide import Decided
from studies.utility.execute import Study
from studies.utility.page import verdict, write_study
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
PRICES = "fedemb/study_prices/1"


def write_report(study: Study, decided: Decided) -> list[str]:
    """Writes `study.md`, `study.json`, `study.svg` and `study.html` into the cache folder.

    Args:
      study: what and where.
      decided: contests and rows; what has no result yet is left out.

    Returns:
      Lines to print: the tables, what they say, where the page lies.
    """
    found = _found(study, decided.final)
    prices = {(row.method, row.noise): _prices(study, row) for row, _ in _first_seed(found)}
    lines = summarise(found, prices)
    changed = _found(study, decided.ablations)
    if changed and changed[0][0] != decided.ablations[0]:
        changed = []  # nothing to compare with yet
    tried = _found(study, [row for contest, _ in decided.contests for row in contest.tries])
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
    context = {
        "header": HEADER,
        "rows": [cells(line) for line in lines],
        "price_header": PRICE_HEADER,
        "prices": price_cells(lines),
        "contest_header": CONTEST_HEADER,
        "tried": recipes,
        "ablation_header": ABLATION_HEADER,
        "ablations": ablation_cells(changed),
        "ablation_noise": f"{changed[0][0].noise:g}" if changed else "-",
        "facts": _facts(study, [*found, *tried, *changed]),
    }
    write_study(folder, lines, context)
    return [*text, *summary, f"report: {folder / 'study.html'}"]


def _found(study: Study, rows: Sequence[Row]) -> list[tuple[Row, Result]]:
    return [(row, result) for row in rows if (result := study.result(row)) is not None]


def _first_seed(found: Sequence[tuple[Row, Result]]) -> list[tuple[Row, Result]]:
    return [(row, result) for row, result in found if row.seed == found[0][0].seed]


def _facts(study: Study, found: Sequence[tuple[Row, Result]]) -> list[tuple[str, Any]]:
    final = study.protocol.split("final")
    results = {study.path(row): result for row, result in found}.values()
    read = next((result for row, result in found if row.stage == "final"), None)
    people = read["people"] if read else {"train": "-", "evaluation": "-"}
    versions = next(iter(results))["versions"] if results else {}
    return [
        ("Public", ", ".join(final.public)),
        ("Recipes were chosen on", ", ".join(study.protocol.validation)),
        ("Evaluated on", ", ".join(final.evaluation)),
        ("People who train", people["train"]),
        ("People evaluated", people["evaluation"]),
        ("Trainings", len(results)),
        ("Hours of one core", f"{sum(result['seconds'] for result in results) / 3600:.1f}"),
        ("Images", study.data_sha[:12]),
        ("Libraries", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]


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


def price_path(study: Study, row: Row) -> Path:
    """Where the certificates of a row are kept: each takes a minute."""
    return study.cache / "prices" / f"{json_digest(_price_key(study, row))[:24]}.json"


def _prices(study: Study, row: Row) -> list[dict[str, Any]]:
    path = price_path(study, row)
    if path.exists():
        return cast("list[dict[str, Any]]", read_json(path, PRICES)["certificates"])
    key = _price_key(study, row)
    rounds = key["rounds"]
    result = certificates(row, rounds, rounds * key["epochs"], key["images"])
    write_json(path, PRICES, {"of": key, "certificates": result})
    return result
