"""The model card: Markdown with the metadata that the Hugging Face Hub reads, from the report."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from typing import Any

import yaml

from fedemb.config import RunConfig
from fedemb.config.policy import Unit
from fedemb.documents.classifier import ClassifierReport
from fedemb.documents.evidence import Evidence
from fedemb.documents.fields import Interval
from fedemb.documents.ledger_record import DecisionRecord
from fedemb.documents.privacy_report import (
    PrivacyReport,
    UsefulClassifier,
    assumptions,
    limitations,
)
from fedemb.documents.utility import AnyUtility
from fedemb.foundation.document import Written
from fedemb.ledger import Ledger
from fedemb.privacy.accounting.units import UNITS
from fedemb.privacy.mechanisms.registry import plan_from_json
from fedemb.reports.audit_words import audit_sentence
from fedemb.reports.epsilon_meaning import markdown, meaning
from fedemb.reports.formats import signer_name
from fedemb.reports.privacy_report_words import (
    BACKENDS,
    OVERLAPS,
    report_sentence,
    start_licence,
)
from fedemb.reports.utility_words import best_start, floors_sentence, utility_sentence
from fedemb.steps.release_model.headline import release_headline

HUB_LICENCES = frozenset(
    (
        "agpl-3.0",
        "apache-2.0",
        "bsd-2-clause",
        "bsd-3-clause",
        "cc-by-4.0",
        "cc-by-nc-4.0",
        "cc-by-nc-sa-4.0",
        "cc-by-nd-4.0",
        "cc-by-sa-4.0",
        "cc0-1.0",
        "cdla-permissive-2.0",
        "eupl-1.2",
        "gpl-3.0",
        "isc",
        "lgpl-3.0",
        "mit",
        "mpl-2.0",
        "openrail",
        "unlicense",
    )
)
"""Licence identifiers of the Hub that a model may use; any other is `other` with a name."""

_DESPITE_NOISE = (
    "Trained although the noise is far above the noise of every measured run that gained. Reason: "
)


def model_card(
    evidence: Evidence,
    signed: Written[PrivacyReport],
    ledger: Ledger,
    waived: Sequence[str],
    named: tuple[str, str],
) -> str:
    """Returns the card of a release, whose waivers and approvals are in the ledger."""
    report, (name, version) = signed.body, named
    shown = release_headline(evidence, signed, waived, ledger)
    config, figures = evidence.config, shown.figures.sentence()
    despite = config.release.train_despite_noise
    metadata = _metadata(evidence, report, named)
    metadata |= {"release_state": shown.state, "waived": list(waived)}
    paragraphs = [
        "\n".join(["---", yaml.safe_dump(metadata, sort_keys=False, width=999).rstrip(), "---"]),
        f"# {name} {version}",
        f"**{as_text(shown.title)}.** {figures[:1].upper()}{figures[1:]}.",
        _description(config, report),
        *_privacy(evidence, signed, ledger),
        "## Utility",
        utility_sentence(evidence.utility.body),
        floors_sentence(config.release.min_gain_over_public, config.release.no_worse_than),
        *([_DESPITE_NOISE + as_text(despite)] if despite else ()),
        _of_outputs(config, report),
        "## Use",
        _example(config),
        "## Licence",
        as_text(config.release.licence) or "Not stated: ask the provider of this model.",
        "## Public backbone",
        f"{config.pretraining.kind}; {as_text(config.pretraining.provenance) or 'no public data'}; "
        f"licence: {as_text(start_licence(config.pretraining))}; overlap with private images: "
        f"{OVERLAPS[report.pretraining.overlaps_private]}.",
        *_features(config),
        "## Verify",
        "```\nfedemb verify . --trust trust.json\n```",
        "`trust.json` comes from the data owner. A key inside a bundle proves nothing.",
    ]
    return "\n\n".join(paragraphs) + "\n"


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
        "epsilon": report.accounting.epsilon,
        "delta": report.accounting.delta,
        "privacy_unit": unit,
        "cumulative_epsilon": report.cumulative.max_block_epsilon,
        "epsilon_cap": report.cumulative.cap,
        "audit_level": report.setting.recurring.audit_level,
        "model_sha": report.model_sha,
        "config_sha": report.provenance.config_sha,
    }


def _description(config: RunConfig, report: PrivacyReport) -> str:
    model = config.model
    return (
        f"{_what(config)} a `{model.backbone}` backbone, for images of {model.image_size} x "
        f"{model.image_size} pixels, {model.channels} channel{'s' if model.channels > 1 else ''}. "
        f"Trained with {report.unit.unit}-level differential privacy by "
        f"`{config.training.algorithm}` on {BACKENDS[report.mechanism.backend]}."
    )


def _privacy(evidence: Evidence, signed: Written[PrivacyReport], ledger: Ledger) -> list[str]:
    """Returns the paragraphs of the section on privacy."""
    report, audit = signed.body, evidence.audit.body
    unit, cumulative = report.unit.unit, report.cumulative
    rests_on = assumptions(unit)
    not_covered = limitations(unit)
    waivers = [ledger.chain.records[item.sequence] for item in report.waivers]
    found = meaning(plan_from_json(evidence.plan.body.plan), report.guarantee)
    return [
        "## Privacy",
        f"This model carries {report_sentence(report)}. {UNITS[unit].covered}",
        f"With all earlier runs of policy `{cumulative.policy_id}`, no block of "
        f"{UNITS[unit].many} that this one trained on has spent more than epsilon "
        f"{cumulative.max_block_epsilon or math.inf:.4g} of its cap {cumulative.cap:g}.",
        *(markdown(found) if found else ()),
        "Assumptions:",
        "\n".join(f"- {rests_on[code]}" for code in report.assumptions),
        "Limitations:",
        "\n".join(f"- {not_covered[code]}" for code in report.limitations),
        f"Audit: {audit_sentence(audit)}",
        *(
            f"Waived by {as_text(signer_name(item.actor))}: `{item.content(DecisionRecord).code}`, "
            f"{as_text(item.content(DecisionRecord).reason)}"
            for item in waivers
        ),
        *(
            f"Release approved by {as_text(item.actor)} at {item.time}"
            for item in ledger.state.approvals_of(report.model_sha, signed.sha, report.approve_by)
        ),
    ]


def _example(config: RunConfig) -> str:
    """Returns a Python example that loads the model."""
    model = config.model
    outputs = "probabilities" if model.classes else "embeddings"
    return "\n".join(
        [
            "```python",
            "import tensorflow as tf",
            "from preprocessing import PhotoReader  # of this folder",
            f"reader = PhotoReader({model.image_size}, {model.channels}, {model.aspect_ratio!r}, "
            f"{config.data.max_pixels})",
            'pixels = reader.read(open("photo.jpg", "rb").read())',
            'model = tf.saved_model.load("saved_model").signatures["serving_default"]',
            f'{outputs} = model(images=tf.constant(pixels[None]))["{outputs}"]',
            "```",
        ]
    )


def as_text(words: str) -> str:
    """Escapes external text for Markdown: on one line, without markup, HTML or links."""
    shown = "".join(c if c.isprintable() else " " for c in words)
    return re.sub(r"([\\`*_\[\]#|~!])", r"\\\1", html.escape(" ".join(shown.split()), quote=False))


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
    words = f"{utility.headline_words}: gain over {best_start(utility)}"
    found["gain_over_best_start"] = (words, utility.gain)
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


def _features(config: RunConfig) -> list[str]:
    """Returns how the features of an imported backbone were made, as one line or none."""
    model, start = config.model, config.pretraining
    directions = model.principal_directions or model.whitened_directions
    parts = {
        f"taps {', '.join(model.taps)}": model.taps,
        "mean over the mirror image": model.mirrored,
        "square roots": model.square_root,
        f"{directions:,} directions of one size": directions,
    }
    used = [part for part, set_ in parts.items() if set_]
    if start.kind != "import" or not used:
        return []
    images = start.source and as_text(start.source.uri.rsplit("/", 1)[-1])
    constants = f"; constants from at most {start.constant_images:,} images of {images}"
    return [f"Features: {as_text('; '.join(used))}{constants if images else ''}."]


def _what(config: RunConfig) -> str:
    if config.model.classes:
        return f"Classifier of {len(config.model.classes)} classes on"
    kept = config.model.keep_public_features
    what = f" and the public features, weighted {kept:g}," if kept else ""
    part = "private part of length" if kept else "length"
    return f"Image embeddings of {part} {config.model.embedding_dim}{what} from"


def _of_outputs(config: RunConfig, report: PrivacyReport) -> str:
    if isinstance(report.utility, UsefulClassifier):
        return f"Classes, in the order of the outputs: {', '.join(config.model.classes)}."
    return (
        "Embeddings of different releases do not compare: the space of this one is "
        f"`{report.utility.embedding_space_id}`. Embed stored images again after "
        "an upgrade."
    )
