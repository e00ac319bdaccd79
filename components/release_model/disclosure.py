"""Standard disclosure of a release, made of signed fields only.

Two forms of the same facts: statements by the topics of NIST SP 800-226, from epsilon down to data
collection, and an entry for the public registry of differential privacy deployments. A field that
no signed document holds is left to the publisher and listed, never guessed.

Sources: NIST SP 800-226 (March 2025), the differential privacy pyramid; fields of
https://github.com/opendp/deployments-registry-data, tests/good_deployments/template.yaml.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import yaml

from fedemb.documents.evidence import Evidence
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.release import BundleManifest
from fedemb.foundation.canonical_json import Json, JsonObject
from fedemb.foundation.document import Written
from fedemb.ledger import Ledger
from fedemb.privacy.accounting.units import UNITS, count_of
from fedemb.privacy.mechanisms.registry import plan_from_json
from fedemb.reports import mechanism_text
from fedemb.reports.audit_words import audit_sentence
from fedemb.reports.epsilon_meaning import meaning
from fedemb.reports.headline import Headline
from fedemb.reports.privacy_report_words import (
    OVERLAPS,
    TRUST,
    all_runs,
    assumptions,
    limitations,
    report_sentence,
)
from fedemb.reports.utility_words import utility_sentence
from fedemb.steps.release_model.headline import release_headline
from fedemb.steps.release_model.model_card import as_text

SCHEMA = "fedemb/disclosure/1"
PUBLISHER = "TO BE COMPLETED BY THE PUBLISHER"
"""Value of a registry field that no signed document holds; the registry's checks refuse it."""


class Statement(TypedDict):
    """Statement on a topic of NIST SP 800-226."""

    topic: str
    statement: str
    sources: tuple[str, ...]
    """Signed fields that the statement is made of: document and field."""


@dataclass(frozen=True)
class Disclosed:
    """A verified release."""

    manifest: Written[BundleManifest]
    evidence: Evidence
    report: Written[PrivacyReport]
    ledger: Ledger
    """Copy of the ledger in the bundle."""
    waived: tuple[str, ...]
    """Rules that the verdict waived."""

    @property
    def headline(self) -> Headline:
        """State and figures of the release."""
        return release_headline(self.evidence, self.report, self.waived, self.ledger)


class Disclosure(TypedDict):
    """Content of `disclosure.json`."""

    schema: str
    release: dict[str, str]
    parameters: JsonObject
    nist_sp_800_226: Sequence[Statement]
    deployment_registry: JsonObject
    to_be_completed: list[str]
    """Fields of the registry's entry that no signed document holds."""


def disclosure(release: Disclosed) -> Disclosure:
    """Returns the disclosure as JSON; the same release gives the same content."""
    manifest, report = release.manifest, release.report
    entry = registry_entry(release)
    return {
        "schema": SCHEMA,
        "release": {
            "name": manifest.body.name,
            "version": manifest.body.version,
            "run_id": report.body.run_id,
            "state": release.headline.title,
            "model_sha": report.body.model_sha,
            "privacy_report_sha": report.sha,
            "manifest_sha": manifest.sha,
        },
        "parameters": _parameters(report.body),
        "nist_sp_800_226": statements(release),
        "deployment_registry": entry,
        "to_be_completed": list(_left_open("", entry)),
    }


def _parameters(report: PrivacyReport) -> JsonObject:
    accounting, cumulative, mechanism = report.accounting, report.cumulative, report.mechanism
    return {
        "epsilon": accounting.epsilon,
        "delta": accounting.delta,
        "zcdp_rho": accounting.zcdp_rho,
        "cumulative_epsilon": cumulative.max_block_epsilon,
        "cumulative_delta": cumulative.delta,
        "epsilon_cap": cumulative.cap,
        "unit": report.unit.unit,
        "relation": report.adjacency.relation,
        "accountant": accounting.accountant,
        "accounting_library": f"{accounting.library} {accounting.version}",
        "noise_multiplier": mechanism.noise_multiplier,
        "l2_norm_clip": mechanism.clip.l2_norm_clip,
        "sampling_probability": mechanism.sampling_probability,
        "rounds": mechanism.rounds_run,
        "population_lower_bound": report.unit.population_lower_bound,
        "held_out_share": report.unit.held_out_share,
    }


def statements(release: Disclosed) -> tuple[Statement, ...]:
    """Returns one statement per topic, from the top of the pyramid to its base."""
    return (*_guarantee(release), *_algorithm(release), *_environment(release))


def _on(topic: str, statement: str, sources: tuple[str, ...]) -> Statement:
    return {"topic": topic, "statement": statement, "sources": sources}


def _guarantee(release: Disclosed) -> Iterator[Statement]:
    report, evidence = release.report.body, release.evidence
    unit = UNITS[report.unit.unit]
    plan = plan_from_json(evidence.plan.body.plan)
    total = all_runs(report) or (
        f"This run is the first that was charged on these {unit.many} under policy "
        f"{report.cumulative.policy_id!r}, whose cap is {report.cumulative.cap:g}."
    )
    found = meaning(plan, report.guarantee)
    yield _on(
        "Privacy parameters",
        f"{report_sentence(report)}. {_sentence(total)}"
        + (f" {found.sentence()}" if found else ""),
        ("privacy_report.guarantee", "privacy_report.cumulative", "privacy_plan.plan"),
    )
    yield _on(
        "Differential privacy variant",
        f"Approximate differential privacy, (epsilon, delta). The privacy loss is computed by the "
        f"{report.accounting.accountant.upper()} accountant of {report.accounting.library} "
        f"{report.accounting.version} for the relation {report.adjacency.accounting_relation}.",
        ("privacy_report.accounting", "privacy_report.adjacency"),
    )
    yield _on(
        "Unit of privacy",
        f"{unit.whole[:1].upper()}{unit.whole[1:]}. {mechanism_text.adjacency(plan)} "
        f"{unit.covered}",
        ("privacy_report.unit", "privacy_report.adjacency", "privacy_plan.plan"),
    )
    yield _on(
        "Composition and other releases",
        f"{_sentence(total)} {limitations(unit=report.unit.unit)['other_policies']} "
        f"{_tuned(report)}; earlier runs on the same {unit.many}: "
        f"{report.tuning.other_runs_before}.",
        (
            "privacy_report.cumulative",
            "privacy_report.tuning",
            "privacy_report.limitations",
        ),
    )


def _tuned(report: PrivacyReport) -> str:
    """Returns the choice of hyperparameters: a private search, or what is declared."""
    search = report.tuning.search
    if search is not None:
        return (
            f"Hyperparameters chosen by a private search over {search.recipes} recipes, whose "
            "whole price is the epsilon of this run"
        )
    return (
        f"Declared: hyperparameters chosen on {report.tuning.data} data; private tuning trials: "
        f"{report.tuning.trials}"
    )


def _algorithm(release: Disclosed) -> Iterator[Statement]:
    report, evidence = release.report.body, release.evidence
    mechanism, audit = report.mechanism, evidence.audit.body
    plan = plan_from_json(evidence.plan.body.plan)
    yield _on(
        "Algorithm and correctness",
        f"{evidence.config.training.algorithm} with mechanism {mechanism.name}: "
        f"{mechanism_text.participants(plan)}, {count_of(mechanism.rounds_run, 'round')}, "
        f"clipping norm {mechanism.clip.l2_norm_clip:g}, {mechanism.noise.family} noise of "
        f"multiplier {mechanism.noise_multiplier:g}, sum divided by the public constant "
        f"{mechanism.normalizer.value:g}. {audit_sentence(audit)}",
        ("privacy_report.mechanism", "privacy_plan.plan", "audit_report"),
    )
    groups = _groups(release)
    yield _on(
        "Utility and bias",
        f"{utility_sentence(evidence.utility.body)} {groups} These figures are exact on held-out "
        f"{UNITS[report.unit.unit].many}, whom the guarantee does not cover.",
        ("utility_report", "privacy_report.limitations"),
    )


def _groups(release: Disclosed) -> str:
    utility = release.evidence.utility.body
    parts = getattr(utility, "subgroups", None) or getattr(utility, "by_group", None)
    if parts is None:
        return "No groups were declared, so a difference between groups was not measured."
    shown = getattr(parts, "measured", None) or getattr(parts, "shown", None) or ()
    return (
        f"Groups measured: {len(shown)}; groups too small to measure: {parts.too_small}; the "
        "utility report has the figure of each."
    )


def _environment(release: Disclosed) -> Iterator[Statement]:
    report, config = release.report.body, release.evidence.config
    unit = report.unit.unit
    rests_on = assumptions(unit)
    not_covered = limitations(unit, search=report.tuning.search is not None)
    noise = report.mechanism.noise
    yield _on(
        "Query model",
        "Not interactive: one trained model is released, and nothing of the rounds before it.",
        ("privacy_report.setting.releases",),
    )
    trusted = "; ".join(TRUST[code] for code in report.setting.trust)
    yield _on(
        "Trust model",
        f"Central model. Trusted: {trusted}. {rests_on['computational']}",
        ("privacy_report.setting", "privacy_report.assumptions"),
    )
    yield _on(
        "Implementation",
        f"Sums are integers on a grid of 2^-{noise.grid_bits} clipping norms, which excludes "
        f"attacks on floating-point sums; noise generator {noise.generator}, keys "
        f"{noise.key}. {not_covered['timing']}",
        ("privacy_report.mechanism.noise", "privacy_report.limitations"),
    )
    yield _on(
        "Security and access control",
        f"{rests_on['private_root']} The report names the digest of the code, of the "
        "configuration and of every file of the model.",
        ("privacy_report.assumptions", "privacy_report.provenance"),
    )
    held_out = report.unit.held_out_share
    share = f"a share of {held_out:g}" if held_out else "those with the held-out values"
    yield _on(
        "Data collection exposure",
        f"Images were collected in one place under the id of their {unit}; the collection itself "
        f"has no differential privacy. Held out for evaluation: {share}. Public images: "
        f"{OVERLAPS[report.pretraining.overlaps_private]}.",
        ("privacy_report.setting", "privacy_report.unit", "privacy_report.pretraining"),
    )
    yield _on(
        "Privacy hazards",
        " ".join(not_covered[code] for code in report.limitations),
        ("privacy_report.limitations",),
    )
    terms = config.release.licence or "no licence is stated"
    yield _on(
        "Release",
        f"{release.headline.title}. Licence of the model: {terms}.",
        ("verdict", "ledger", "config.release"),
    )


def registry_entry(release: Disclosed) -> JsonObject:
    """Returns an entry with the fields of the registry of differential privacy deployments.

    `number_of_privacy_units` is left out: the report has a lower bound only.
    """
    report, manifest = release.report.body, release.manifest.body
    by_topic = {item["topic"]: item["statement"] for item in statements(release)}
    slug = f"{manifest.name}-{manifest.version}".lower().replace("_", "-").replace(".", "-")
    return {
        "url_slug": slug,
        "deployment": {
            "basic": _basic(release),
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": f"Images, each under the id of one {report.unit.unit}"
                if report.unit.unit == "user"
                else "Images, each one row",
                "unprotected_quantities": "Public constants of the mechanism; figures on "
                "held-out records in the utility report; duration of the run.",
            },
            "privacy_loss": {
                "privacy_unit": f"{report.unit.unit.capitalize()}-level",
                "privacy_unit_details": by_topic["Unit of privacy"],
                "privacy_parameters": {
                    "epsilon": report.accounting.epsilon,
                    "delta": report.accounting.delta,
                },
                "privacy_parameters_details": by_topic["Privacy parameters"],
            },
            "deployment_model": _model(report, by_topic),
            "implementation": _implementation(release, by_topic),
            "administrative": {
                "evidence_sources": PUBLISHER,
                "status": "Draft",
                "registry_authors": [PUBLISHER],
                "tier": 3,
            },
        },
    }


def _basic(release: Disclosed) -> JsonObject:
    report, manifest, config = release.report.body, release.manifest.body, release.evidence.config
    what = "classifier" if config.model.classes else "embedding model"
    return {
        "name": f"{manifest.name} {manifest.version}",
        "data_curators": [{"data_curator_name": PUBLISHER, "data_curator_type": PUBLISHER}],
        "description": f"Image {what} trained with {report.unit.unit}-level differential privacy "
        f"by {config.training.algorithm}.",
        "intended_use": PUBLISHER,
        "data_product_type": "Machine learning model",
        "data_product_region": PUBLISHER,
        "data_product_sector": PUBLISHER,
        "publication_date": report.time[:10],
    }


def _model(report: PrivacyReport, by_topic: Mapping[str, str]) -> JsonObject:
    planned = report.setting.recurring.runs_planned
    once = planned == 1
    return {
        "model_name": "Central",
        "model_name_details": by_topic["Data collection exposure"],
        "trust_assumptions": by_topic["Trust model"],
        "actors": "Data owner and operator of the training job (trusted); recipients of the model, "
        "adversaries included (not trusted).",
        "release_type": "One release" if once else "Many releases",
        "release_type_details": f"Run {report.setting.recurring.run_index} of policy "
        f"{report.cumulative.policy_id!r}; runs planned: {planned or 'not fixed'}. "
        f"{by_topic['Composition and other releases']}",
        "data_source_type": PUBLISHER,
        "data_source_type_details": PUBLISHER,
        "access_type": "Non-interactive",
        "access_type_details": by_topic["Query model"],
    }


def _implementation(release: Disclosed, by_topic: Mapping[str, str]) -> JsonObject:
    report, config = release.report.body, release.evidence.config
    return {
        "preprocessing_and_hyperparameter_tuning": f"Tuning on {config.tuning.data} data: "
        f"{' '.join(config.tuning.method.split())}. At most "
        f"{config.partition.max_images_per_user} images of a user.",
        "mechanisms": f"{by_topic['Algorithm and correctness']} {by_topic['Implementation']}",
        "composition": by_topic["Composition and other releases"],
        "post_processing": "Everything after the noised sums: server optimizer, averages of the "
        "weights, export.",
        "justification": PUBLISHER,
        "utility": by_topic["Utility and bias"],
        "additional_information": f"Model {report.model_sha}; privacy report "
        f"{release.report.sha}; manifest {release.manifest.sha}. Verify the bundle with "
        "`fedemb verify`.",
    }


def markdown(content: Disclosure) -> str:
    """Returns a disclosure as Markdown."""
    release = content["release"]
    name = as_text(f"{release['name']} {release['version']}")
    lines = [f"# Differential privacy disclosure of {name}", ""]
    lines += ["Made of the signed fields of the release, by the topics of NIST SP 800-226.", ""]
    lines += ["| parameter | value |", "|---|---|"]
    lines += [
        f"| `{key}` | {'-' if value is None else as_text(str(value))} |"
        for key, value in content["parameters"].items()
    ]
    for item in content["nist_sp_800_226"]:
        sources = ", ".join(f"`{source}`" for source in item["sources"])
        lines += ["", f"## {item['topic']}", "", as_text(item["statement"]), ""]
        lines += [f"Signed fields: {sources}."]
    lines += ["", "## To be completed by the publisher", ""]
    lines += ["No signed document holds these fields of the deployment registry:", ""]
    lines += [f"- `{path}`" for path in content["to_be_completed"]]
    lines += ["", "## Digests", ""]
    lines += [f"- {key}: `{release[key]}`" for key in release if key.endswith("_sha")]
    return "\n".join(lines) + "\n"


def registry_yaml(content: Disclosure) -> str:
    """Returns the entry of the deployment registry as YAML."""
    return yaml.safe_dump(content["deployment_registry"], sort_keys=False, width=999)


def _left_open(path: str, value: Json) -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _left_open(f"{path}.{name}" if path else name, item)
    elif isinstance(value, list):
        for item in value:
            yield from _left_open(path, item)
    elif value == PUBLISHER:
        yield path


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
