"""`fedemb run --dry-run`: what a run would do and cost, from its configuration alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedemb.config import RunConfig
from fedemb.ledger import policies
from fedemb.pipelines.cli.ledger_summary import admission, load
from fedemb.pipelines.steps import pipeline_of
from fedemb.privacy.mechanisms.registry import plan_mechanism
from fedemb.privacy.planning.prices import guarantee_of
from fedemb.storage import open_store


def dry_run(config: RunConfig, taken_over: Sequence[str], charged: bool) -> Iterator[str]:
    """What a run would do, in lines. No image is read and nothing is written.

    Args:
      config: of the run, checked.
      taken_over: steps that would not run again.
      charged: the run was charged before, so that going on with it costs nothing.

    Raises:
      LedgerError: the ledger in the bucket was never made, or is broken.
    """
    for step in pipeline_of(config).steps:
        yield f"{step}: {'taken over' if step in taken_over else 'would run'}"
    yield f"images: {config.data.source.uri}"
    if config.purpose == "simulation":
        yield "guarantee: none (simulation)"
    else:
        yield f"guarantee: {guarantee_of(plan_mechanism(config), config.policy.delta)}"
    yield f"budget: {'charged before; going on costs nothing' if charged else _budget(config)}"


def _budget(config: RunConfig) -> str:
    ledger, policy = config.storage.ledger, config.policy
    new = f"a new ledger, which lets epsilon grow to {policy.epsilon_cap:g}"
    if ledger is None:
        return f"{new}, for this run alone"
    store = open_store(ledger)
    if store.local_root is not None and policy.policy_id not in policies(store):
        return f"{new}, in {ledger}"
    return admission(load(ledger, policy.policy_id, None, signatures=False), config)
