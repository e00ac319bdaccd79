"""Lineage: which step took what and gave what, as OpenLineage events in a JSON-lines file.

The file is the default; where `OPENLINEAGE_URL` is set, the events are sent there as well (with
`OPENLINEAGE_API_KEY` and `OPENLINEAGE_ENDPOINT`, if the receiver wants them). A receiver that is
down costs a few seconds and a sentence in the log, never the run: the file has it all. Raw
artifacts appear by name, with the keyed commitment that the ledger holds, never by a plain digest.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.fedemb.errors import ArtifactError, InputError
from components.fedemb.evidence import Evidence
from components.fedemb.storage import open_store

PRODUCER = "urn:fedemb"
NAMESPACE = "fedemb"
FILE_NAME = "lineage.jsonl"
OUTPUT_NAME = "lineage"
"""What a pipeline calls the same file, as an output of account_privacy and gate_release."""
SEND_SECONDS = 3.0
"""How long a receiver may take to connect, or to answer one event."""
SEND_SECONDS_IN_ALL = 15.0
_log = logging.getLogger(__name__)
_NAME_SPACE_OF_RUNS = uuid.UUID("6f1f0b52-6a0e-5b5a-9a53-0f2b8f4d7a10")

Artifacts = Mapping[str, str | None]
"""Artifact name to digest or keyed commitment; None where there is none."""


@dataclass(frozen=True)
class StepLineage:
    """What one step took and gave."""

    step: str
    inputs: Artifacts
    outputs: Artifacts
    failed: bool = False


def emit(
    path: Path,
    run_id: str,
    steps: Iterable[StepLineage],
    *,
    config_sha: str,
    code_sha: str,
    time: datetime | None = None,
) -> None:
    """Writes one event per step: COMPLETE, or FAIL.

    Args:
      path: JSON-lines file; one that is there is replaced.
      run_id: name of the run, parent of all its steps.
      steps: in the order they ran.
      config_sha: digest of the configuration.
      code_sha: digest of the code.
      time: of the events; None takes the clock.
    """
    from openlineage.client import OpenLineageClient
    from openlineage.client.transport.file import FileConfig, FileTransport

    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    when = (time or datetime.now(UTC)).isoformat()
    events = [_event(run_id, step, when, config_sha, code_sha) for step in steps]
    file = FileTransport(FileConfig(log_file_path=str(path), append=True))
    client = OpenLineageClient(transport=file)
    for event in events:
        client.emit(event)
    if os.environ.get("OPENLINEAGE_URL"):
        problem = ["it did not answer in time"]
        sender = threading.Thread(
            target=lambda: problem.append(_send(os.environ["OPENLINEAGE_URL"], events)), daemon=True
        )
        sender.start()
        sender.join(SEND_SECONDS_IN_ALL)  # a receiver that answers byte by byte outlasts timeouts
        if problem[-1]:
            _log.warning(
                "lineage was not sent to the receiver of OPENLINEAGE_URL (%s); the run goes on, "
                "and the events are in %s",
                problem[-1],
                FILE_NAME,
            )


def _send(url: str, events: list[Any]) -> str:
    """Sends events to a receiver; the first that fails is the last. Returns why, or nothing."""
    from openlineage.client import OpenLineageClient
    from openlineage.client.transport.http import (
        ApiKeyTokenProvider,
        HttpConfig,
        HttpTransport,
        TokenProvider,
    )

    key = os.environ.get("OPENLINEAGE_API_KEY")
    try:
        config = HttpConfig(
            url=url,
            endpoint=os.environ.get("OPENLINEAGE_ENDPOINT", "api/v1/lineage"),
            timeout=SEND_SECONDS,
            retry={"total": 0},
            auth=ApiKeyTokenProvider({"apiKey": key}) if key else TokenProvider({}),
        )
        client = OpenLineageClient(transport=HttpTransport(config))
        for event in events:
            client.emit(event)
    except Exception as error:  # whatever a receiver does, the run goes on
        response = getattr(error, "response", None)
        return f"HTTP {response.status_code}" if response is not None else type(error).__name__
    return ""


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
        eventType=RunState.FAIL if step.failed else RunState.COMPLETE,
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
    evidence: Evidence,
    *,
    report_sha: str | None = None,
    verdict_sha: str | None = None,
    denied: bool = False,
    released: bool = False,
) -> list[StepLineage]:
    """The steps of a run, from its documents, as far as it came.

    Args:
      evidence: documents of the run.
      report_sha: of the privacy report, once there is one.
      verdict_sha: of the verdict, once there is one.
      denied: whether the verdict ended the run.
      released: whether a release follows. It has no digest here: it contains the lineage.
    """
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
        if verdict_sha is not None:
            verdict = {"verdict": verdict_sha}
            steps.append(StepLineage("gate_release", {**taken, **report}, verdict, denied))
            if released:
                last = {**verdict, **report, **model}
                steps.append(StepLineage("release_model", last, {"release": None}))
    return steps


def read_steps(uri: str | Path) -> list[StepLineage]:
    """Reads the events of a run.

    Args:
      uri: a lineage file, or what holds one: a run, a release; local, gs:// or s3://. Of several
        files the longest is taken: gate and release repeat and complete what was said before.

    Raises:
      InputError: there is no lineage at the address.
      ArtifactError: the file does not hold lines of OpenLineage events.
    """
    store = open_store(uri)
    name = FILE_NAME
    if store.local_root is not None and store.local_root.is_file():
        store, name = open_store(store.local_root.parent), store.local_root.name
    else:
        names = (FILE_NAME, OUTPUT_NAME)
        mine = (item for item in store.entries() if item.name.split("/")[-1] in names)
        found = max(mine, key=lambda item: item.size, default=None)
        if found is None:
            raise InputError(
                f"{uri} holds no {FILE_NAME}; it is written when the privacy report is made"
            )
        name = found.name
    try:
        events = [json.loads(line) for line in store.read(name).decode().splitlines()]
        return [
            StepLineage(
                event["job"]["name"],
                _read(event.get("inputs")),
                _read(event.get("outputs")),
                event["eventType"] == "FAIL",
            )
            for event in events
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{name} holds no lineage that can be read; take the file of a finished run"
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
        suffix = "" if step is None else f"  <- {step.step}" + (", failed" if step.failed else "")
        suffix += " (above)" if again and step is not None else ""
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
