"""The files of a bundle that follow from signed documents, such as the model card.

The card is Markdown with the metadata that the Hugging Face Hub reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from fedemb.config import StorageConfig
from fedemb.config.policy import Unit
from fedemb.documents.evidence import Evidence
from fedemb.documents.fields import Interval
from fedemb.documents.privacy_report import PrivacyReport, assumptions, limitations
from fedemb.documents.utility import AnyUtility, ClassifierReport
from fedemb.foundation.canonical_json import canonical_json
from fedemb.foundation.document import Written
from fedemb.foundation.files import write_bytes
from fedemb.ledger import Ledger
from fedemb.privacy.registry import plan_from_json
from fedemb.privacy.section import UNITS
from fedemb.release.decide import applied_waivers
from fedemb.reports import privacy_text
from fedemb.reports.headline import Headline, RunFacts, headline
from fedemb.reports.lineage import FILE_NAME, write_run
from fedemb.reports.pages import report_page
from fedemb.reports.report import render
from fedemb.reports.utility_text import (
    audit_sentence,
    best_baseline,
    floors_sentence,
    utility_sentence,
)
from fedemb.runtime.step import leading_to


def release_headline(
    evidence: Evidence, report: Written[PrivacyReport], waived: Sequence[str], ledger: Ledger
) -> Headline:
    """Returns the headline of a model that the gate allowed."""
    facts = RunFacts(report=report.body, utility=evidence.utility.body, released=True)
    return headline(facts, waivers=applied_waivers(ledger, waived, report.body))


ReleaseEvidence = tuple[Evidence, Written[PrivacyReport], Ledger]
"""Documents of a run, its signed report, and the ledger up to the release."""


def write_card(folder: Path, judged: ReleaseEvidence, waived: Sequence[str]) -> None:
    """Writes the configuration and the card of a bundle."""
    evidence, report, ledger = judged
    # Addresses of the stores are internal, and no digest of the run binds them.
    config, storage = evidence.config, StorageConfig().model_dump(mode="json")
    public = {**config.model_dump(mode="json"), "storage": storage}
    write_bytes(folder / "config.json", canonical_json(public))
    card = model_card(evidence, report, ledger, waived, config.released_as(report.body.run_id))
    write_bytes(folder / "README.md", card.encode())


def write_pages(
    folder: Path, judged: ReleaseEvidence, *, verdict: str, time: datetime | None = None
) -> None:
    """Writes the page and the lineage of a bundle, which need kfp and OpenLineage.

    Args:
      folder: receives the files.
      judged: content of the files.
      verdict: digest of the signed verdict.
      time: time of the lineage; None: now.
    """
    evidence, report, ledger = judged
    # Rendered again from verified documents: the pipeline's page is not signed.
    page = report_page(report, evidence, ledger, leading_to("account_privacy"))
    write_bytes(folder / "privacy_report.html", page.encode())
    steps = leading_to("release_model")
    write_run(folder / FILE_NAME, evidence, steps, report, verdict=verdict, time=time)


HUB_LICENCES = re.findall(
    r"\S+",
    "agpl-3.0 apache-2.0 bsd-2-clause bsd-3-clause cc-by-4.0 cc-by-nc-4.0 cc-by-nc-sa-4.0 "
    "cc-by-nd-4.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-2.0 eupl-1.2 gpl-3.0 isc lgpl-3.0 mit "
    "mpl-2.0 openrail unlicense",
)
"""Licence identifiers of the Hub that a model may use; any other is `other` with a name."""


def model_card(
    evidence: Evidence,
    signed: Written[PrivacyReport],
    ledger: Ledger,
    waived: Sequence[str],
    named: tuple[str, str],
) -> str:
    """Returns the card of a release, whose waivers and approvals are in the ledger."""
    report, (name, version), config = signed.body, named, evidence.config
    shown, unit = release_headline(evidence, signed, waived, ledger), report.unit.unit
    metadata = _metadata(evidence, report, named) | {
        "release_state": shown.state,
        "waived": list(waived),
    }
    return render(
        "model_card.md.j2",
        metadata=yaml.safe_dump(metadata, sort_keys=False, width=999).rstrip(),
        name=name,
        version=version,
        shown=shown,
        config=config,
        report=report,
        cumulative=report.cumulative,
        unit=UNITS[unit],
        words=privacy_text,
        meaning=privacy_text.meaning(plan_from_json(evidence.plan.body.plan), report.guarantee),
        assumptions=assumptions(unit),
        limitations=limitations(unit),
        audit=audit_sentence(evidence.audit.body),
        waivers=[ledger.chain.records[item.sequence] for item in report.waivers],
        approvals=ledger.state.approvals_of(report.model_sha, signed.sha, report.approve_by),
        utility=utility_sentence(evidence.utility.body),
        space=getattr(evidence.utility.body, "embedding_space_id", None),
        groups=getattr(evidence.utility.body, "by_group" if config.model.classes else "subgroups"),
        floors=floors_sentence(config.release.min_gain_over_public, config.release.no_worse_than),
    )


def _metadata(
    evidence: Evidence, report: PrivacyReport, named: tuple[str, str]
) -> dict[str, object]:
    """Returns the fields that the Hub reads, without the state of the release."""
    config, unit = evidence.config, report.unit.unit
    task = "image-classification" if config.model.classes else "image-feature-extraction"
    name, version = named
    return {
        **licence_fields(config.release.licence),
        "library_name": "keras",
        "pipeline_tag": task,
        "tags": ["differential-privacy", f"{unit}-level", config.task],
        "model-index": [{"name": name, "results": _results(evidence.utility.body, task, unit)}],
        "version": version,
        "fedemb_version": metadata.version("fedemb"),
        "epsilon": report.accounting.epsilon,
        "delta": report.accounting.delta,
        "privacy_unit": unit,
        "cumulative_epsilon": report.cumulative.max_block_epsilon,
        "epsilon_cap": report.cumulative.cap,
        "model_sha": report.model_sha,
        "config_sha": report.provenance.config_sha,
    }


def licence_fields(words: str) -> dict[str, str]:
    """Returns the Hub's fields for a licence."""
    identifier = words.strip().lower()
    if identifier in HUB_LICENCES:
        return {"license": identifier}
    name = re.sub(r"[^a-z0-9.]+", "-", identifier).strip("-")
    link = "README.md#licence"
    return {"license": "other", "license_name": name or "not-stated", "license_link": link}


def _results(utility: AnyUtility, task: str, unit: Unit) -> list[dict[str, Any]]:
    """Returns the figures as a `model-index`; empty without measurements."""
    found: dict[str, tuple[str, Interval | None]]
    if isinstance(utility, ClassifierReport):
        found = {"accuracy": ("top-1", utility.headline())}
    else:
        found = {
            f"recall_at_far_{rate}": (f"recall at false accept rate {rate}", recall)
            for rate, recall in utility.recall_at_far.items()
        }
    words = f"{utility.headline_label}: gain over {best_baseline(utility)}"
    found["gain_over_best_baseline"] = (words, utility.gain)
    metrics = [
        {
            "type": kind,
            "name": f"{words} (95 % interval {figure.low:.4g} to {figure.high:.4g})",
            "value": figure.value,
        }
        for kind, (words, figure) in found.items()
        if figure is not None
    ]
    many = UNITS[unit].many
    dataset = {"type": "private", "name": f"held-out evaluation {many}, not public"}
    return [{"task": {"type": task}, "dataset": dataset, "metrics": metrics}] if metrics else []
