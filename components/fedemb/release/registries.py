"""Registers a published release with MLflow or Kubeflow's Model Registry, by their own clients.

Registration follows the release and does not change it. It is idempotent: a registry that already
has the bundle, by digest, stays unchanged. Only public information of the bundle is sent.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

from fedemb.config import RunConfig
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.utility import utility_kind
from fedemb.documents.verdict import ReleaseManifest, VerdictDocument
from fedemb.errors import InputError
from fedemb.foundation.addresses import in_time
from fedemb.foundation.document import read
from fedemb.foundation.environment import require_modules
from fedemb.foundation.files import read_regular
from fedemb.release import bundle as parts
from fedemb.reports.headline import RunFacts, headline
from fedemb.reports.mlflow import TrackedRun, client_of, log_run

BUNDLE = "fedemb.bundle_sha"
"""Property that identifies a release."""


@dataclass(frozen=True)
class Release:
    """Information sent to a registry."""

    name: str
    version: str
    uri: str
    """Address of the bundle."""
    run: TrackedRun
    properties: dict[str, str | float]

    @classmethod
    def of(cls, bundle: Path, uri: str) -> Release:
        """Reads a verified bundle."""
        manifest = read(bundle / parts.MANIFEST, ReleaseManifest)
        report = read(bundle / parts.REPORT, PrivacyReport)
        config = RunConfig.model_validate(json.loads(read_regular(bundle / "config.json")))
        utility = read(bundle / "utility_report.json", utility_kind(config.task))
        verdict = read(bundle / "verdict.json", VerdictDocument).body
        facts = RunFacts(verdict, report.body, utility.body, released=True)
        documents = {"privacy_report": report, "utility_report": utility}
        run = TrackedRun(report.body.run_id, headline(facts), config, documents)
        properties = {
            **run.tags(),
            BUNDLE: manifest.sha,
            "fedemb.report_sha": report.sha,
            "fedemb.unit": report.body.unit.unit,
            **{f"fedemb.{name}": value for name, value in run.metrics().items()},
            "fedemb.ledger_head": report.body.cumulative.ledger_head,
            "fedemb.waived": ", ".join(verdict.waived) or "none",
            "fedemb.approved_by": ", ".join(item.actor for item in verdict.approvals) or "none",
        }
        return cls(manifest.body.name, manifest.body.version, uri, run, properties)


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
    tell = _mlflow if kind == "mlflow" else _kubeflow
    return in_time(lambda: tell(url.rstrip("/"), release))


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
    tags = {key: str(value) for key, value in release.properties.items()}
    tags["fedemb.release.bundle"] = release.uri
    client.create_model_version(
        name, source, run, tags, description=release.run.headline.sentence()
    )


def _kubeflow(url: str, release: Release) -> None:
    """Creates a registered model, its version with properties, and its artifact.

    The client reads the token of a pod at `KF_PIPELINES_SA_TOKEN_PATH`.
    """
    require_modules("model_registry")
    from model_registry import ModelRegistry

    registry = ModelRegistry(url, author="fedemb", async_runner=asyncio.run)
    name, version = release.name, release.version
    held = registry.get_registered_model(name) and registry.get_model_version(name, version)
    if held is None:
        registry.register_model(
            name,
            release.uri,
            version=version,
            model_format_name="tensorflow-saved-model",
            model_format_version="2",
            version_description=release.run.headline.sentence(),
            metadata=release.properties,
        )
    elif (held.custom_properties or {}).get(BUNDLE) != release.properties[BUNDLE]:
        raise ValueError(f"{name} {version} exists with another content. Use a new version.")
    elif registry.get_model_artifact(name, version) is None:
        raise ValueError(f"{name} {version} has no artifact. Delete that version, then repeat.")
