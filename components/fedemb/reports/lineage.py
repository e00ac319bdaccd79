"""Lineage: inputs and outputs of each step, as OpenLineage events in a JSON-lines file.

account_privacy, gate_release and release_model write the file, each with all steps so far. If
`OPENLINEAGE_URL` is set, the events are also sent there (with `OPENLINEAGE_API_KEY` and
`OPENLINEAGE_ENDPOINT`, if the receiver needs them), unless `OPENLINEAGE_DISABLED` is `true`. No
other OpenLineage setting is read. An unavailable receiver costs each of these steps at most
`SEND_SECONDS_IN_ALL` and one log message, and never fails the run.

On a cluster, kfp keeps no outputs of a failed step, so the file of a denied run stays in its pod
and only the receiver has its events. A local run keeps the file.

The lineage does not use ML Metadata or any other Kubeflow store. Parents across runs are inputs:
the policy, the ledger record of the reservation, the last ledger head in the report, the imported
public backbone, and the previous release. Each parent has the same identifier in every run
(OpenLineage's symlinks facet), so that a receiver can join the runs.

Raw artifacts appear by name, at most with the keyed commitment from the ledger, never with a plain
digest. Other digests describe documents and files as a step read them; before the gate they are not
verified. After a denial, the gate's events contain only the digests of report and verdict, because
rejected documents may contain arbitrary data.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedemb.documents.evidence import Evidence
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.foundation.addresses import in_time
from fedemb.foundation.document import Written
from fedemb.foundation.files import write_bytes
from fedemb.ledger import Reservation

if TYPE_CHECKING:
    from openlineage.client.event_v2 import RunEvent

    from fedemb.config import RunConfig
    from fedemb.runtime.step import Step

PRODUCER = "urn:fedemb"
NAMESPACE = "fedemb"
FILE_NAME = "lineage.jsonl"
SEND_SECONDS = 3.0
"""Timeout in seconds for a receiver to connect, or to answer one event."""
SEND_SECONDS_IN_ALL = 15.0
_log = logging.getLogger(__name__)
_NAME_SPACE_OF_RUNS = uuid.UUID("6f1f0b52-6a0e-5b5a-9a53-0f2b8f4d7a10")

PIPELINE = "fedemb"
"""Name of the pipeline, the OpenLineage parent of the steps."""
SOURCES = {"private": "raw_images", "public": "public_images"}
"""`Rights.input` -> artifact name of the images."""
FOLDERS = {"users": "users", "evaluation": "evaluation_identities"}
"""Private-root folders that one step writes and others read -> artifact name."""
ARTIFACTS = {"users": ("users_manifest",), "model": ("model", "rounds")}
"""Step artifacts with a different name here, or two parts; other artifacts keep their name."""

Artifacts = Mapping[str, str | None]
"""Artifact name to digest or keyed commitment; None without either."""
Parents = Mapping[str, str]
"""Artifact name to its identifier in all runs, such as `releases/glyphs/1.0`."""


@dataclass(frozen=True)
class StepLineage:
    """Inputs and outputs of one step."""

    step: str
    inputs: Artifacts
    outputs: Artifacts
    failed: bool = False
    parents: Parents = field(default_factory=dict)
    """Identifiers of the inputs and outputs that are shared with other runs."""


def write(
    path: Path,
    run_id: str,
    steps: Iterable[StepLineage],
    *,
    config_sha: str,
    code_sha: str | None,
    time: datetime | None = None,
) -> None:
    """Writes one event per step, COMPLETE or FAIL; replaces an existing file.

    The OpenLineage client is not used for the file, because environment settings change its output,
    and the file is signed and published.

    Raises:
      InputError: the path is not a valid file path.
      StorageError: the disk is full or the folder is not writable.
    """
    from openlineage.client.serde import Serde

    when = (time or datetime.now(UTC)).isoformat()
    shas = {"config_sha": config_sha, "code_sha": code_sha, "run_id": run_id}
    tags = {key: value for key, value in shas.items() if value is not None}
    lines = [Serde.to_json(_event(run_id, step, when, tags)) + "\n" for step in steps]
    write_bytes(path, "".join(lines).encode())


def send(read: Callable[[], bytes]) -> None:
    """Reads a lineage file and sends its events, if a receiver is set; errors are warnings."""
    url = os.environ.get("OPENLINEAGE_URL")
    if not url or os.environ.get("OPENLINEAGE_DISABLED", "").strip().lower() == "true":
        return
    # A slow receiver can exceed per-read timeouts.
    if problem := in_time(lambda: _send(url, read), SEND_SECONDS_IN_ALL):
        _log.warning(
            "lineage was not sent to the receiver of OPENLINEAGE_URL (%s); the run continues, and "
            "its lineage file has the events",
            problem,
        )


def _send(url: str, read: Callable[[], bytes]) -> str:
    """Sends events until the first failure; returns its reason, or an empty string."""
    from openlineage.client.transport import http

    key = os.environ.get("OPENLINEAGE_API_KEY")
    try:
        config = http.HttpConfig(
            url=url,
            endpoint=os.environ.get("OPENLINEAGE_ENDPOINT", "api/v1/lineage"),
            timeout=SEND_SECONDS,
            retry={"total": 0},
            auth=http.ApiKeyTokenProvider({"apiKey": key}) if key else http.TokenProvider({}),
        )
        transport = http.HttpTransport(config)
        for line in read().splitlines():
            transport.emit(json.loads(line))
    except Exception as error:  # a receiver error must not fail the run
        response = getattr(error, "response", None)
        return f"HTTP {response.status_code}" if response is not None else type(error).__name__
    return ""


def _event(run_id: str, step: StepLineage, when: str, tags: Mapping[str, str]) -> RunEvent:
    from openlineage.client import event_v2, facet_v2

    def facets(artifact: str, digest: str | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if digest is not None:
            version = facet_v2.dataset_version_dataset.DatasetVersionDatasetFacet(digest)
            found["version"] = version
        if (known_as := step.parents.get(artifact)) is not None:
            kind, links = known_as.partition("/")[0], facet_v2.symlinks_dataset
            same = links.Identifier(namespace=NAMESPACE, name=known_as, type=kind)
            found["symlinks"] = links.SymlinksDatasetFacet(identifiers=[same])
        return found

    def named(artifacts: Artifacts) -> Iterator[dict[str, Any]]:
        for artifact, digest in artifacts.items():
            name, own = f"{run_id}/{artifact}", facets(artifact, digest)
            yield {"namespace": NAMESPACE, "name": name, "facets": own}

    ours, labels = facet_v2.parent_run, facet_v2.tags_run
    parent = ours.ParentRunFacet(
        run=ours.Run(runId=_uuid(run_id)), job=ours.Job(namespace=NAMESPACE, name=PIPELINE)
    )
    tagged = labels.TagsRunFacet(
        tags=[labels.TagsRunFacetFields(key, value, "fedemb") for key, value in tags.items()]
    )
    return event_v2.RunEvent(
        eventType=event_v2.RunState.FAIL if step.failed else event_v2.RunState.COMPLETE,
        eventTime=when,
        run=event_v2.Run(_uuid(run_id, step.step), facets={"parent": parent, "tags": tagged}),
        job=event_v2.Job(namespace=NAMESPACE, name=step.step),
        producer=PRODUCER,
        inputs=[event_v2.InputDataset(**of) for of in named(step.inputs)],
        outputs=[event_v2.OutputDataset(**of) for of in named(step.outputs)],
    )


def _uuid(*parts: str) -> str:
    return str(uuid.uuid5(_NAME_SPACE_OF_RUNS, "/".join(parts)))


def _known_digests(evidence: Evidence, report: PrivacyReport | None) -> Artifacts:
    """Returns the digest of each artifact before the verdict; None: no digest is public."""
    commitments = report and report.provenance.commitments
    return {
        "privacy_plan": evidence.plan.sha,
        "reservation": evidence.reservation.sha,
        "users": commitments and commitments.users,
        "evaluation_identities": commitments and commitments.evaluation,
        "users_manifest": evidence.users.sha,
        "pretrained": evidence.model.body.initial_weights_sha,
        "model": evidence.model_files.get("backbone.keras"),
        "rounds": evidence.model_files.get("rounds.jsonl"),
        "audit_report": evidence.audit.sha,
        "utility_report": evidence.utility.sha,
        "raw_images": None,
        "public_images": None,
        "ledger_record": evidence.reservation.sha,
        "ledger_head": report and report.cumulative.ledger_head,
    }


def steps_of(
    evidence: Evidence,
    steps: Sequence[Step],
    report: Written[PrivacyReport],
    *,
    verdict: str | None = None,
    verified: bool = True,
    denied: bool = False,
) -> list[StepLineage]:
    """Returns the inputs and outputs of a run's steps: edges by declaration, digests by document.

    Private data is an input of every step that has permission to read it.

    Args:
      evidence: documents of the run.
      steps: declarations of the steps that ran, see `step.leading_to`. The release has no digest
          here, because it contains the lineage.
      report: the signed report.
      verdict: digest of the verdict; None: no verdict yet.
      verified: whether ledger head and commitments of the report were compared with the ledger; if
          not, they are omitted.
      denied: whether the verdict ended the run. If so, only report and verdict have a digest.
    """
    known: dict[str, str | None] = {
        "privacy_report": report.sha,
        "verdict": verdict,
        "release": None,
    }
    found = _known_digests(evidence, report.body if verified else None)
    known |= dict.fromkeys(found) if denied else found
    parents = parents_of(evidence.config, evidence.reservation.body.run_id)
    known |= dict.fromkeys(parents.keys() - known.keys())
    shared = {} if denied else parents

    def told(step: Step, right: str, artifacts: Iterable[str]) -> Artifacts:
        names = [SOURCES[kind] for kind in step.rights.input if kind in SOURCES and right == "read"]
        names += [
            name for folder, name in FOLDERS.items() if step.rights.private.get(folder) == right
        ]
        names += [part for name in artifacts for part in ARTIFACTS.get(name, (name,))]
        if right == "read":
            names += [name for name in _PARENTS.get(step.group, ()) if name in parents]
        names += [name for name, place in _LEDGER.items() if place == (step.name, right)]
        return {name: known[name] for name in names if name in known}

    def shared_by(*held: Artifacts) -> Parents:
        return {name: shared[name] for each in held for name in each if name in shared}

    drawn: list[StepLineage] = []
    for step in steps:
        taken, given = told(step, "read", step.inputs), told(step, "write", step.outputs)
        failed = denied and step is steps[-1]
        drawn.append(StepLineage(step.name, taken, given, failed, shared_by(taken, given)))
    return drawn


_PARENTS = {
    "plan": ("policy",),
    "pretrain": ("backbone_config",),
    "evaluate": ("previous_release",),
}
"""Group of a step -> its inputs from outside the run."""
_LEDGER = {"ledger_record": ("reserve_budget", "write"), "ledger_head": ("account_privacy", "read")}
"""State of the ledger -> the step that writes it, or that prices the run by it."""


def parents_of(config: RunConfig, run_id: str) -> Parents:
    """Returns the identifiers of the artifacts that a run shares with other runs."""
    found = {"policy": f"policies/{config.policy.policy_id}"}
    start = config.pretraining.import_path
    if config.pretraining.kind == "import" and start is not None:
        folder, _, name = str(start).rpartition("/")
        found["backbone_config"] = _release(folder) if name == "backbone.keras" else f"files/{name}"
    if config.evaluation.previous_release is not None:
        found["previous_release"] = _release(str(config.evaluation.previous_release))
    found["release"] = "releases/" + "/".join(config.released_as(run_id))
    return found


def _release(address: str) -> str:
    """Returns the identifier of a release from its bundle address, which ends in name/version."""
    return "releases/" + "/".join(address.rstrip("/").split("/")[-2:])


def write_run(
    path: Path,
    evidence: Evidence,
    steps: Sequence[Step],
    report: Written[PrivacyReport],
    *,
    verdict: str | None = None,
    verified: bool = True,
    denied: bool = False,
    time: datetime | None = None,
) -> None:
    """Writes the lineage of a run so far.

    For arguments see `steps_of` and `write`, for errors see `write`.
    """
    told = steps_of(evidence, steps, report, verdict=verdict, verified=verified, denied=denied)
    write(
        path,
        evidence.reservation.body.run_id,
        told,
        config_sha=evidence.config_sha,
        code_sha=None if denied else Reservation.of(evidence.reservation).code_sha,
        time=time,
    )
