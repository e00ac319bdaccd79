"""Reads runs back from an artifact store, as run directories that hold their small documents.

A published run has the layout of `artifact_store`. Nothing in the store is trusted: each document
counts only if a key of the ledger signed it, as on the machine of the run. The configuration of the
manifest counts only if the signed privacy report names its digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel

from fedemb.config import RunConfig
from fedemb.config.digest import config_digest
from fedemb.config.policy import StorageConfig
from fedemb.errors import ArtifactError, FedEmbError, InputError, StorageError
from fedemb.foundation.canonical_json import sha256_hex
from fedemb.foundation.files import write_bytes
from fedemb.pipelines.run.artifact_store import MANIFEST
from fedemb.pipelines.run.directory import RunDirectory, RunState, checked_run_id
from fedemb.pipelines.run.signed import signed_report
from fedemb.pipelines.steps import pipeline_of
from fedemb.storage import Store, join, open_store

DOCUMENTS = {
    "privacy_plan": "",
    "reservation": "",
    "privacy_report": "",
    "utility_report": "",
    "audit_report": "",
    "verdict": "",
    "pretrained": "/pretrained.json",
}
"""Output -> the document in it; empty: the output itself. Models and pages are not read."""
_MOST = 16 << 20
"""Maximum bytes of a manifest or document."""


class _Listed(BaseModel):
    step: str
    name: str
    sha256: str


class _Manifest(BaseModel):
    config: dict[str, object]
    exit_code: int | None = None
    failed_step: str | None = None
    error: str | None = None
    seconds: dict[str, float] = {}
    artifacts: list[_Listed]


def is_artifact_store(address: str) -> bool:
    """Returns whether runs at an address are published ones: a bucket, or a folder of that layout.

    A folder of runs has `<run>/config.yaml` instead.
    """
    if "://" in address:
        return True
    folder = Path(address)
    return not any(folder.glob("*/config.yaml")) and any(folder.glob(f"public/*/{MANIFEST}"))


def published_runs(
    address: str, into: Path, skipped: Callable[[str], None]
) -> Iterator[RunDirectory]:
    """Yields the runs of an artifact store by name, the last first, copied into an empty folder.

    `skipped` is called with one sentence for each run that cannot be read.

    Raises:
      StorageError: the store cannot be read.
    """
    public = open_store(join(address, "public"))
    found = (name.split("/") for name in public.list())
    names = sorted((parts[0] for parts in found if parts[1:] == [MANIFEST]), reverse=True)
    for run_id in names:
        try:
            run = _run(public, run_id, join(address, "ledger"), into)
        except StorageError:
            raise
        except FedEmbError as error:
            skipped(str(error))
            continue
        yield run


def published_run(address: str, run_id: str, into: Path) -> RunDirectory:
    """Returns one run of an artifact store.

    Raises:
      InputError: the store has no such run.
      ArtifactError: its manifest or configuration is not one that a run published.
      StorageError: the store cannot be read.
    """
    public = open_store(join(address, "public"))
    if not public.exists(f"{checked_run_id(run_id)}/{MANIFEST}"):
        raise InputError(
            f"No published run {run_id} in {address}. Use a name that `fedemb runs {address}` "
            "lists."
        )
    return _run(public, run_id, join(address, "ledger"), into)


def _run(public: Store, run_id: str, ledger: str, into: Path) -> RunDirectory:
    manifest = _manifest(public, run_id)
    try:
        config = RunConfig.as_written(manifest.config)
    except ValueError as error:
        raise ArtifactError(
            f"{run_id}/{MANIFEST} has no valid configuration ({error}). Check who may write to the "
            "public root."
        ) from error
    config = config.model_copy(update={"storage": StorageConfig(ledger=ledger)})
    run = RunDirectory.create(into, run_id, config)
    listed = {(row.step, row.name): row.sha256 for row in manifest.artifacts}
    for step, outputs in pipeline_of(config).published().items():
        for name in outputs:
            if (step, name) in listed and name in DOCUMENTS:
                inner = DOCUMENTS[name]
                data = _document(public, f"{run_id}/{step}/{name}{inner}")
                if not inner and sha256_hex(data) != listed[step, name]:
                    raise ArtifactError(
                        f"{run_id}/{step}/{name} was changed after it was published. Check who may "
                        "write to the public root."
                    )
                target = run.public / "published" / step.replace("_", "-") / f"{name}{inner}"
                write_bytes(target, data)
    run.write_state(
        RunState(
            exit_code=manifest.exit_code,
            failed_step=manifest.failed_step,
            error=manifest.error,
            seconds=manifest.seconds,
        )
    )
    _check_config(run)
    return run


def _document(public: Store, name: str) -> bytes:
    data = public.read_up_to(name, _MOST)
    if data is None:
        raise ArtifactError(
            f"{name} is larger than {_MOST >> 20} MiB and not a document of a run. Check who may "
            "write to the public root."
        )
    return data


def _manifest(public: Store, run_id: str) -> _Manifest:
    try:
        return _Manifest.model_validate_json(_document(public, f"{run_id}/{MANIFEST}"))
    except ValueError as error:
        raise ArtifactError(
            f"{run_id}/{MANIFEST} is not the manifest of a published run. Publish the run again "
            f"with `fedemb run --resume {run_id}` on its machine."
        ) from error


def _check_config(run: RunDirectory) -> None:
    """Compares the configuration with the digest in the signed privacy report, if there is one."""
    try:
        report = signed_report(run)
    except FedEmbError:
        return
    if report is not None and report.body.provenance.config_sha != config_digest(run.config()):
        raise ArtifactError(
            f"The published configuration of run {run.run_id} is not the one that its signed "
            "privacy report names. Check who may write to the public root."
        )
