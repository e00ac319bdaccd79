"""Lineage: which step took what and gave what, as OpenLineage events in a JSON-lines file.

The file is the default; where `OPENLINEAGE_URL` is set, the events are sent there as well. Raw
artifacts appear by name, with the keyed commitment that the ledger holds, never by a plain digest.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.fedemb.errors import ArtifactError, InputError
from components.fedemb.evidence import Evidence

PRODUCER = "urn:fedemb"
NAMESPACE = "fedemb"
FILE_NAME = "lineage.jsonl"
_NAME_SPACE_OF_RUNS = uuid.UUID("6f1f0b52-6a0e-5b5a-9a53-0f2b8f4d7a10")

Artifacts = Mapping[str, str | None]
"""Artifact name to digest or keyed commitment; None where there is none."""


@dataclass(frozen=True)
class StepLineage:
    """What one step took and gave."""

    step: str
    inputs: Artifacts
    outputs: Artifacts


def emit(
    path: Path,
    run_id: str,
    steps: Iterable[StepLineage],
    *,
    config_sha: str,
    code_sha: str,
    time: datetime | None = None,
) -> None:
    """Appends one COMPLETE event per step.

    Args:
      path: JSON-lines file.
      run_id: name of the run, parent of all its steps.
      steps: in the order they ran.
      config_sha: digest of the configuration.
      code_sha: digest of the code.
      time: of the events; None takes the clock.
    """
    from openlineage.client import OpenLineageClient
    from openlineage.client.transport.file import FileConfig, FileTransport

    path.parent.mkdir(parents=True, exist_ok=True)
    clients = [
        OpenLineageClient(transport=FileTransport(FileConfig(log_file_path=str(path), append=True)))
    ]
    if os.environ.get("OPENLINEAGE_URL"):
        clients.append(OpenLineageClient(url=os.environ["OPENLINEAGE_URL"]))
    when = (time or datetime.now(UTC)).isoformat()
    for step in steps:
        event = _event(run_id, step, when, config_sha, code_sha)
        for client in clients:
            client.emit(event)


def _event(run_id: str, step: StepLineage, when: str, config_sha: str, code_sha: str) -> Any:
    from openlineage.client.event_v2 import (
        InputDataset,
        Job,
        OutputDataset,
        Run,
        RunEvent,
        RunState,
    )
    from openlineage.client.facet_v2 import dataset_version_dataset, parent_run, tags_run

    def facets(digest: str | None) -> dict[str, Any]:
        if digest is None:
            return {}
        return {"version": dataset_version_dataset.DatasetVersionDatasetFacet(digest)}

    def name(artifact: str) -> str:
        return f"{run_id}/{artifact}"

    parent = parent_run.ParentRunFacet(
        run=parent_run.Run(runId=_uuid(run_id)),
        job=parent_run.Job(namespace=NAMESPACE, name="dp-fedemb"),
    )
    digests = {"config_sha": config_sha, "code_sha": code_sha, "run_id": run_id}
    tags = tags_run.TagsRunFacet(
        tags=[tags_run.TagsRunFacetFields(key, value, "fedemb") for key, value in digests.items()]
    )
    return RunEvent(
        eventType=RunState.COMPLETE,
        eventTime=when,
        run=Run(runId=_uuid(run_id, step.step), facets={"parent": parent, "tags": tags}),
        job=Job(namespace=NAMESPACE, name=step.step),
        producer=PRODUCER,
        inputs=[InputDataset(NAMESPACE, name(k), facets=facets(v)) for k, v in step.inputs.items()],
        outputs=[
            OutputDataset(NAMESPACE, name(k), facets=facets(v)) for k, v in step.outputs.items()
        ],
    )


def _uuid(*parts: str) -> str:
    return str(uuid.uuid5(_NAME_SPACE_OF_RUNS, "/".join(parts)))


def steps_of(
    evidence: Evidence, report_sha: str | None = None, bundle_sha: str | None = None
) -> list[StepLineage]:
    """The steps of a run, from its documents; report and bundle as far as they exist."""
    files, users = evidence.model_files, evidence.users.body
    plan = {"privacy_plan": evidence.plan.sha}
    reservation = {"reservation": evidence.reservation.sha}
    commitments = users.get("commitments", {})
    private = {
        "users": commitments.get("users"),
        "evaluation_identities": commitments.get("evaluation"),
    }
    manifest = {"users_manifest": evidence.users.sha}
    pretrained = {"pretrained": evidence.model.body.get("initial_weights_sha")}
    model = {"model": files.get("backbone.keras"), "rounds": files.get("rounds.jsonl")}
    audit, utility = {"audit_report": evidence.audit.sha}, {"utility_report": evidence.utility.sha}
    steps = [
        StepLineage("plan_privacy", {}, plan),
        StepLineage("reserve_budget", plan, reservation),
        StepLineage("pretrain_public", {"public_images": None}, pretrained),
        StepLineage(
            "partition_users", {"raw_images": None, **reservation}, {**private, **manifest}
        ),
        StepLineage(
            "train_dp_fedemb",
            {"users": private["users"], **plan, **reservation, **pretrained},
            model,
        ),
        StepLineage(
            "evaluate_embeddings",
            {"evaluation_identities": private["evaluation_identities"], **model, **pretrained},
            utility,
        ),
        StepLineage("audit_privacy", {**private, **model, **pretrained}, audit),
    ]
    if report_sha is not None:
        report = {"privacy_report": report_sha}
        taken = {**plan, **reservation, **manifest, **model, **audit, **utility}
        steps.append(StepLineage("account_privacy", taken, report))
        if bundle_sha is not None:
            steps.append(StepLineage("release_model", {**report, **model}, {"release": bundle_sha}))
    return steps


def read_steps(path: Path) -> list[StepLineage]:
    """Reads the events of a file.

    Raises:
      ArtifactError: missing, or not lines of OpenLineage events.
    """
    try:
        events = [json.loads(line) for line in path.read_text().splitlines()]
        return [
            StepLineage(
                event["job"]["name"], _read(event.get("inputs")), _read(event.get("outputs"))
            )
            for event in events
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path.name} holds no lineage that can be read; take the file of a finished run"
        ) from error


def _read(datasets: list[dict[str, Any]] | None) -> dict[str, str | None]:
    return {
        dataset["name"].rpartition("/")[2]: dataset.get("facets", {})
        .get("version", {})
        .get("datasetVersion")
        for dataset in datasets or []
    }


def tree_lines(steps: list[StepLineage], target: str | None = None) -> list[str]:
    """Draws the lineage of an artifact backwards, as lines of text.

    An artifact that was drawn before is named and not drawn again.

    Args:
      steps: of one run.
      target: artifact to start from; None takes what the last step gave.

    Raises:
      InputError: no step took or gave the target.
    """
    maker = {name: step for step in steps for name in step.outputs}
    digests = {name: sha for step in steps for name, sha in {**step.inputs, **step.outputs}.items()}
    if target is not None and target not in digests:
        raise InputError(f"no artifact is called {target}; there are {', '.join(sorted(digests))}")
    start = target or next(iter(steps[-1].outputs)) if steps else None
    lines: list[str] = []
    seen: set[str] = set()

    def draw(name: str, indent: str, branch: str, below: str) -> None:
        sha = digests.get(name)
        label = name + (f"  {sha[:12]}" if sha else "")
        step = maker.get(name)
        again = name in seen
        seen.add(name)
        suffix = "" if step is None else f"  <- {step.step}" + (" (above)" if again else "")
        lines.append(indent + branch + label + suffix)
        if step is None or again:
            return
        names = list(step.inputs)
        for position, item in enumerate(names):
            last = position == len(names) - 1
            draw(item, indent + below, "`- " if last else "|- ", "   " if last else "|  ")

    if start is not None:
        draw(start, "", "", "")
    return lines
