"""Charges the ledger before private data is read, or refuses.

The step is idempotent: the same run with the same content gets the same reservation. The record
binds the plan, the configuration except its free sections, the code, the user blocks, and the
input's address and version. The trainer binds the data itself, by a keyed commitment, before round
0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kfp import dsl

from fedemb.config import ONE_COHORT, RunConfig
from fedemb.config.run import config_digest
from fedemb.data.input_version import fingerprint_input, local_path
from fedemb.documents.artifacts import Public
from fedemb.documents.plan import read_plan
from fedemb.errors import ConfigError, InputError, LedgerError, Refused
from fedemb.foundation.canonical_json import JsonObject
from fedemb.foundation.files import write_bytes
from fedemb.keys import KeyStore, commitment_key, reservation_key_name
from fedemb.ledger import (
    Ledger,
    Reservation,
    charged_content,
    check_high_water,
    ensure_policy_key,
    ensure_trust,
    init_policy,
    mark_high_water,
    open_ledger,
    read_trust,
    refuse_emptied,
    series_of,
    terms_of,
)
from fedemb.ledger.state import Attempt
from fedemb.ledger.terms import ReservedContent
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.release.decide import check_before_charge
from fedemb.runtime.provenance import code_digest
from fedemb.runtime.signed_inputs import check_public_backbone
from fedemb.runtime.step import Rights, step
from fedemb.runtime.step_context import StepContext
from fedemb.storage import open_store


@step(
    image="trainer",
    private=False,
    resources="embed",
    outputs={"reservation": Public},
    rights=Rights(
        input=("names",),
        ledger="append",
        signing=("ledger",),
        keys={"ledger": "create", "policy": "create", "reservation": "create"},
        rollback_anchor="append",
    ),
)
def reserve_budget(
    config: str,
    run_id: str,
    ledger: str,
    keys: str,
    privacy_plan: dsl.Input[dsl.Artifact],
    pretrained: dsl.Input[dsl.Model],
    reservation: dsl.Output[dsl.Artifact],
):
    """Charges the ledger before the first private byte is read, or refuses."""
    from fedemb.runtime.step import step_process
    from fedemb.steps.reserve_budget import run

    with step_process("reserve_budget", locals()) as context:
        entry = run(context)
        reservation.metadata.update(sequence=entry["sequence"], policy=entry["policy_id"])


_log = logging.getLogger(__name__)


def run(
    context: StepContext,
    *,
    input_fingerprint: str | None = None,
    attempt: int | None = None,
    rehearse: Callable[[RunConfig, MechanismPlan, Path], None] | None = None,
) -> JsonObject:
    """Reserves the budget of a run and creates the root key of its coins and noise.

    Args:
      context: reads `privacy_plan` and `pretrained`, so that a run that cannot start is not
          charged, and writes the signed `reservation`. A local ledger is created at first use; the
          owner creates a remote ledger with `fedemb ledger init`.
      input_fingerprint: address and version of the input; None takes `data.source` as it is now,
        see `fingerprint_input`.
      attempt: None continues the run's latest attempt; its number plus one starts another one,
        which is charged in addition.
      rehearse: rehearses a release on generated images; None: `backend_rounds.rehearse`.

    Raises:
      InputError: the address of the images is empty.
      ConfigError: the cohorts differ from those of the cohort column, or the column is missing.
      BudgetExceeded: the run, or every block with it, would exceed the cap.
      PlanMismatch: the run exists with different content, or is not part of a planned series; or
          the public backbone was made with another configuration.
      Refused: the policy has other terms; the gate would deny the release regardless of training
          (see `release.decide`); or the run id already has a root key.
      ArtifactError: the public backbone is missing, not the signed one, or not a valid backbone.
      SignatureInvalid: the plan is not signed by plan_privacy, or the public backbone not by
          pretrain_public.
      LedgerError: the ledger is older than its markers, or broken.
      StorageError: a store cannot be reached: nothing was charged.
    """
    config, run_id, keys = context.config, context.run_id, context.keys
    _check_cohorts(config)
    plan, document = read_plan(context.artifacts.privacy_plan, config)
    ledger = open_or_create(context.ledger_uri, keys, config, plan)
    check_high_water(ledger, keys, config.storage.rollback_anchor)
    ensure_policy_key(ledger, keys)
    found = _earlier(ledger, keys, run_id, attempt)
    reserved_at = found.reserve.sequence if found else None
    ledger.chain.trust.check(document, at=reserved_at)
    weights_sha = check_public_backbone(context, ledger.chain.trust, at=reserved_at).weights_sha
    if config.purpose == "release" and (found is None or found.void is not None):
        start = context.artifacts.pretrained / "backbone.keras", weights_sha
        check_before_charge(config, plan, ledger, run_id=run_id, start=start)
        (rehearse or _rehearse)(config, plan, start[0])
    bound = input_fingerprint or _bound_input(config, keys, run_id)
    content = _reserved_content(config, plan, bound)
    reservation = ledger.reserve(run_id=run_id, content=content, attempt=attempt)
    mark_high_water(ledger, keys, config.storage.rollback_anchor)  # before any root key
    _ensure_root_key(ledger, reservation, keys)
    record = ledger.attempt(reservation).reserve.document
    write_bytes(context.artifacts.reservation, record.data)
    _log_reservation(reservation)
    return record.json


def _earlier(ledger: Ledger, keys: KeyStore, run_id: str, attempt: int | None) -> Attempt | None:
    """Returns the state of an attempt in the ledger; None if it is not reserved yet.

    Raises:
      Refused: the run has a root key, but no reservation.
    """
    last = ledger.state.last_attempt(run_id) if attempt is None else attempt
    found = ledger.state.attempts.get((run_id, last))
    if found is None and keys.used(reservation_key_name(run_id, max(1, last))):
        raise Refused(
            f"Run id {run_id!r} already has a root key, of another policy or of a deleted "
            "ledger. Choose another run id."
        )
    return found


def _rehearse(config: RunConfig, plan: MechanismPlan, start: Path) -> None:
    from fedemb.release.released import save_for_users
    from fedemb.training.backend_rounds import rehearse  # loads the backend

    rehearse(config, plan, start, save_for_users)


def _reserved_content(config: RunConfig, plan: MechanismPlan, bound_input: str) -> ReservedContent:
    return {
        **charged_content(config, plan),
        "plan_sha": plan.digest,
        "config_sha": config_digest(config),
        "code_sha": code_digest(config),
        "input": bound_input,
    }


def _log_reservation(one: Reservation) -> None:
    if full := set(one.blocks_requested) - set(one.blocks):
        _log.warning(
            "%d of %d user blocks are full; their users are not sampled: %s",
            *(len(full), len(one.blocks_requested), ", ".join(sorted(full))),
        )
    _log.info(
        "reserved %d rounds for run %s, attempt %d, as record %d of policy %s",
        *(one.rounds, one.run_id, one.attempt, one.sequence, one.policy_id),
    )


def _ensure_root_key(ledger: Ledger, reservation: Reservation, keys: KeyStore) -> None:
    """Creates the key of an attempt's noise and coins, once, before its training is bound.

    Raises:
      LedgerError: a started training lost its key; another key would draw different noise.
    """
    attempt = ledger.attempt(reservation)
    name = reservation_key_name(reservation.run_id, reservation.attempt)
    if attempt.bind is None:
        with suppress(FileExistsError):
            keys.create(name)
    elif attempt.commit is None and not keys.used(name):
        raise LedgerError(
            f"The root key of run {reservation.run_id!r}, which started training, is missing "
            f"in {keys.uri}. A new key would draw other noise. Restore the key store, or start "
            "a run with a new id."
        )


def open_or_create(
    ledger_uri: str, keys: KeyStore, config: RunConfig, plan: MechanismPlan
) -> Ledger:
    """Opens the policy's ledger; a local one is created at first use.

    Raises:
      LedgerError: a remote ledger does not exist, or a local one is missing while its key exists.
      Refused: the ledger's policy has other terms.
    """
    store = open_store(ledger_uri)
    local = store.local_root is not None
    trust = ensure_trust(store, keys) if local else read_trust(store)
    policy_id = config.policy.policy_id
    ledger = open_ledger(ledger_uri, policy_id, trust=trust)
    refuse_emptied(ledger, keys)
    ledger.unlock(keys)
    if not ledger.chain.records and not local:
        raise LedgerError(
            f"{store.uri} holds no ledger of policy {policy_id!r}; name the right store, or let "
            "its owner make one with `fedemb ledger init`"
        )
    if ledger.chain.records:
        ledger.check_terms(terms_of(config, ledger.terms.series))
    else:
        terms = terms_of(config, series_of(config, plan))
        init_policy(ledger, terms, keys, config.storage.rollback_anchor)
    return ledger


def _bound_input(config: RunConfig, keys: KeyStore, run_id: str) -> str:
    uri, key = config.data.source.uri, commitment_key(keys, config.policy.policy_id)
    bound, path = fingerprint_input(uri, key, run_id), local_path(uri)
    # A path that is missing here may be mounted in the partition step.
    if bound == uri and (path is None or path.exists()):
        raise InputError(
            f"there is nothing at data.source.uri={uri}; put the images there or name where they "
            "are. Nothing was charged now"
        )
    return bound


def _check_cohorts(config: RunConfig) -> None:
    """Rejects a cohort name that would assign the same users to another block."""
    cohorts = set(config.partition.cohorts)
    if config.data.source.columns.cohort is None:
        if cohorts != {ONE_COHORT}:
            raise ConfigError(
                f"partition.cohorts={sorted(cohorts)} without a cohort column would charge all "
                "users under another name; name data.source.columns.cohort, or leave out "
                "partition.cohorts"
            )
    elif ONE_COHORT in cohorts:
        raise ConfigError(
            f"partition.cohorts contains {ONE_COHORT!r}, the name for users without a cohort "
            "column. Set the cohorts of data.source.columns.cohort."
        )
