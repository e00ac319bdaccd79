"""Registers a published release with MLflow or Kubeflow's Model Registry, by their own clients.

Registration follows the release and does not change it. It is idempotent: a registry that already
has the bundle, by digest, stays unchanged. Only public information of the bundle is sent.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedemb.config import RunConfig
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.utility import utility_kind
from fedemb.documents.verdict import ReleaseManifest, VerdictDocument
from fedemb.errors import InputError
from fedemb.foundation.addresses import in_time
from fedemb.foundation.canonical_json import file_digest
from fedemb.foundation.document import read
from fedemb.foundation.environment import require_modules
from fedemb.release import bundle as parts
from fedemb.reports.headline import RunFacts, headline
from fedemb.reports.mlflow import TrackedRun, client_of, log_run

BUNDLE = "fedemb.bundle_sha"
"""Property that identifies a release."""
SECONDS = 60.0
"""Time limit of a registration."""
TOKEN = "/var/run/secrets/kubeflow/pipelines/token"
"""Default path of a pod's token in Kubeflow."""


@dataclass(frozen=True)
class Release:
    """Information sent to a registry."""

    name: str
    version: str
    uri: str
    """Address of the bundle."""
    run: TrackedRun
    properties: dict[str, str]

    @classmethod
    def of(cls, bundle: Path, uri: str) -> Release:
        """Reads a verified bundle."""
        manifest = read(bundle / parts.MANIFEST, ReleaseManifest).body
        report = read(bundle / parts.REPORT, PrivacyReport)
        config = RunConfig.model_validate(json.loads((bundle / "config.json").read_bytes()))
        utility = read(bundle / "utility_report.json", utility_kind(config.task))
        verdict = read(bundle / "verdict.json", VerdictDocument).body
        facts = RunFacts(verdict, report.body, utility.body, released=True)
        run = TrackedRun(
            name=report.body.run_id,
            headline=headline(facts),
            config=config,
            documents={"privacy_report": report, "utility_report": utility},
            signatures="checked",
        )
        properties = {
            **run.tags(),
            BUNDLE: file_digest(bundle / parts.MANIFEST),
            "fedemb.report_sha": report.sha,
            "fedemb.unit": report.body.unit.unit,
            "fedemb.ledger_head": report.body.cumulative.ledger_head,
            "fedemb.waived": ", ".join(verdict.waived) or "none",
            "fedemb.approved_by": ", ".join(item.actor for item in verdict.approvals) or "none",
        }
        return cls(manifest.name, manifest.version, uri, run, properties)


def register(release: Release, address: str) -> str:
    """Registers a release at an address of `storage.registries`. Idempotent.

    Returns: Reason of the failure; empty on success.

    Raises:
      InputError: the address scheme is not supported.
    """
    kind, _, url = address.partition("+")
    if kind not in ("mlflow", "kubeflow") or not url.startswith(("http://", "https://")):
        raise InputError(
            f"the scheme of registry {address!r} is not supported; use mlflow+https:// or "
            "kubeflow+https://"
        )
    late = f"it did not answer within {SECONDS:g} seconds"
    return in_time(partial(_problem, kind, url.rstrip("/"), release), SECONDS, late)


def _problem(kind: str, url: str, release: Release) -> str:
    try:
        _mlflow(url, release) if kind == "mlflow" else _kubeflow(url, release)
    except Exception as error:  # a registry error does not affect the release
        return str(error)[:800] or type(error).__name__
    return ""


def _mlflow(url: str, release: Release) -> None:
    """Writes the run, and a version of the registered model."""
    client, name, sha = client_of(url), release.name, release.properties[BUNDLE]
    run = log_run(release.run, url)
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    if client.search_model_versions(f"name = '{name}' and tags.`{BUNDLE}` = '{sha}'"):
        return
    # A server rejects a folder of another machine as a source.
    source = release.uri if "://" in release.uri else f"fedemb://{name}/{release.version}"
    figures = {f"fedemb.{key}": repr(value) for key, value in release.run.metrics().items()}
    tags = release.properties | figures | {"fedemb.release.bundle": release.uri}
    client.create_model_version(
        name, source, run, tags, description=release.run.headline.sentence()
    )


def _kubeflow(url: str, release: Release) -> None:
    """Creates a registered model, its version with properties, and its artifact."""
    require_modules("model_registry")
    from model_registry import ModelRegistry

    path = Path(os.environ.get("KF_PIPELINES_SA_TOKEN_PATH", TOKEN))
    token = path.read_text().strip() if path.is_file() else None
    registry = ModelRegistry(url, author="fedemb", user_token=token, async_runner=asyncio.run)
    name, version = release.name, release.version
    figures = {f"fedemb.{key}": value for key, value in release.run.metrics().items()}
    held = registry.get_registered_model(name) and registry.get_model_version(name, version)
    if held is None:
        registry.register_model(
            name,
            release.uri,
            version=version,
            model_format_name="tensorflow-saved-model",
            model_format_version="2",
            version_description=release.run.headline.sentence(),
            metadata={**release.properties, **figures},
        )
    elif (held.custom_properties or {}).get(BUNDLE) != release.properties[BUNDLE]:
        raise ValueError(f"{name} {version} exists with another content. Use a new version.")
    elif registry.get_model_artifact(name, version) is None:
        raise ValueError(f"{name} {version} has no artifact. Delete that version, then repeat.")
