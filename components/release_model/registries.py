"""Registers a published release with MLflow, Kubeflow's Model Registry, or a webhook.

Registration follows the release and does not change it. It is idempotent: a registry that already
has the bundle, by digest, stays unchanged, and a partial registration is completed. Only public
information of the bundle is sent.

Kubeflow's registry is called by its REST API: its client is asynchronous and pins other packages.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

from fedemb.config import RunConfig
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.release import BundleManifest
from fedemb.documents.utility import utility_kind
from fedemb.documents.verdict import VerdictDocument
from fedemb.errors import InputError
from fedemb.foundation.canonical_json import Json, ToJson
from fedemb.foundation.deadline import in_time
from fedemb.foundation.digests import file_digest
from fedemb.foundation.document import read
from fedemb.foundation.http_calls import SECONDS, call_json, list_at, value_at
from fedemb.reports.headline import RunFacts, headline
from fedemb.reports.mlflow.log import client_of, log_values, open_run
from fedemb.reports.privacy_report_words import guarantee_sentence
from fedemb.reports.utility_words import best_start
from fedemb.serving import bundle as parts

BUNDLE = "fedemb.bundle_sha"
"""Property that identifies a release."""


@dataclass(frozen=True)
class Release:
    """Information sent to a registry."""

    name: str
    version: str
    uri: str
    """Address of the bundle."""
    description: str
    properties: Mapping[str, str]
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, bundle: Path, uri: str) -> Release:
        """Reads a verified bundle."""
        manifest = read(bundle / parts.MANIFEST, BundleManifest).body
        signed = read(bundle / parts.REPORT, PrivacyReport)
        config = RunConfig.model_validate(json.loads((bundle / "config.json").read_bytes()))
        utility = read(bundle / "utility_report.json", utility_kind(config.task)).body
        report, gain = signed.body, utility.gain
        verdict = read(bundle / "verdict.json", VerdictDocument).body
        facts = RunFacts(verdict, report, utility, released=True)
        shown = headline(facts)
        approved = ", ".join(item.actor for item in verdict.approvals)
        figures = {
            "epsilon": report.accounting.epsilon,
            "delta": report.accounting.delta,
            "cumulative_epsilon": report.cumulative.max_block_epsilon,
            "epsilon_cap": report.cumulative.cap,
            "headline": (found := utility.headline()) and found.value,
            "gain": gain and gain.value,
            "gain_low": gain and gain.low,
            "gain_high": gain and gain.high,
        }
        properties = {
            BUNDLE: file_digest(bundle / parts.MANIFEST),
            "fedemb.model_sha": report.model_sha,
            "fedemb.report_sha": signed.sha,
            "fedemb.run_id": report.run_id,
            "fedemb.policy_id": report.cumulative.policy_id,
            "fedemb.unit": report.unit.unit,
            "fedemb.ledger_head": report.cumulative.ledger_head,
            "fedemb.ledger_sequence": str(report.cumulative.ledger_sequence),
            "fedemb.headline_of": utility.headline_words if utility.measured else "not measured",
            "fedemb.gain_over": best_start(utility) if gain else "not measured",
            "fedemb.state": shown.state,
            "fedemb.headline": shown.title,
            "fedemb.waived": ", ".join(verdict.waived) or "none",
            "fedemb.approved_by": approved or "none",
        }
        return cls(
            name=manifest.name,
            version=manifest.version,
            uri=uri,
            description=f"{shown.sentence()}. This model carries "
            f"{guarantee_sentence(report.guarantee)}.",
            properties=properties,
            metrics={name: value for name, value in figures.items() if value is not None},
        )


def register(release: Release, address: str) -> str:
    """Registers a release at an address of `storage.registries`. Idempotent.

    Returns: Reason of the failure; empty on success.

    Raises:
      InputError: the address scheme is not supported.
    """
    kind, _, rest = address.rpartition("+")
    if kind not in KINDS or not rest.startswith(("http://", "https://")):
        raise InputError(
            f"the scheme of registry {address!r} is not supported; use mlflow+https://, "
            "kubeflow+https:// or https://"
        )
    late = f"it did not answer within {SECONDS} seconds"
    return in_time(partial(_problem, KINDS[kind], rest.rstrip("/"), release), SECONDS, late)


def _problem(tell: Callable[[str, Release], None], url: str, release: Release) -> str:
    try:
        tell(url, release)
    except Exception as error:  # a registry error does not affect the release
        return str(error)[:300] or type(error).__name__
    return ""


def _mlflow(url: str, release: Release) -> None:
    """Creates an MLflow run with the figures, and a version of the registered model."""
    client, name = client_of(url), release.name
    key = (BUNDLE, release.properties[BUNDLE])
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    if client.search_model_versions(f"name = '{name}' and tags.`{key[0]}` = '{key[1]}'"):
        return
    now, tags = int(1000 * time.time()), {**release.properties, "fedemb.version": release.version}
    run = open_run(client, name, release.version, key, now)
    log_values(client, run, release.metrics, now, tags=tags)
    client.set_terminated(run, "FINISHED", now)
    figures = {f"fedemb.{key}": repr(value) for key, value in release.metrics.items()}
    # A server rejects a folder of another machine as a source.
    source = release.uri if "://" in release.uri else f"fedemb://{name}/{release.version}"
    tags |= {**figures, "fedemb.serving.bundle": release.uri}
    client.create_model_version(name, source, run, tags, description=release.description)


def _kubeflow(url: str, release: Release) -> None:
    """Creates a registered model, its version with properties, and its artifact."""
    api = f"{url}/api/model_registry/v1alpha3"
    token = Path(os.environ.get("KF_PIPELINES_SA_TOKEN_PATH", TOKEN))
    headers = {"Authorization": f"Bearer {token.read_text().strip()}"} if token.is_file() else {}

    def call(path: str, body: ToJson = None, known: str = "") -> Json:
        return call_json(f"{api}/{path}", headers, body, known)

    model = call(f"registered_model?{urlencode({'name': release.name})}", known="404")
    model = model or call("registered_models", {"name": release.name, "owner": "fedemb"})
    owner = str(value_at(model, "id"))
    named = urlencode({"name": release.version, "parentResourceId": owner})
    version = call(f"model_version?{named}", known="404")
    properties = {
        **{
            key: {"metadataType": "MetadataStringValue", "string_value": value}
            for key, value in release.properties.items()
        },
        **{
            f"fedemb.{key}": {"metadataType": "MetadataDoubleValue", "double_value": value}
            for key, value in release.metrics.items()
        },
    }
    version = version or call(
        "model_versions",
        {
            "name": release.version,
            "registeredModelId": owner,
            "author": "fedemb",
            "description": release.description,
            "customProperties": properties,
        },
    )
    held = value_at(version, "customProperties")
    if not isinstance(held, dict) or held.get(BUNDLE) != properties[BUNDLE]:
        raise ValueError(
            f"{release.name} {release.version} exists with another content. Use a new version."
        )
    artifacts = f"model_versions/{value_at(version, 'id')}/artifacts"
    if not list_at(call(artifacts), "items"):
        artifact = {
            "artifactType": "model-artifact",
            "name": f"{release.name}-{release.version}",
            "uri": release.uri,
            "modelFormatName": "tensorflow-saved-model",
            "modelFormatVersion": "2",
        }
        call(artifacts, artifact)


TOKEN = "/var/run/secrets/kubeflow/pipelines/token"
"""Default path of a pod's token in Kubeflow."""


def _webhook(url: str, release: Release) -> None:
    """Sends one POST of JSON with the bundle's digest as key, so a receiver detects repetitions."""
    headers = {"Idempotency-Key": release.properties[BUNDLE]}
    if token := os.environ.get("FEDEMB_WEBHOOK_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    call_json(url, headers, asdict(release), answers=False)


KINDS: Mapping[str, Callable[[str, Release], None]] = {
    "mlflow": _mlflow,
    "kubeflow": _kubeflow,
    "": _webhook,
}
"""Prefix before the `+` of an address -> registration function."""
