"""A resumed training keeps its original users, also those deleted at the source since."""

import json

import pytest

from fedemb.documents.artifacts import RunArtifacts
from fedemb.errors import PlanMismatch
from fedemb.ledger import read_reservation
from fedemb.runtime.step_context import StepContext
from fedemb.steps import partition_users, plan_privacy, reserve_budget
from tests.kit.ledger_kit import connect
from tests.kit.pipeline_runs.partition_run import (
    make_config,
    rows_of,
    write_parquet,
)
from tests.kit.public_start import sign_start


class Team:
    """A run up to its partition, and a user who asks to be deleted."""

    def __init__(self, root):
        self.root = root
        self.config = make_config(write_parquet(root / "images.parquet", rows_of(30)))
        plan_privacy.run(self.context())
        sign_start(self.context())
        reserve_budget.run(self.context())
        self.manifest = partition_users.run(self.context())

    def context(self):
        names = ("privacy_plan", "reservation", "users")
        stores = {name: str(self.root / name) for name in ("private_root", "ledger", "keys")}
        documents = {name: self.root / f"{name}.json" for name in names}
        artifacts = RunArtifacts(**documents, pretrained=self.root / "pretrained")
        return StepContext(artifacts, config=self.config, run_id="monday", **stores)

    def begin(self):
        """Binds, as the trainer does before its first round; again it must be the same."""
        context = self.context()
        ledger = connect(context.ledger_uri, context.keys_uri, self.config.policy.policy_id)
        manifest = json.loads((self.root / "users.json").read_text())
        ledger.bind(
            read_reservation(context.artifacts.reservation),
            inputs_sha="1" * 64,
            commitments=manifest["commitments"],
            private_root="2" * 64,
        )


def test_training_that_began_keeps_its_users_though_the_source_changed(tmp_path):
    """Planted last: a partition that reads only the data is of other photos than were charged."""
    made = Team(tmp_path)
    made.begin()
    write_parquet(tmp_path / "images.parquet", rows_of(29))
    assert partition_users.run(made.context()) == made.manifest
    made.begin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition_users, "_begun_with", lambda *_: None)
        with pytest.raises(PlanMismatch, match="changed since the budget was reserved"):
            partition_users.run(made.context())
