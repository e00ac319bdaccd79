"""A ledger, schedules that will charge it, and the budget of both."""

from datetime import UTC, datetime, timedelta

import yaml

from fedemb.keys.signatures import Signer
from fedemb.ledger import charged_content, ensure_trust, series_of, terms_of
from fedemb.ledger.external import declared_loss
from fedemb.pipelines.run.load_config import load_config, updated
from fedemb.pipelines.schedules.load import planned_runs
from fedemb.privacy.mechanisms.registry import plan_mechanism
from fedemb.steps.watch_budget.forecast import scheduled
from fedemb.steps.watch_budget.view import budget_view
from fedemb.storage import open_store
from tests.kit import ledger_kit
from tests.kit.schedule_kit import SCHEDULES

NOW = datetime(2027, 1, 6, 12, tzinfo=UTC)
CHANGES = {
    "policy.policy_id": "photos",
    "policy.composition": "renyi",
    "policy.epsilon_cap": 6.0,
    "mechanism.noise_multiplier": 4.0,
    "partition.blocks_per_cohort": 2,
}
DIGESTS = {name: "0" * 64 for name in ("plan_sha", "config_sha", "code_sha")}


class World:
    """A ledger in a folder, and schedules of runs that it will charge."""

    def __init__(self, root, **changes):
        self.config = updated(load_config("quickstart"), {**CHANGES, **changes})
        plan = plan_mechanism(self.config)
        self.kit = ledger_kit.Kit(str(root / "ledger"), str(root / "keys"), "photos")
        ensure_trust(open_store(self.kit.ledger_uri), self.kit.keys)
        self.ledger = self.kit.open()
        self.ledger.create_policy(terms_of(self.config, series_of(self.config, plan)), self.owner)
        self.content = {**charged_content(self.config, plan), **DIGESTS, "input": "photos"}
        self.schedules = root / "schedules"
        self.schedules.mkdir()
        self.changes = changes

    @property
    def owner(self):
        return Signer.load_or_create(self.kit.keys, "policy")

    def reserve(self, run_id, rounds=None, blocks=None):
        """Reserves a run, and commits it if the number of rounds is given."""
        content = {**self.content, "blocks_requested": blocks or self.content["blocks_requested"]}
        reservation = self.ledger.reserve(run_id=run_id, content=content)
        if rounds is not None:
            ledger_kit.bind(self.ledger, reservation, root=run_id)
            ledger_kit.commit(self.kit, self.ledger, reservation, rounds)
        return reservation

    def charge(self, name="survey", blocks=("all/0",), **form):
        event, delta = declared_loss(self.ledger.terms.renyi_order, **form)
        body = {"name": name, "blocks": list(blocks), "unit": "user", "relation": "REPLACE_ONE"}
        body |= {"event": event, "delta": delta, "declared": "rho", "reason": "quarterly survey"}
        self.ledger.charge(body, self.owner)

    def schedule(self, name="weekly", **fields):
        tree = yaml.safe_load((SCHEDULES / "example" / "weekly.yaml").read_text())
        tree |= {"name": name, "overrides": {**CHANGES, **self.changes}}
        tree |= {"end": NOW + timedelta(days=365), **fields}
        (self.schedules / f"{name}.yaml").write_text(yaml.safe_dump(tree))

    def view(self):
        found = scheduled(planned_runs(self.schedules), self.ledger, NOW)
        return budget_view(self.ledger, NOW, found.due, found.names, found.problems), found.due
