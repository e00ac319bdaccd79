"""From the rows that are there to Markdown, JSON, figure and page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedemb.documents.artifacts import json_digest, read_json, write_bytes, write_json
from studies.utility.certify import certificates
from studies.utility.execute import Study
from studies.utility.page import verdict, write_study
from studies.utility.rows import Row
from studies.utility.table import (
    ABLATION_HEADER,
    HEADER,
    PRICE_HEADER,
    Result,
    ablation_cells,
    cells,
    markdown,
    price_cells,
    summarise,
)

SCHEMA = "fedemb/study/1"
PRICES = "fedemb/study_prices/1"


def write_report(study: Study, final: Sequence[Row], ablations: Sequence[Row]) -> list[str]:
    """Writes `study.md`, `study.json`, `study.svg` and `study.html` into the cache folder.

    Args:
      study: what and where.
      final: rows of the table; those without a result are left out.
      ablations: rows of the second table; the first is the unchanged recipe.

    Returns:
      Lines to print: the tables, what they say, where the page lies.
    """
    found = _found(study, final)
    prices = {
        (row.method, row.noise): _prices(study, row)
        for row, _ in found
        if row.seed == final[0].seed
    }
    lines = summarise(found, prices)
    changed = _found(study, ablations)
    if changed and changed[0][0] != ablations[0]:
        changed = []  # nothing to compare with yet
    text = markdown(HEADER, [cells(line) for line in lines])
    text += ["", *markdown(PRICE_HEADER, price_cells(lines))]
    if changed:
        text += ["", *markdown(ABLATION_HEADER, ablation_cells(changed))]
    summary = verdict(lines)
    folder = study.cache
    write_bytes(folder / "study.md", ("\n".join([*text, "", summary]) + "\n").encode())
    body: dict[str, Any] = {
        "protocol": study.protocol.name,
        "splits": {
            stage: study.protocol.split(stage)._asdict() for stage in ("selection", "final")
        },
        "data_sha": study.data_sha,
        "lines": [line.to_json() for line in lines],
        "ablations": [
            {"label": row.label, "recall": result["recall"], "settings": dict(row.settings)}
            for row, result in changed
        ],
        "code_sha": sorted({result["code_sha"] for _, result in [*found, *changed]}),
        "summary": summary,
    }
    write_json(folder / "study.json", SCHEMA, body)
    context = {
        "header": HEADER,
        "rows": [cells(line) for line in lines],
        "price_header": PRICE_HEADER,
        "prices": price_cells(lines),
        "ablation_header": ABLATION_HEADER,
        "ablations": ablation_cells(changed),
        "ablation_noise": f"{changed[0][0].noise:g}" if changed else "-",
        "facts": _facts(study, found, changed),
    }
    write_study(folder, lines, context)
    return [*text, "", summary, f"report: {folder / 'study.html'}"]


def _found(study: Study, rows: Sequence[Row]) -> list[tuple[Row, Result]]:
    return [(row, result) for row in rows if (result := study.result(row)) is not None]


def _facts(
    study: Study, found: Sequence[tuple[Row, Result]], changed: Sequence[tuple[Row, Result]]
) -> list[tuple[str, Any]]:
    final, results = study.protocol.split("final"), [r for _, r in [*found, *changed]]
    people = results[0]["people"] if results else {"train": 0, "evaluation": 0}
    versions = results[0]["versions"] if results else {}
    return [
        ("Public", ", ".join(final.public)),
        ("Recipes were chosen on", ", ".join(study.protocol.validation)),
        ("Evaluated on", ", ".join(final.evaluation)),
        ("People who train", people["train"]),
        ("People evaluated", people["evaluation"]),
        ("Rows", len(results)),
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
        return read_json(path, PRICES)["certificates"]
    key = _price_key(study, row)
    rounds = key["rounds"]
    result = certificates(row, rounds, rounds * key["epochs"], key["images"])
    write_json(path, PRICES, {"of": key, "certificates": result})
    return result
