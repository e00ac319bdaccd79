"""partition_users: private images in, users by virtual client out.

Nothing in the data decides whether the step succeeds: bad records are dropped one by one and
counted privately. Only infrastructure fails the step, with one sentence: a missing file or
column, a file cut in the middle, a full disk, no permission. Output (all Raw but the manifest):

    <private_root>/<run_id>/users/       training users and the index of their virtual clients
    <private_root>/<run_id>/evaluation/  users (and classes) that never train
    <private_root>/<run_id>/rejects/     what was dropped, with the reason
    manifest                             public constants and keyed commitments, no count

The same input in any order, any split and on any number of workers gives the same bytes.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

# pyright: reportMissingTypeArgument=false
from kfp import dsl

from fedemb.config import RunConfig
from fedemb.config.run import config_digest
from fedemb.data.beam_engine import run_on_beam
from fedemb.data.identity import KeyRef
from fedemb.data.input_version import fingerprint_input
from fedemb.data.sources import find_parts
from fedemb.documents.artifacts import Public
from fedemb.documents.ledger_record import BindRecord
from fedemb.documents.model import UsersManifest
from fedemb.errors import ConfigError, InputError, PlanMismatch
from fedemb.foundation import step_logging as events
from fedemb.foundation.canonical_json import JsonFields, JsonObject
from fedemb.keys import commit_to_users, commitment_key
from fedemb.keys.trust import Signer, write_signed
from fedemb.ledger import Reservation
from fedemb.partition import shards
from fedemb.runtime.private_inputs import PrivateFolder, commitment_to
from fedemb.runtime.signed_inputs import read_reserved
from fedemb.runtime.step import Rights, step
from fedemb.runtime.step_context import StepContext


@step(
    image="cpu",
    once=True,
    resources="data",
    outputs={"users": Public},  # the manifest; the users are in the private root
    rights=Rights(
        private={
            "users": "write",
            "evaluation": "write",
            "rejects": "write",
            "partition": "write",  # its scratch, of which only the record of its starts stays
        },
        input=("private", "public"),
        ledger="read",
        signing=("partition",),
        keys={"policy": "read"},
    ),
)
def partition_users(
    config: str,
    run_id: str,
    private_root: str,
    ledger: str,
    keys: str,
    beam_options: list,
    reservation: dsl.Input[dsl.Artifact],
    users: dsl.Output[dsl.Dataset],
):
    """Validates images, splits users, hashes them into virtual clients; the output is a manifest.

    The users themselves stay below the private root.
    """
    from fedemb.runtime.step import step_process
    from fedemb.steps.partition_users import run

    with step_process("partition_users", locals()) as context:
        manifest = run(context)
        users.metadata.update(virtual_clients=manifest["virtual_clients"])


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Partitioned:
    """Output of one pass over the data. Counts are private."""

    root: str
    counts: dict[str, int]
    users: shards.Published
    evaluation: shards.Published


def run(context: StepContext) -> JsonObject:
    """Partitions the private images of a reserved run; returns the public manifest.

    Args:
      context: reads `reservation`, only users of whose blocks may train, and the policy's key;
        writes the public manifest `users`.

    Raises:
      InputError: a file or column is missing, or a file is damaged.
      StorageError: a store cannot be read or written.
      PlanMismatch: the reservation is of another run or configuration, or of an input that has
        changed since.
      SignatureInvalid: the reservation is not signed by reserve_budget.
      LedgerError: the ledger does not hold it.
    """
    config, run_id, keys = context.config, context.run_id, context.keys
    document = read_reserved(context)
    reservation = Reservation.of(document)
    mine = {"run_id": run_id, "config_sha": config_digest(config)}
    if reservation.config_sha != mine["config_sha"]:
        raise PlanMismatch(
            f"the reservation's config_sha is {reservation.config_sha!r}, this run's is "
            f"{mine['config_sha']!r}; reserve a budget for this run"
        )
    commitment = commitment_key(keys, config.policy.policy_id)
    commitments = _begun_with(context, reservation)
    if commitments is None:
        _check_input(config, reservation, commitment)
        partitioned = partition_images(
            config,
            keys=KeyRef(context.keys_uri, config.policy.policy_id),
            root=shards.run_root(context.private_root, run_id),
            blocks=frozenset(reservation.blocks),
            header=mine,
            pipeline_options=context.beam_options,
        )
        _check_input(config, reservation, commitment)  # nothing changed while it was read
        published = {"users": partitioned.users, "evaluation": partitioned.evaluation}
        commitments = {
            kind: commit_to_users(commitment, run_id, reservation.attempt, folder.digest)
            for kind, folder in published.items()
        }
    fields = {
        **mine,
        "reservation_sha": document.sha,
        "virtual_clients": config.partition.virtual_clients,
        "groupings": config.partition.groupings,
        "blocks": sorted(reservation.blocks),
        "image_size": config.model.image_size,
        "channels": config.model.channels,
        "commitments": commitments,
    }
    signer = Signer.newest(keys, "partition")
    _log.info(events.PARTITIONED, run_id)
    return write_signed(context.artifacts.users, UsersManifest.of_fields(fields), signer).json


def _begun_with(context: StepContext, reservation: Reservation) -> dict[str, str] | None:
    """Returns commitments to the users that a bound training started with, if all are still there.

    The run resumes with exactly these users: a new partition of photos that changed since would be
    another run, and what this one was charged would be lost.
    """
    bind = context.ledger.attempt(reservation).bind
    if bind is None:
        return None
    found: dict[str, str] = {}
    kinds: tuple[PrivateFolder, PrivateFolder] = ("users", "evaluation")
    for kind in kinds:
        commitment = commitment_to(context, kind, reservation.attempt)
        if commitment is None:
            return None
        found[kind] = commitment
    if found != bind.content(BindRecord).commitments:
        return None
    _log.info(events.TRAINING_STARTED, context.run_id)
    return found


def _check_input(config: RunConfig, reservation: Reservation, key: bytes) -> None:
    uri = config.data.source.uri
    if reservation.input != fingerprint_input(uri, key, reservation.run_id):
        raise PlanMismatch(
            f"The files at {uri} changed since the budget was reserved. Restore the files and "
            "resume, or start a run with a new id (`fedemb ledger void` returns this "
            "reservation)."
        )


def partition_images(
    config: RunConfig,
    *,
    keys: KeyRef,
    root: str,
    blocks: frozenset[str] | None,
    header: JsonFields,
    pipeline_options: Sequence[str] = (),
) -> Partitioned:
    """Makes one pass over the private images and writes the Raw folders below `root`.

    Raises:
      InputError, StorageError: as `run`.
    """
    from fedemb.partition.prepare import columns_of
    from fedemb.partition.transforms import Job, build, build_public

    _check(config)
    place = shards.Place.take(root)
    shards.clean(place)
    job = Job(config, keys, place, blocks, spread=bool(pipeline_options))
    source, public = config.data.source, config.pretraining.source
    parts = find_parts(source, columns_of(config))
    if public is not None:
        public_parts = find_parts(public, [])
        reading = partial(build_public, job=job, source=public, parts=public_parts)
        run_on_beam(reading, pipeline_options, "partitioning")
        job = replace(job, has_public_set=True)
    with tempfile.TemporaryDirectory(prefix="fedemb-private-") as folder:
        if not job.spread:
            job = replace(job, spill=str(Path(folder, "images")))
        run_on_beam(partial(build, job=job, parts=parts), pipeline_options, "partitioning")
    place.token.check()
    counts = shards.read_counts(root)
    evaluation = shards.publish(place, shards.EVALUATION, config, header)
    users = shards.publish(place, shards.USERS, config, {**header, "counts": counts})
    shards.drop_work(place)
    return Partitioned(root, counts, users, evaluation)


def _check(config: RunConfig) -> None:
    for name, source in (("data", config.data.source), ("pretraining", config.pretraining.source)):
        if source is not None and source.uri == "builtin":
            raise InputError(
                f"{name}.source.uri is 'builtin', which `fedemb run` draws first; draw it with "
                "`fedemb make-data` and name the file"
            )
    if config.data.source.columns.cohort is None and len(set(config.partition.cohorts)) > 1:
        raise ConfigError(
            f"partition.cohorts names {len(set(config.partition.cohorts))} cohorts, but "
            "data.source.columns.cohort is null; name the column"
        )
