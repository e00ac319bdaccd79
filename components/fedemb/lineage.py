"""Lineage: which step took what and gave what, as OpenLineage events in a JSON-lines file.

account_privacy, gate_release and release_model write the file, each the whole run as far as it
came. Where `OPENLINEAGE_URL` is set, its events are sent there as well (with `OPENLINEAGE_API_KEY`
and `OPENLINEAGE_ENDPOINT`, if the receiver wants them), unless `OPENLINEAGE_DISABLED` is `true`.
No other OpenLineage setting is read. A receiver that is down costs each of these steps at most
`SEND_SECONDS_IN_ALL` and a sentence in the log, never the run.

On a cluster kfp keeps no outputs of a step that fails, so the file of a denied run stays in its pod
and only the receiver has its events; a local run keeps it, and publishes it with
`--artifact-store`.

Raw artifacts appear by name, at most with the keyed commitment that the ledger holds, never by a
plain digest. Other digests are of documents and files as a step found them, not checked before the
gate; after a denial the gate's events have those of report and verdict alone, because rejected
documents may hold anything.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedemb.documents.artifacts import write_bytes
from fedemb.documents.evidence import Evidence
from fedemb.errors import ArtifactError, InputError
from fedemb.storage import Store, open_store

if TYPE_CHECKING:
    from openlineage.client.event_v2 import RunEvent

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

OF_TASK = {
    "embedding": ("dp-fedemb", "train_dp_fedemb", "evaluate_embeddings"),
    "classification": ("dp-sgd", "train_dp_sgd", "evaluate_classifier"),
}
"""`RunConfig.task` -> the pipeline that runs it, and its steps that train and evaluate."""

Artifacts = Mapping[str, str | None]
"""Artifact name to digest or keyed commitment; None where it has neither."""


@dataclass(frozen=True)
class StepLineage:
    """What one step took and gave."""

    step: str
    inputs: Artifacts
    outputs: Artifacts
    failed: bool = False


def write(
    path: Path,
    run_id: str,
    steps: Iterable[StepLineage],
    *,
    pipeline: str,
    config_sha: str,
    code_sha: str | None,
    time: datetime | None = None,
) -> None:
    """Writes one event per step: COMPLETE, or FAIL.

    No OpenLineage client writes it: one drops and adds what settings around the run tell it to, and
    the file is signed and published.

    Args:
      path: JSON-lines file; one that is there is replaced.
      run_id: name of the run, parent of all its steps.
      steps: in the order they ran.
      pipeline: whose steps they are.
      config_sha: digest of the configuration.
      code_sha: digest of the code; None leaves it out.
      time: of the events; None takes the clock.

    Raises:
      InputError: the path cannot be one of a file.
      StorageError: the disk is full or the folder may not be written.
    """
    from openlineage.client.serde import Serde

    when = (time or datetime.now(UTC)).isoformat()
    shas = {"config_sha": config_sha, "code_sha": code_sha, "run_id": run_id}
    tags = {key: value for key, value in shas.items() if value is not None}
    lines = [Serde.to_json(_event(run_id, pipeline, step, when, tags)) + "\n" for step in steps]
    write_bytes(path, "".join(lines).encode())


def send(read: Callable[[], bytes]) -> None:
    """Sends the events of a lineage file, if there is a receiver; what goes wrong is a warning.

    Args:
      read: gives the file; called only where there is a receiver.
    """
    url = os.environ.get("OPENLINEAGE_URL")
    if not url or os.environ.get("OPENLINEAGE_DISABLED", "").strip().lower() == "true":
        return
    problem = ["it did not answer in time"]
    sender = threading.Thread(target=lambda: problem.append(_send(url, read)), daemon=True)
    sender.start()
    sender.join(SEND_SECONDS_IN_ALL)  # a receiver that answers byte by byte outlasts timeouts
    if problem[-1]:
        _log.warning(
            "lineage was not sent to the receiver of OPENLINEAGE_URL (%s); the run goes on, and "
            "the events are in its lineage file",
            problem[-1],
        )


def _send(url: str, read: Callable[[], bytes]) -> str:
    """Sends events to a receiver; the first that fails is the last. Returns why, or nothing."""
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
        transport = HttpTransport(config)
        for line in read().splitlines():
            transport.emit(json.loads(line))
    except Exception as error:  # whatever a receiver does, the run goes on
        response = getattr(error, "response", None)
        return f"HTTP {response.status_code}" if response is not None else type(error).__name__
    return ""


def _event(
    run_id: str, pipeline: str, step: StepLineage, when: str, tags: Mapping[str, str]
) -> RunEvent:
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
        job=parent_run.Job(namespace=NAMESPACE, name=pipeline),
    )
    tagged = tags_run.TagsRunFacet(
        tags=[tags_run.TagsRunFacetFields(key, value, "fedemb") for key, value in tags.items()]
    )
    return RunEvent(
        eventType=RunState.FAIL if step.failed else RunState.COMPLETE,
        eventTime=when,
        run=Run(runId=_uuid(run_id, step.step), facets={"parent": parent, "tags": tagged}),
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
    report_sha: str,
    commitments: Artifacts,
    verdict_sha: str | None = None,
    denied: bool = False,
    released: bool = False,
) -> list[StepLineage]:
    """The steps of a run, from its documents, as far as it came.

    Args:
      evidence: documents of the run.
      report_sha: of the privacy report.
      commitments: keyed, to `users` and `evaluation`, as the ledger holds them; what was not
        compared with it is left out.
      verdict_sha: of the verdict, once there is one.
      denied: whether the verdict ended the run. Then only report and verdict have a digest.
      released: whether a release follows. It has no digest here: it contains the lineage.
    """
    files = evidence.model_files
    _, train, evaluate = OF_TASK[evidence.config.task]
    plan = {"privacy_plan": evidence.plan.sha}
    reservation = {"reservation": evidence.reservation.sha}
    private = {
        "users": commitments.get("users"),
        "evaluation_identities": commitments.get("evaluation"),
    }
    manifest = {"users_manifest": evidence.users.sha}
    pretrained = {"pretrained": evidence.model.body.initial_weights_sha}
    model = {"model": files.get("backbone.keras"), "rounds": files.get("rounds.jsonl")}
    audit, utility = {"audit_report": evidence.audit.sha}, {"utility_report": evidence.utility.sha}
    report, verdict = {"privacy_report": report_sha}, {"verdict": verdict_sha}
    taken = {**plan, **reservation, **manifest, **model, **audit, **utility}
    steps = [
        StepLineage("plan_privacy", {}, plan),
        StepLineage("reserve_budget", plan, reservation),
        StepLineage("pretrain_public", {"public_images": None}, pretrained),
        StepLineage(
            "partition_users", {"raw_images": None, **reservation}, {**private, **manifest}
        ),
        StepLineage(
            train,
            {"users": private["users"], **plan, **reservation, **pretrained},
            model,
        ),
        StepLineage(
            evaluate,
            {"evaluation_identities": private["evaluation_identities"], **model, **pretrained},
            utility,
        ),
        StepLineage("audit_privacy", {**private, **model, **pretrained}, audit),
        StepLineage("account_privacy", taken, report),
    ]
    if verdict_sha is not None:
        steps.append(StepLineage("gate_release", {**taken, **report}, verdict, denied))
    if released:
        steps.append(
            StepLineage("release_model", {**verdict, **report, **model}, {"release": None})
        )
    if denied:
        known = {*report, *verdict}
        steps = [
            replace(step, inputs=_only(known, step.inputs), outputs=_only(known, step.outputs))
            for step in steps
        ]
    return steps


def _only(known: set[str], artifacts: Artifacts) -> Artifacts:
    return {name: sha if name in known else None for name, sha in artifacts.items()}


def write_run(
    path: Path,
    evidence: Evidence,
    *,
    report_sha: str,
    commitments: Artifacts,
    verdict_sha: str | None = None,
    denied: bool = False,
    released: bool = False,
) -> list[StepLineage]:
    """Writes the lineage of a run as far as it came, and returns its steps.

    Arguments are those of `steps_of`, errors those of `write`.
    """
    steps = steps_of(
        evidence,
        report_sha=report_sha,
        commitments=commitments,
        verdict_sha=verdict_sha,
        denied=denied,
        released=released,
    )
    reserved = evidence.reservation.body
    code_sha = None if denied else reserved.code_sha
    write(
        path,
        reserved.run_id,
        steps,
        pipeline=OF_TASK[evidence.config.task][0],
        config_sha=evidence.config_sha,
        code_sha=code_sha,
    )
    return steps


def read_steps(uri: str | Path) -> list[StepLineage]:
    """Reads the events of a run.

    Args:
      uri: a lineage file, or what holds one: a run, a release; local, gs:// or s3://. Of several
        files the one with most steps is taken: gate and release repeat and complete what was said
        before.

    Raises:
      InputError: there is no lineage at the address.
      ArtifactError: a file does not hold lines of OpenLineage events.
    """
    store = open_store(uri)
    if store.local_root is not None and store.local_root.is_file():
        return _read_file(open_store(store.local_root.parent), store.local_root.name)
    ours = (FILE_NAME, OUTPUT_NAME)
    names = [item.name for item in store.entries() if item.name.split("/")[-1] in ours]
    if not names:
        raise InputError(
            f"{uri} holds no {FILE_NAME}; it is written when the privacy report is made"
        )
    return max((_read_file(store, name) for name in names), key=len)


def _read_file(store: Store, name: str) -> list[StepLineage]:
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
