"""`fedemb run --dry-run`: what a run would do and cost, from its configuration alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedemb.config import RunConfig
from fedemb.config.data import BUILTIN
from fedemb.data.sources import find_parts
from fedemb.ledger import Ledger, policies
from fedemb.partition.prepare import columns_of
from fedemb.pipelines.cli.ledger_summary import (
    admission,
    content_of,
    load,
    planned_series,
    would_admit,
)
from fedemb.pipelines.steps import PIPELINE
from fedemb.privacy.prices import guarantee_of
from fedemb.privacy.registry import plan_mechanism
from fedemb.release.plan import check_first_run
from fedemb.storage import open_store


def dry_run(config: RunConfig, taken_over: Sequence[str], charged: bool) -> Iterator[str]:
    """Returns what a run would do, as lines. No image is read and nothing is written.

    Raises:
      LedgerError: the ledger in the bucket was never made, or is broken.
    """
    reused = f"; reused: {', '.join(taken_over)}" if taken_over else ""
    yield f"steps: {len(PIPELINE.steps) - len(taken_over)} would run{reused}"
    uri = config.data.source.uri
    if not charged:
        check_images(config)
    yield f"images: {uri}"
    if config.purpose == "simulation":
        yield "guarantee: none (simulation)"
    else:
        check_first_run(config)
        yield f"guarantee: {guarantee_of(plan_mechanism(config), config.policy.delta)}"
        if (planned := planned_series(config)) and planned[0] > 1:
            yield f"  all {planned[0]} planned runs together: epsilon {planned[1]:.4g}"
        if config.pretraining.kind == "import":
            yield (
                "warning: the gate denies this release after training unless the policy owner "
                "waives pretraining_overlap_unchecked"
            )
    yield f"budget: {'charged before; resuming costs nothing' if charged else _budget(config)}"


def check_images(config: RunConfig) -> None:
    """Checks the files of a local source and the names of their columns; reads no image.

    Raises:
      InputError: there is nothing, or a column is missing.
    """
    source = config.data.source
    if source.uri != BUILTIN and open_store(source.uri).local_root is not None:
        find_parts(source, columns_of(config))


def refusal(config: RunConfig) -> str | None:
    """Why a new run would be refused as it stands; None: it would not.

    Checked before a run starts: its public pretraining comes before its reservation, and takes
    long.

    Raises:
      ConfigError: it costs more than its policy may ever spend.
      InputError: as `check_images`.
    """
    check_images(config)
    check_first_run(config)
    ledger = _begun(config)
    return None if ledger is None else would_admit(ledger, config, content_of(config))[1]


def _begun(config: RunConfig) -> Ledger | None:
    """Returns the ledger of a policy; None: a local folder without this policy."""
    if config.storage.ledger is None:
        return None
    store, policy_id = open_store(config.storage.ledger), config.policy.policy_id
    if store.local_root is not None and policy_id not in policies(store):
        return None
    return load(config.storage.ledger, policy_id, None, signatures=False)


def _budget(config: RunConfig) -> str:
    ledger, policy = config.storage.ledger, config.policy
    new = f"a new ledger, which lets epsilon grow to {policy.epsilon_cap:g}"
    if config.purpose == "simulation":
        new = "a simulation costs nothing; it would create a new ledger"
    if ledger is None:
        return f"{new}, for this run alone"
    begun = _begun(config)
    if begun is None:
        others = ", ".join(policies(open_store(ledger)))
        beside = f", beside {others}: on the same users epsilons add up" if others else ""
        terms = f"{policy.policy_id} has the terms of this configuration for its life"
        return f"{new}, in {ledger}{beside}; policy {terms}"
    return admission(begun, config)
