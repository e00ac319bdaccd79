"""Charges the ledger before the first private byte is read, or refuses.

The step may be repeated: the same run with the same content gets its reservation again. What the
record binds is the plan, the whole configuration, the code, the user blocks and the input's address
and version; the data itself is bound by the trainer, by a keyed commitment, before round 0.
"""

from __future__ import annotations

import dataclasses
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from components.fedemb.artifacts import canonical_json, json_digest
from components.fedemb.config import ONE_COHORT, PolicyConfig, RunConfig
from components.fedemb.errors import ConfigError, LedgerError, Refused
from components.fedemb.privacy.events import event_to_json
from components.fedemb.privacy.keys import (
    KeyStore,
    commit_to,
    commitment_key,
    open_key_store,
    reservation_key_name,
)
from components.fedemb.privacy.ledger import (
    Ledger,
    PolicyTerms,
    Schedule,
    blocks_of,
    ensure_trust,
    open_ledger,
    read_trust,
    write_reservation,
)
from components.fedemb.privacy.mechanism import MechanismPlan
from components.fedemb.privacy.plan_document import read_plan
from components.fedemb.privacy.signatures import Signer
from components.fedemb.provenance import code_digest, config_digest
from components.fedemb.storage import open_store

_log = logging.getLogger(__name__)


def run(
    config: RunConfig,
    *,
    plan_path: Path,
    run_id: str,
    ledger_uri: str,
    keys_uri: str,
    reservation_path: Path,
    input_fingerprint: str | None = None,
    attempt: int | None = None,
) -> dict[str, Any]:
    """Reserves the budget of a run and creates the root key of its coins and noise.

    Args:
      config: configuration of the run.
      plan_path: document written by plan_privacy.
      run_id: name of the run, the idempotency key.
      ledger_uri: root of the ledgers. A local one is made at first use; a remote one is made by
        its owner with `fedemb ledger init`.
      keys_uri: key store, apart from the ledger.
      reservation_path: signed document to write.
      input_fingerprint: address and version of the input; None takes `data.source` and, of local
        files, a keyed commitment to names and sizes.
      attempt: None continues the run's latest attempt; its number plus one starts another one,
        which is charged in addition.

    Returns:
      The reservation document.

    Raises:
      ConfigError: the cohorts are not those of the cohort column, or there is none.
      BudgetExceeded: every block would pass its cap.
      PlanMismatch: the run exists with another content, or is off a planned series.
      Refused: the policy has other terms, or asks for an audit that does not exist.
    """
    _check_cohorts(config)
    plan, _ = read_plan(plan_path, config)
    if config.policy.audit_level == "full" and config.purpose == "release":
        raise Refused(
            "policy.audit_level=full asks for an audit this version does not have, so nothing "
            "could be released; set audit_level: monitoring"
        )
    keys = open_key_store(keys_uri)
    ledger = open_or_create(ledger_uri, keys, config.policy, plan)
    content = {
        "purpose": config.purpose,
        "blocks_requested": blocks_of(config.partition),
        "event": event_to_json(plan.event()),
        "relation": plan.relation.name,
        "delta": config.policy.delta,
        "rounds": plan.rounds,
        "plan_sha": plan.digest,
        "config_sha": config_digest(config),
        "code_sha": code_digest(),
        "input": input_fingerprint or _fingerprint(config, keys, run_id),
    }
    reservation = ledger.reserve(run_id=run_id, content=content, attempt=attempt)
    full = set(reservation.blocks_requested) - set(reservation.blocks)
    if full:
        _log.warning(
            "%d of %d user blocks are full; their users leave sampling: %s",
            len(full),
            len(reservation.blocks_requested),
            ", ".join(sorted(full)),
        )
    if ledger.attempt(reservation).commit is None:
        with suppress(FileExistsError):
            keys.create(reservation_key_name(run_id, reservation.attempt))
    signed = write_reservation(reservation_path, reservation, Signer.load_or_create(keys, "ledger"))
    _log.info(
        "reserved %d rounds for run %s, attempt %d, as record %d of policy %s",
        reservation.rounds,
        run_id,
        reservation.attempt,
        reservation.sequence,
        reservation.policy_id,
    )
    return signed


def policy_terms(policy: PolicyConfig, plan: MechanismPlan | None) -> PolicyTerms:
    """The terms a configuration asks for; a planned series needs the plan.

    Raises:
      Refused: a planned series without a plan.
    """
    schedule = None
    if policy.composition == "planned":
        if plan is None:
            raise Refused("policy.composition=planned commits a plan; run plan_privacy first")
        schedule = Schedule(
            event_sha=json_digest(event_to_json(plan.event())),
            relation=plan.relation.name,
            runs=policy.planned_runs,
        )
    return PolicyTerms(
        epsilon_cap=policy.epsilon_cap,
        delta=policy.delta,
        users_lower_bound=policy.users_lower_bound,
        composition=policy.composition,
        renyi_order=policy.renyi_order,
        audit_level=policy.audit_level,
        off_schedule=policy.off_schedule,
        schedule=schedule,
    )


def open_or_create(
    ledger_uri: str, keys: KeyStore, policy: PolicyConfig, plan: MechanismPlan | None
) -> Ledger:
    """Opens the policy's ledger; a local one is made at first use.

    Raises:
      LedgerError: a remote ledger was never made, or a local one is gone while its key exists.
      Refused: the ledger's policy has other terms.
    """
    store = open_store(ledger_uri)
    local = store.local_root is not None
    trust = ensure_trust(store, keys) if local else read_trust(store)
    signer = Signer.load_or_create(keys, "ledger")
    ledger = open_ledger(ledger_uri, policy.policy_id, signer=signer, trust=trust)
    terms = policy_terms(policy, plan)
    if not ledger.chain.records:
        lost = keys.exists(f"policy/{policy.policy_id}")
        ledger.refresh()
        if not ledger.chain.records and (lost or not local):
            raise LedgerError(
                f"{store.uri} holds no ledger of policy {policy.policy_id!r}"
                + (", but its key exists, so it was lost; restore it" if lost else "")
                + "; name the right store, or make one with `fedemb ledger init`"
            )
    if ledger.chain.records:
        ledger.check_terms(dataclasses.replace(terms, schedule=ledger.terms.schedule))
    else:
        ledger.create_policy(terms, Signer.load_or_create(keys, "policy"))
    return ledger


def _check_cohorts(config: RunConfig) -> None:
    """Refuses a cohort name that would give the same users another block."""
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
            f"partition.cohorts names {ONE_COHORT!r}, which stands for users without a cohort "
            "column; name the cohorts of data.source.columns.cohort"
        )


def _fingerprint(config: RunConfig, keys: KeyStore, run_id: str) -> str:
    """Address of the input and, of local files, a commitment to their names and sizes.

    The run's name is in it: equal commitments of two runs would tell that no data changed between.
    """
    uri = config.data.source.uri
    if "://" in uri and not uri.startswith("file://"):
        return uri
    root = Path(uri.removeprefix("file://"))
    found = [root] if root.exists() else sorted(root.parent.glob(root.name))
    files = [path for item in found for path in ([item] if item.is_file() else item.rglob("*"))]
    sizes = sorted((path.as_posix(), path.stat().st_size) for path in files if path.is_file())
    if not sizes:
        return uri
    key = commitment_key(keys, config.policy.policy_id)
    return f"{uri}#{commit_to(key, canonical_json([run_id, sizes]))}"
